"""Models of other packages, which `make test` does not install: `pip install keras-hub` first."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("keras_hub") else ["test_keras_hub.py"]
