"""The files that the commands read."""

import os
from pathlib import Path
from typing import Any


class InputFileError(ValueError):
    """A file that is missing, damaged, or not of the kind that is needed."""


def read_keras(path: str) -> Any:
    """The model in a `.keras` file, not compiled.

    Raises:
        InputFileError: if there is no such file or Keras cannot load it.
    """
    _check_exists(path)
    import keras

    try:
        return keras.saving.load_model(path, compile=False)
    except Exception as error:  # of a damaged archive or an unknown class: any kind
        raise InputFileError(
            "Keras must be able to load the model; its custom classes must be registered and "
            f"importable. Received: {path!r}, {type(error).__name__}: {error}"
        ) from error


def read_rows(path: str | None) -> Any:
    """The array in a `.npy` file, or a dict of those in a `.npz` file; None for None.

    Raises:
        InputFileError: if it cannot be read.
    """
    if path is None:
        return None
    _check_exists(path)
    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
        return found if isinstance(found, np.ndarray) else dict(found)
    except Exception as error:  # zipfile, EOF, pickled content: any kind
        raise InputFileError(
            "Rows must stand in a .npy file, or in a .npz file by the names of the inputs. "
            f"Received: {path!r}, {type(error).__name__}: {error}"
        ) from error


def _check_exists(path: str) -> None:
    if not Path(path).is_file():
        raise InputFileError(
            "There is no such file; look at its name, and at the folder that you are in. "
            f"Received: {path!r} in {os.getcwd()!r}"
        )
