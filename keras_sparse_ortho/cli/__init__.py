"""The command line: `kso report`, `kso export` and `kso bench`."""

from keras_sparse_ortho.cli._main import main

__all__ = ["main"]
