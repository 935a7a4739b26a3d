"""The command line: `kso report`, `kso export`, `kso bench`."""

from keras_sparse_ortho.cli._main import main as main
from keras_sparse_ortho.cli._main import parsed as parsed
from keras_sparse_ortho.cli._main import run as run

__all__ = ["main"]
