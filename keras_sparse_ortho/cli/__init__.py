"""The command line: `kso shrink`, `kso report`, `kso export` and `kso bench`."""

from keras_sparse_ortho.cli._main import main, run

# Public; the other name is for the console command.
__all__ = ["main"]
