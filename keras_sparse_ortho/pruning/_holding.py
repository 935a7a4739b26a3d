"""Plans that give weights fixed masks, and what is said of them."""

import functools
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import level_of_user
from keras_sparse_ortho.initializers import AnyDraw
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import Plan, Target, never_called
from keras_sparse_ortho.parametrizations import Parametrization, refuse_compact
from keras_sparse_ortho.pruning._block_plan import BlockPlan
from keras_sparse_ortho.pruning._storage import mask_class, warn_of_slow_storage


def hold(
    model: Any,
    weights: list[PrunableWeight],
    draws: Mapping[str, AnyDraw],
    storage: str = "masked",
    blocks: BlockPlan | None = None,
) -> Plan:
    """The plan that gives weights the masks, and the values, that were drawn for them by path.

    `blocks` has chosen the masks, and tells what was not reached.
    """
    if mask_class(storage).compact:
        for weight in weights:
            refuse_compact(weight)
    if blocks is None or storage != "auto":  # `blocks` names all that are not on blocks
        warn_of_slow_storage(weights, draws, storage)
    kind = "blocks" if storage == "auto" else storage
    plan = wrap(model, weights, {w.path: Target(kind, draws[w.path]) for w in weights})
    if blocks is not None:
        plan.check = functools.partial(blocks.warn, storage=storage, reasons=blocks.reasons())
    return plan


def wrap(model: Any, weights: list[PrunableWeight], targets: dict[str, Target]) -> Plan:
    """The plan for weights of plain layers."""
    if paths := never_called(model):
        warnings.warn(
            "Layers that have never been called have no weights yet, and will be dense. To have "
            "them masked, call the model so that they are reached, before it is made sparse. "
            f"Received: {paths}",
            stacklevel=level_of_user(),
        )
    return Plan(weights, targets)


def parametrized(parametrization: Parametrization) -> Target:
    """The target of a weight with a threshold or a mask on a schedule."""
    return Target("masked", parametrization=parametrization)


def shows_progress() -> int:
    """1 where long work shows a bar: in a terminal, unless Keras was told to be silent."""
    interactive = keras.config.is_interactive_logging_enabled()
    return int(interactive and sys.stdout is not None and sys.stdout.isatty())
