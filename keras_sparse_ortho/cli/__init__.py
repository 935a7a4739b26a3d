"""The command line: `kso shrink`, `kso report`, `kso export` and `kso bench`."""

# Public; the other name is for the console command.
from keras_sparse_ortho.cli._files import InputFileError, read_keras, read_rows
from keras_sparse_ortho.cli._main import main, run

__all__ = ["main"]
