"""Sparse from the first step, exactly orthogonal at initialization, small when shipped.

`export` and `tfmot` need TensorFlow, and load it when they are used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from keras_sparse_ortho import analysis as analysis
from keras_sparse_ortho import budgets as budgets
from keras_sparse_ortho import callbacks as callbacks
from keras_sparse_ortho import errors as errors
from keras_sparse_ortho import initializers as initializers
from keras_sparse_ortho import layers as layers
from keras_sparse_ortho import models as models
from keras_sparse_ortho import orthogonal as orthogonal
from keras_sparse_ortho import parametrizations as parametrizations
from keras_sparse_ortho import saliency as saliency
from keras_sparse_ortho import schedules as schedules
from keras_sparse_ortho.analysis import report as report
from keras_sparse_ortho.budgets import Budget as Budget
from keras_sparse_ortho.layers import PrunableLayer as PrunableLayer
from keras_sparse_ortho.models import prunable_weights as prunable_weights
from keras_sparse_ortho.models import remove_channels as remove_channels
from keras_sparse_ortho.models import strip as strip
from keras_sparse_ortho.pruning import parametrize as parametrize
from keras_sparse_ortho.pruning import sparsify as sparsify

if TYPE_CHECKING:
    from keras_sparse_ortho import export as export
    from keras_sparse_ortho import tfmot as tfmot
    from keras_sparse_ortho.export import export_litert as export_litert

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "PrunableLayer",
    "analysis",
    "budgets",
    "callbacks",
    "errors",
    "export",
    "export_litert",
    "initializers",
    "layers",
    "models",
    "orthogonal",
    "parametrizations",
    "parametrize",
    "prunable_weights",
    "remove_channels",
    "report",
    "saliency",
    "schedules",
    "sparsify",
    "strip",
    "tfmot",
]


def __getattr__(name: str) -> Any:
    if name in ("export", "tfmot"):
        return importlib.import_module(f"{__name__}.{name}")
    if name == "export_litert":
        return importlib.import_module(f"{__name__}.export").export_litert
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
