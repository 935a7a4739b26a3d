"""The fault suite (`make test-faults`): kills, full disks, damaged files, threads and memory.

Not collected by pytest: it runs real processes, for up to an hour. `python -m tests.faults --help`.
"""
