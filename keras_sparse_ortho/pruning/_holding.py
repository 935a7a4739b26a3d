"""Plans that give weights fixed masks in a storage, and what is said of these."""

import functools
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import level_of_user
from keras_sparse_ortho.initializers import AnyDraw, Draw
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.layers import why_no_block_form
from keras_sparse_ortho.models import Plan, Target, never_called
from keras_sparse_ortho.orthogonal import Block
from keras_sparse_ortho.parametrizations import (
    CompactMask,
    FixedMask,
    Parametrization,
    refuse_compact,
    refuse_unless_fixed,
)
from keras_sparse_ortho.pruning._block_plan import BlockPlan

STORAGES = {
    "masked": FixedMask,
    "compact": CompactMask,
    "auto": CompactMask,
    "blocks": CompactMask,
}

# Live blocks of smaller kernels may be no faster (docs/faster.md).
_WIDE = 2**19
# Smaller blocks are drawn for other reasons than training time.
_LEAST_SIDE = 16


def mask_class(storage: str, *, masks_are_given: bool = False) -> type[FixedMask]:
    """The parametrization that holds a mask in a storage, where that has no live blocks.

    Raises:
        ValueError: A storage that is not known; `"blocks"`, which chooses masks, for given ones.
    """
    if masks_are_given and storage == "blocks":
        raise ValueError(
            'storage="blocks" chooses which blocks are live; masks that are given are stored as '
            'live blocks, where they are of regular ones, by storage="auto". '
            f"Received: {storage=}"
        )
    if storage not in STORAGES:
        raise ValueError(f"`storage` must be one of {sorted(STORAGES)}. Received: {storage=}")
    return STORAGES[storage]


def in_storage(parametrization: Parametrization, storage: str) -> Parametrization:
    """The parametrization, or with `"compact"` that of the same mask in compact storage.

    Raises:
        NotPrunableError: Compact storage for a parametrization that needs the dense raw weight.
    """
    kind = mask_class(storage)
    if storage in ("auto", "blocks"):
        raise ValueError(
            '`storage` of a parametrization is "masked" or "compact"; live blocks are layers of '
            f"their own, see keras_sparse_ortho.convert. Received: {storage=}"
        )
    if not kind.compact or parametrization.compact:
        return parametrization
    refuse_unless_fixed(parametrization, f"{storage=}, {type(parametrization).__name__}")
    return parametrization.of_class(kind)  # type: ignore[attr-defined]


def warn_of_slow_storage(
    weights: list[PrunableWeight], draws: Mapping[str, AnyDraw], storage: str
) -> None:
    """Warns of kernels for which speed may be expected, and that are as slow as dense ones.

    These are kernels of blocks, and all with `"auto"`; small ones may be no faster on live blocks.
    """
    slow = {}
    for weight in weights:
        drawn = draws[weight.path]
        structure = getattr(drawn.initializer, "structure", None)
        if structure is None and isinstance(drawn, Draw) and drawn.block is not None:
            structure = Block(*drawn.block, regular=True)  # of `prune`
        wide = weight.size >= _WIDE
        regular = isinstance(structure, Block) and structure.regular
        if storage == "auto" and not regular and (wide or structure is not None):
            slow[weight.path] = f"with {structure or 'single live entries'}"
        elif storage == "auto" and wide and (reason := why_no_block_form(weight.owner)):
            slow[weight.path] = f"({reason})"
        elif storage in ("masked", "compact") and wide and _is_of_blocks(structure):
            slow[weight.path] = f"with {structure!r}"
    if not slow:
        return
    if storage == "auto":
        told = (
            'These kernels cannot be on live blocks, so storage="auto" stores their live values '
            "with indices, and computes as slowly as a dense layer. Live blocks are chosen by "
            'storage="blocks", or drawn with structure=Block(rows, cols, regular=True). '
        )
    else:
        told = (
            "Masked and compact kernels of blocks are computed as slowly as dense ones. With "
            'storage="blocks" a layer computes on its live blocks alone, and so it does after '
            "keras_sparse_ortho.convert(model, 'blocks') where blocks are regular. "
        )
    listed = ", ".join(f"'{path}' {why}" for path, why in slow.items())
    warnings.warn(f"{told}Received: {storage=}, for {listed}", stacklevel=level_of_user())


def _is_of_blocks(structure: Any) -> bool:
    return isinstance(structure, Block) and min(structure.rows, structure.cols) >= _LEAST_SIDE


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


def shows_progress() -> int:
    """1 where long work shows a bar: in a terminal, unless Keras was told to be silent."""
    interactive = keras.config.is_interactive_logging_enabled()
    return int(interactive and sys.stdout is not None and sys.stdout.isatty())
