"""The fault suite (`make test-faults`): kills, disks, damaged and crafted files, threads,
memory.

Not collected by pytest: it runs real processes, for up to an hour. `python -m tests.faults --help`.
`tests/test_configurations.py` runs a sample of the crafted files.
"""
