"""The command line: `kso report`, `kso export` and `kso bench`."""

from keras_sparse_ortho.cli._files import InputFileError as InputFileError
from keras_sparse_ortho.cli._files import check_litert as check_litert
from keras_sparse_ortho.cli._files import read_keras as read_keras
from keras_sparse_ortho.cli._files import read_rows as read_rows
from keras_sparse_ortho.cli._main import main, parsed, run

__all__ = ["main", "parsed", "run"]
