"""Imports Keras without TensorFlow's start-up messages: to be imported first.

TensorFlow writes some of them before it looks at `TF_CPP_MIN_LOG_LEVEL`, so standard error is kept
back meanwhile, and shown only if something fails.
"""

import os
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_before = os.dup(2)
with tempfile.TemporaryFile() as _kept:
    os.dup2(_kept.fileno(), 2)
    try:
        import keras  # noqa: F401
    except BaseException:
        _kept.seek(0)
        os.write(_before, _kept.read())
        raise
    finally:
        sys.stderr.flush()
        os.dup2(_before, 2)
        os.close(_before)
