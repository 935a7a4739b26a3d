"""The loaders of examples/data.py, for scripts in this folder."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

from data import Dataset, load

__all__ = ["Dataset", "load"]
