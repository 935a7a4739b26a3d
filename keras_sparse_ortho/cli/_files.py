"""The files that the commands read: models, and rows of data."""

import contextlib
import os
import zipfile
from pathlib import Path
from typing import Any

from keras_sparse_ortho._files import check_archive, check_not_an_input


class InputFileError(ValueError):
    """An input file that is missing, damaged, or of the wrong kind."""


def read_keras(path: str, *, compiled: bool = False) -> Any:
    """The model in a `.keras` file; InputFileError if there is none.

    Args:
        path: str. The file.
        compiled: bool. Whether the model is compiled as it was, if its loss and metrics can be
            loaded. Default: not compiled.
    """
    _check_exists(path)
    import keras

    with open(path, "rb") as stream:
        is_hdf5 = stream.read(8) == b"\x89HDF\r\n\x1a\n"
    rule = None
    if path.endswith(".weights.h5"):
        rule = (
            "A .weights.h5 file has weights only, no model. Build the model in Python, call its "
            "`load_weights`, and save the whole: model.save('model.keras')"
        )
    elif is_hdf5 or path.endswith((".h5", ".hdf5")):
        rule = (
            "HDF5 files (.h5) are refused, because they may hold code that Keras would run. If you "
            "trust the file, load it in Python and save it again: model.save('model.keras')"
        )
    elif not zipfile.is_zipfile(path):
        rule = "This is not a Keras model: a .keras file is a zip archive, as `model.save` writes"
    elif not path.endswith(".keras"):
        rule = "The name of a Keras model must end in .keras"
    if rule is not None:
        raise InputFileError(f"{rule}. Received: {path!r}")
    _check_unpacked_size(path)
    if compiled:
        # A loss or metric of the user's own module.
        with contextlib.suppress(Exception):
            return keras.saving.load_model(path)
    try:
        return keras.saving.load_model(path, compile=False)
    # A damaged archive or an unknown class: any kind.
    except Exception as error:
        raise InputFileError(
            "Keras must be able to load the model; its custom classes must be registered and "
            f"importable. Received: {path!r}, {type(error).__name__}: {error}"
        ) from error


def read_rows(path: str | None) -> Any:
    """The array in a `.npy` file, or a dict of those in a `.npz` file; None for None."""
    if path is None:
        return None
    _check_exists(path)
    import numpy as np

    if zipfile.is_zipfile(path):
        _check_unpacked_size(path)
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        arrays = dict(loaded)
        if all(isinstance(array, np.ndarray) for array in arrays.values()):
            return arrays
        raise TypeError(f"a zip archive of {', '.join(arrays)}")
    except Exception as error:  # zipfile, EOF, pickled content: any kind
        raise InputFileError(
            "Pass rows as a .npy file, or as a .npz file with an array for each input by name. "
            f"Received: {path!r}, {type(error).__name__}: {error}"
        ) from error


def _check_unpacked_size(path: str) -> None:
    """Refuses an archive of a few megabytes that would take gigabytes of memory."""
    try:
        check_archive(path)
    except zipfile.BadZipFile:
        return  # its reader has a better error
    except ValueError as error:
        raise InputFileError(str(error)) from error


def check_output(path: str, inputs: dict[str, str | None]) -> None:
    """Raises ValueError, before the work, if a command would replace one of its input files."""
    check_not_an_input("path", Path(path), inputs)


def _check_exists(path: str) -> None:
    if Path(path).is_dir():
        raise InputFileError(
            f"A file is needed, but this is a folder. Received: {path!r}"
        )
    if not Path(path).is_file():
        raise InputFileError(
            "There is no such file; check its name and the current folder. "
            f"Received: {path!r} in {os.getcwd()!r}"
        )
