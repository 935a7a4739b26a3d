"""Sparse from the first step, exactly orthogonal at initialization, small when shipped.

`export` and `tfmot` need TensorFlow, and load it when they are used.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

try:
    import keras as _keras  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("tensorflow", "jax", "torch"):
        raise
    _all = ("tensorflow", "jax", "torch")
    _others = [
        name
        for name in _all
        if name != error.name and importlib.util.find_spec(name)
    ]
    raise ImportError(
        f"Keras is set to {error.name}, which is not installed. Install tensorflow, jax "
        "or torch. Set the environment variable KERAS_BACKEND before the first import of Keras, to "
        f"one that is installed. Received: no module {error.name!r}; installed: {_others}"
    ) from error

from keras_sparse_ortho import errors as errors
from keras_sparse_ortho import families as families
from keras_sparse_ortho import initializers as initializers
from keras_sparse_ortho import kernels as kernels
from keras_sparse_ortho import layers as layers
from keras_sparse_ortho import models as models
from keras_sparse_ortho import orthogonal as orthogonal
from keras_sparse_ortho import parametrizations as parametrizations
from keras_sparse_ortho import quantization as quantization
from keras_sparse_ortho import schedules as schedules
from keras_sparse_ortho import storages as storages
from keras_sparse_ortho._foreign_names import answer
from keras_sparse_ortho.families import register_layer
from keras_sparse_ortho.layers import PrunableLayer
from keras_sparse_ortho.models import convert, prunable_weights, strip
from keras_sparse_ortho.orthogonal import Block, NByM
from keras_sparse_ortho.parametrizations import (
    ChannelSoftThreshold as ChannelSoftThreshold,
)
from keras_sparse_ortho.parametrizations import FixedMask as FixedMask
from keras_sparse_ortho.parametrizations import (
    LowRankSoftThreshold as LowRankSoftThreshold,
)
from keras_sparse_ortho.parametrizations import MagnitudeMask as MagnitudeMask
from keras_sparse_ortho.parametrizations import SoftThreshold as SoftThreshold

if TYPE_CHECKING:
    from keras_sparse_ortho import analysis as analysis
    from keras_sparse_ortho import budgets as budgets
    from keras_sparse_ortho import calibration as calibration
    from keras_sparse_ortho import callbacks as callbacks
    from keras_sparse_ortho import export as export
    from keras_sparse_ortho import pruning as pruning
    from keras_sparse_ortho import recovery as recovery
    from keras_sparse_ortho import saliency as saliency
    from keras_sparse_ortho import shrinking as shrinking
    from keras_sparse_ortho import tfmot as tfmot
    from keras_sparse_ortho.analysis import report, sensitivity
    from keras_sparse_ortho.budgets import Budget
    from keras_sparse_ortho.calibration import restore_statistics, widths
    from keras_sparse_ortho.callbacks import finish
    from keras_sparse_ortho.export import (
        export_litert,
        int8_errors,
        load_litert,
    )
    from keras_sparse_ortho.models import channel_groups, remove_channels
    from keras_sparse_ortho.pruning import (
        apply_masks,
        narrow,
        parametrize,
        prune,
        sparsify,
    )
    from keras_sparse_ortho.quantization import equalize, quantize_aware
    from keras_sparse_ortho.shrinking import shrink

__version__ = "0.1.0"

__all__ = [
    "Block",
    "Budget",
    "ChannelSoftThreshold",
    "FixedMask",
    "LowRankSoftThreshold",
    "MagnitudeMask",
    "NByM",
    "PrunableLayer",
    "SoftThreshold",
    "apply_masks",
    "channel_groups",
    "convert",
    "equalize",
    "export_litert",
    "finish",
    "int8_errors",
    "load_litert",
    "narrow",
    "parametrize",
    "prunable_weights",
    "prune",
    "quantize_aware",
    "register_layer",
    "remove_channels",
    "report",
    "restore_statistics",
    "sensitivity",
    "shrink",
    "sparsify",
    "strip",
    "widths",
]

# Saved models need these rooms, whose classes Keras finds by name: they load at once.
_LOADED = (
    *("errors", "families", "initializers", "kernels", "layers", "models"),
    *("orthogonal", "parametrizations", "quantization", "schedules"),
    "storages",
)
# The others load when they are used, with their names, and so do some names of the first.
_LOADED_LATER = {
    "analysis": ("report", "sensitivity"),
    "budgets": ("Budget",),
    "calibration": ("restore_statistics", "widths"),
    "callbacks": ("finish",),
    "export": ("export_litert", "int8_errors", "load_litert"),
    "models": ("channel_groups", "remove_channels"),
    "pruning": ("apply_masks", "narrow", "parametrize", "prune", "sparsify"),
    "quantization": ("equalize", "quantize_aware"),
    "recovery": (),
    "saliency": (),
    "shrinking": ("shrink",),
    "tfmot": (),
}
# The sub-packages are found here, too; `from keras_sparse_ortho import *` leaves them out.
_ROOMS = (*_LOADED, *_LOADED_LATER)
answer(__name__, *(f"{__name__}.{room}" for room in _LOADED))


def __getattr__(name: str) -> Any:
    if name in _LOADED_LATER:
        return importlib.import_module(f"{__name__}.{name}")
    for room, names in _LOADED_LATER.items():
        if name in names:
            module = importlib.import_module(f"{__name__}.{room}")
            return getattr(module, name)
    raise AttributeError(name)  # for `Room`, which knows more
