"""Wrapping the layers that hold given weights, in a whole model."""

import warnings
from collections.abc import Callable, MutableMapping
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
from keras_sparse_ortho.pruning._block_plan import BlockPlan
from keras_sparse_ortho.pruning._storage import (
    mask_class,
    on_live_blocks,
    warn_of_slow_storage,
)


def hold(
    model: Any,
    weights: list[PrunableWeight],
    draws: MutableMapping[str, AnyDraw],
    storage: str = "masked",
    plan: BlockPlan | None = None,
    *,
    in_place: bool = False,
) -> Any:
    """Gives weights fixed masks, and the values that were drawn with them.

    `draws` has the mask of each by path, with values to set where it has a kernel; the other
    weights keep theirs. Each is taken out once its weight has it, so that a model and all its draws
    are not there at once. A `plan` has made the masks, and tells what it did not reach.
    """
    kind = mask_class(storage)
    if kind.compact:
        for weight in weights:
            refuse_compact(weight)
    if plan is None or storage != "auto":  # the plan names all that are not on blocks
        warn_of_slow_storage(weights, draws, storage)

    def mask(path: str) -> Parametrization:
        return kind(mask=draws[path].mask, initializer=draws[path].initializer)

    on_blocks = storage in ("auto", "blocks")
    reasons = {} if plan is None else plan.reasons()
    sparse = wrap(model, weights, mask, draws, on_blocks=on_blocks, in_place=in_place)
    if plan is not None:
        plan.warn(sparse, storage, reasons)
    return sparse


def wrap(
    model: Any,
    weights: list[PrunableWeight],
    parametrization_of: Callable[[str], Parametrization],
    draws: MutableMapping[str, AnyDraw] | None = None,
    *,
    on_blocks: bool = False,
    in_place: bool = False,
) -> Any:
    """Wraps every layer that owns some of the weights: see `places_to_wrap`.

    `parametrization_of` gives the parametrization, not built, for a path, with the mask where that
    is fixed: wrappers draw nothing here. For `draws` see `hold`. With `on_blocks` layers of live
    blocks take the place of others where they can.
    """
    draws = {} if draws is None else draws
    live = {path: draw.live for path, draw in draws.items()}
    given = {weight.path: weight for weight in weights}
    places = places_to_wrap(model, weights)
    before = [weight.path for weight in prunable_weights(model, unregistered=True)]
    if paths := never_called(model):
        warnings.warn(
            "Layers that have never been called have no weights yet, and will be dense. To have "
            "them masked, call the model so that they are reached, before it is made sparse. "
            f"Received: {paths}",
            stacklevel=5,
        )

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
            drawn = draws.pop(keys[key], None)
            kernel = drawn.kernel if drawn is not None and drawn.sets_values else None
            if kernel is not None:
                parametrization.assign_raw(kernel)
            elif own is not layer and parametrization.compact:  # whose dense copy has no value
                parametrization.assign_raw(given[keys[key]].variable.value)
            if kernel is None or not parametrization.movable:
                parametrization.settle()  # what is drawn is zero where its mask is not live
            if drawn is not None and drawn.fresh:
                parametrization.mark_as_drawn(kernel)
        return wrapper

    def complete(rewritten: Any) -> Any:
        found = prunable_weights(rewritten, unregistered=True)
        masked = {weight.path: weight for weight in found if weight.storage is not None}
        wrong = set(before) ^ {weight.path for weight in found} | given.keys() - masked.keys()
        # In one order: on several devices a live count is gathered, and all processes take part.
        wrong |= {path for path, n in live.items() if path not in wrong and masked[path].live != n}
        if wrong or len(found) != len(before):
            raise NotPrunableError(
                "The new model would not have the kernels of the given one, each with the mask "
                f"that was planned. There were: {before}. Received: others for {sorted(wrong)}"
            )
        if rewritten is not model:
            probe_of_copy(model, rewritten).check(rewritten)
        return blocks_where_possible(rewritten, in_place) if on_blocks else rewritten

    later = [
        weight.variable
        for path, weight in given.items()
        if (path in draws and draws[path].sets_values) or parametrization_of(path).compact
    ]
    with weights_set_later():
        return rewrite(model, replace, complete, without_values=later, in_place=in_place)
