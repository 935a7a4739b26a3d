"""Wrapping the layers that hold given weights, in a whole model."""

from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_sparse_ortho.initializers import AnyDraw, weights_set_later
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.layers import PrunableLayer
from keras_sparse_ortho.models import (
    Replacement,
    blocks_where_possible,
    rewrite,
    share_initializers,
)
from keras_sparse_ortho.parametrizations import FixedMask, Parametrization, refuse_compact
from keras_sparse_ortho.pruning._live_blocks import on_live_blocks
from keras_sparse_ortho.pruning._storage import mask_class


def hold(
    model: Any,
    weights: list[PrunableWeight],
    draws: Mapping[str, AnyDraw],
    storage: str = "masked",
) -> Any:
    """Gives weights fixed masks, and the values that were drawn with them.

    Args:
        model: The model.
        weights: Its weights that get a mask.
        draws: The mask of each by path, with values to set where it has a kernel; the other
            weights keep theirs.
        storage: `"masked"`, `"compact"`, or `"auto"`: live blocks where layers and masks allow,
            compact elsewhere.

    Raises:
        NotPrunableError: A weight that cannot be stored compactly; before anything is changed.
    """
    kind = mask_class(storage)
    if kind.compact:
        for weight in weights:
            refuse_compact(weight)

    def mask(path: str) -> Parametrization:
        return kind(mask=draws[path].mask, initializer=draws[path].initializer)

    held = wrap(model, weights, mask, draws, on_blocks=storage == "auto")
    return blocks_where_possible(held) if storage == "auto" else held


def wrap(
    model: Any,
    weights: list[PrunableWeight],
    parametrization_of: Callable[[str], Parametrization],
    draws: Mapping[str, AnyDraw] | None = None,
    *,
    on_blocks: bool = False,
) -> Any:
    """Wraps every outermost layer that holds some of the weights.

    Args:
        model: The model.
        weights: Its weights that get a parametrization.
        parametrization_of: Gives the parametrization, not built, for a path. Masks that are fixed
            are given in it: wrappers draw nothing here.
        draws: By path what was drawn; see `hold`.
        on_blocks: Whether layers of live blocks take the place of those whose kernel was drawn as
            such.
    """
    draws = draws or {}

    def replace(layer: Any, path: str, copy: Callable[[Any], Any]) -> Replacement | None:
        inside = [w.path for w in weights if w.path.startswith(f"{path}/")]
        if not inside:
            return None
        if on_blocks and (new := on_live_blocks(layer, path, inside, draws)) is not None:
            return new
        inner = copy(layer)
        given = list(layer.weights)
        keys = {full.removeprefix(f"{path}/"): full for full in inside}
        wrapper = PrunableLayer(
            inner, {key: parametrization_of(full) for key, full in keys.items()}
        )

        def finish() -> None:
            if not wrapper.built:
                wrapper.build()  # around a layer of a class-written model, which is built
            drawn = {key: draws.get(full) for key, full in keys.items()}
            parametrizations = wrapper.parametrizations
            replaced = {
                id(parametrizations[key].layer_variable)
                for key, given in drawn.items()
                if given is not None and given.sets_values
            }
            stored = {id(p.layer_variable): p for p in parametrizations.values() if p.compact}
            for old, new in zip(given, wrapper.layer_weights, strict=True):
                if old is new or id(new) in replaced:
                    continue
                if id(new) in stored:
                    stored[id(new)].assign_raw(old)
                else:
                    # A copy: on JAX `fit` frees the arrays of its model, which may not be shared.
                    new.assign(keras.ops.copy(old))
            if inner is not layer:
                share_initializers(layer, inner)
            for key, parametrization in parametrizations.items():
                _finish(parametrization, drawn[key])

        return Replacement(wrapper, finish)

    with weights_set_later():
        return rewrite(model, replace)


def _finish(parametrization: Parametrization, drawn: AnyDraw | None) -> None:
    """Sets the weight to what was drawn, and tells the parametrization that it has been set."""
    if drawn is not None and drawn.sets_values:
        parametrization.assign_raw(drawn.kernel)
    parametrization.settle()
    if drawn is not None and drawn.fresh and isinstance(parametrization, FixedMask):
        parametrization.mark_as_drawn()
