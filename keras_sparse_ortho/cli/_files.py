"""The files that the commands read: models, and rows of data."""

import os
import zipfile
from pathlib import Path
from typing import Any

_EMPTY = "This file is empty: its writing or copying did not end"


class InputFileError(ValueError):
    """An input file that is missing, damaged, or of the wrong kind."""


def read_keras(path: str) -> Any:
    """The model in a `.keras` file, not compiled; InputFileError if there is none."""
    _check_exists(path)
    import keras

    try:
        rule = _why_not_keras(path)
        if rule is None:
            return keras.saving.load_model(path, compile=False)
    except Exception as error:  # a damaged archive or an unknown class: any kind
        raise InputFileError(
            "Keras must be able to load the model; its custom classes must be registered and "
            f"importable. Received: {path!r}, {type(error).__name__}: {error}"
        ) from error
    raise InputFileError(f"{rule}. Received: {path!r}")


def _why_not_keras(path: str) -> str | None:
    """What a file is that is no `.keras` file, and what to do about it; None if it is one."""
    with open(path, "rb") as stream:
        head = stream.read(8)
    if path.endswith(".weights.h5"):
        return (
            "A .weights.h5 file has weights only, no model. Build the model in Python, call its "
            "`load_weights`, and save the whole: model.save('model.keras')"
        )
    if head == b"\x89HDF\r\n\x1a\n" or path.endswith((".h5", ".hdf5")):
        return (
            "HDF5 files (.h5) are refused, because they may hold code that Keras would run. If you "
            "trust the file, load it in Python and save it anew: model.save('model.keras')"
        )
    if head[4:] == b"TFL3":
        return "This is a LiteRT file, which `kso bench` opens. Pass the .keras file of its model"
    if not head:
        return _EMPTY
    if not zipfile.is_zipfile(path):
        return "This is not a Keras model: a .keras file is a zip archive, as `model.save` writes"
    with zipfile.ZipFile(path) as archive:
        if "config.json" not in archive.namelist():
            return "This zip archive is not a Keras model, as it has no config.json"
    return None if path.endswith(".keras") else "The name of a Keras model must end in .keras"


def check_litert(path: str) -> None:
    """InputFileError, which says what the file is, if it is not a LiteRT file."""
    _check_exists(path)
    with open(path, "rb") as stream:
        head = stream.read(8)
    # A LiteRT file may end in a zip archive, of labels.
    if head[4:] == b"TFL3" or path.endswith((".gz", ".zst")):
        return
    rule = "This is not a LiteRT file, which has 'TFL3' in bytes 4 to 7"
    if not head:
        rule = _EMPTY
    elif zipfile.is_zipfile(path):
        rule = "This is a zip archive, as Keras models are: `kso export` makes a LiteRT file of one"
    raise InputFileError(f"{rule}. Received: {path!r}")


def read_rows(path: str | None) -> Any:
    """The array in a `.npy` file, or a dict of those in a `.npz` file; None for None."""
    if path is None:
        return None
    _check_exists(path)
    import numpy as np

    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        arrays = dict(found)
        if all(isinstance(one, np.ndarray) for one in arrays.values()):
            return arrays
        raise TypeError(f"a zip archive of {', '.join(arrays)}")
    except Exception as error:  # zipfile, EOF, pickled content: any kind
        raise InputFileError(
            "Pass rows as a .npy file, or as a .npz file with an array for each input by name. "
            f"Received: {path!r}, {type(error).__name__}: {error}"
        ) from error


def _check_exists(path: str) -> None:
    if Path(path).is_dir():
        raise InputFileError(f"A file is needed, but this is a folder. Received: {path!r}")
    if not Path(path).is_file():
        raise InputFileError(
            "There is no such file; check its name and the current folder. "
            f"Received: {path!r} in {os.getcwd()!r}"
        )
