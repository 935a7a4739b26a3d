"""Wrapping the layers that hold given weights, in a whole model."""

import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from keras_sparse_ortho._keras_internals import body_of
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw, weights_set_later
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.layers import PrunableLayer
from keras_sparse_ortho.models import (
    blocks_where_possible,
    never_called,
    places_to_wrap,
    probe_of_copy,
    prunable_weights,
    rewrite,
)
from keras_sparse_ortho.parametrizations import Parametrization, refuse_compact
from keras_sparse_ortho.pruning._storage import mask_class, on_live_blocks


def hold(
    model: Any,
    weights: list[PrunableWeight],
    draws: MutableMapping[str, AnyDraw],
    storage: str = "masked",
) -> Any:
    """Gives weights fixed masks, and the values that were drawn with them.

    Args:
        model: The model.
        weights: Its weights that get a mask.
        draws: The mask of each by path, with values to set where it has a kernel; the other
            weights keep theirs. Each is taken out once its weight has it, so that a model and
            all its draws are not there at once.
        storage: `"masked"`, `"compact"`, or `"auto"`: live blocks where layers and masks allow,
            compact elsewhere; the same with `"blocks"`, of which `BlockPlan` has made the masks.

    Raises:
        NotPrunableError: A weight that cannot be stored compactly; before anything is changed.
    """
    kind = mask_class(storage)
    if kind.compact:
        for weight in weights:
            refuse_compact(weight)

    def mask(path: str) -> Parametrization:
        return kind(mask=draws[path].mask, initializer=draws[path].initializer)

    return wrap(model, weights, mask, draws, on_blocks=storage in ("auto", "blocks"))


def wrap(
    model: Any,
    weights: list[PrunableWeight],
    parametrization_of: Callable[[str], Parametrization],
    draws: MutableMapping[str, AnyDraw] | None = None,
    *,
    on_blocks: bool = False,
) -> Any:
    """Wraps every layer that owns some of the weights: see `places_to_wrap`.

    Args:
        model: The model.
        weights: Its weights that get a parametrization.
        parametrization_of: Gives the parametrization, not built, for a path. Masks that are fixed
            are given in it: wrappers draw nothing here.
        draws: By path what was drawn; see `hold`.
        on_blocks: Whether layers of live blocks take the place of those whose kernel was drawn as
            such, and of others where layers and masks allow.

    Raises:
        NotPrunableError: The new model would have other kernels or masks than planned. Models
            written as a class are as they were then.
    """
    draws = {} if draws is None else draws
    live = {path: draw.live for path, draw in draws.items()}
    given = {weight.path: weight for weight in weights}
    places = places_to_wrap(model, weights)
    before = sorted(weight.path for weight in prunable_weights(model, unregistered=True))
    _warn_of_never_called(model)

    def replace(layer: Any, path: str, own: Any) -> Any:
        keys = places.get(id(layer))
        if keys is None:
            return None
        if on_blocks:
            new = on_live_blocks(own, keys, draws, lambda full: given[full].raw_value())
            if new is not None:
                return new
        table = {key: parametrization_of(full) for key, full in keys.items()}
        wrapper = PrunableLayer(body_of(own), table)
        wrapper.build()
        for key, parametrization in wrapper.parametrizations.items():
            if own is not layer and parametrization.compact:  # whose dense copy has no value
                parametrization.assign_raw(given[keys[key]].variable.value)
            _finish(parametrization, draws.pop(keys[key], None))
        return wrapper

    def complete(rewritten: Any) -> Any:
        _check(rewritten, weights, before, live)
        if rewritten is not model:
            probe_of_copy(model, rewritten).check(rewritten)
        return blocks_where_possible(rewritten) if on_blocks else rewritten

    later = [
        weight.variable
        for path, weight in given.items()
        if (path in draws and draws[path].sets_values) or parametrization_of(path).compact
    ]
    with weights_set_later():
        return rewrite(model, replace, complete, without_values=later)


def _warn_of_never_called(model: Any) -> None:
    if paths := never_called(model):
        warnings.warn(
            "Layers that have never been called have no weights yet, and will be dense. To have "
            "them masked, call the model so that they are reached, before it is made sparse. "
            f"Received: {paths}",
            stacklevel=6,
        )


def _check(
    model: Any, weights: list[PrunableWeight], before: list[str], live: Mapping[str, int]
) -> None:
    """Raises unless a new model has the kernels of the old one, and the masks that were planned."""
    found = prunable_weights(model, unregistered=True)
    wrapped = {w.path: w for w in found if w.storage is not None}
    paths = sorted(weight.path for weight in found)
    uncovered = [weight.path for weight in weights if weight.path not in wrapped]
    if paths != before or uncovered:
        raise NotPrunableError(
            "The new model would not have the kernels of the given one, each with the mask that "
            f"was planned. There were: {before}. Received: {paths}, without masks {uncovered}"
        )
    for path, count in live.items():
        if wrapped[path].live != count:
            raise NotPrunableError(
                f"'{path}' would not have the {count} live entries that were planned. "
                f"Received: {wrapped[path].live}"
            )


def _finish(parametrization: Parametrization, drawn: AnyDraw | None) -> None:
    """Sets the weight to what was drawn, and tells the parametrization that it has been set."""
    kernel = drawn.kernel if drawn is not None and drawn.sets_values else None
    if kernel is not None:
        parametrization.assign_raw(kernel)
    if kernel is None or not parametrization.movable:
        parametrization.settle()  # what is drawn is zero where its mask is not live
    if drawn is not None and drawn.fresh:
        parametrization.mark_as_drawn(kernel)
