"""Models of other packages, which `make test` does not install: see `make test-compat`."""

import importlib.util

NEEDED = ("grain", "keras_hub", "keras_rs", "keras_tuner")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, NEEDED)) else ["test_*.py"]
