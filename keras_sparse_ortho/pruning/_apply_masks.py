"""`apply_masks`: given masks, or those of the layers' own initializers, on weights as they are."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from keras_sparse_ortho.calibration import (
    Recipe,
    calibration_batches,
    prune_layers,
)
from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError
from keras_sparse_ortho.initializers import (
    AnyDraw,
    Draw,
    SparseInitializer,
    adopt,
)
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose
from keras_sparse_ortho.models import (
    Plan,
    carry_out,
    prunable_weights,
    refuse_unfit,
    verb,
)
from keras_sparse_ortho.pruning._planning import plan_of_draws, shows_progress
from keras_sparse_ortho.storages import check_storage


def plan_apply_masks(
    model: keras.Model,
    masks: Mapping[str, np.ndarray] | None = None,
    *,
    data: object = None,
    include: Selection = None,
    exclude: Selection = None,
    storage: str = "masked",
) -> Plan:
    """Plans `apply_masks`, with the same arguments."""
    check_storage(storage)
    draws: dict[str, AnyDraw]
    if masks is not None:
        masks_by_path = _masks_by_path(model, masks)
        masked = [
            weight
            for weight in prunable_weights(model, unregistered=True)
            if weight.path in masks_by_path
        ]
        refuse_unfit(model, masked, "no kernel that is named by `masks`")
        weights = choose(masked, include, exclude)
        draws = {
            weight.path: Draw(masks_by_path[weight.path]) for weight in weights
        }
    else:
        selected = choose(
            prunable_weights(model, unregistered=True), include, exclude
        )
        weights = [
            weight
            for weight in selected
            if isinstance(weight.initializer, SparseInitializer)
        ]
        refuse_unfit(model, weights, "no layer with one of our initializers")
        draws = {
            weight.path: adopt(weight, weight.initializer) for weight in weights
        }
    if data is not None:
        recipe = Recipe(
            masks={path: draw.mask for path, draw in draws.items()}, refit=True
        )
        batches = calibration_batches(model, data)
        draws = prune_layers(
            model, weights, recipe, batches, verbose=shows_progress()
        )
    return plan_of_draws(model, weights, draws, storage)


@verb(plan_apply_masks)
def apply_masks(
    model: keras.Model,
    masks: Mapping[str, np.ndarray] | None = None,
    *,
    data: object = None,
    include: Selection = None,
    exclude: Selection = None,
    storage: str = "masked",
) -> keras.Model:
    """Holds given masks, or the masks that the layers' own initializers drew: `w_e = M * w`.

    Kernels keep their values, and dead entries stay 0. Initializers see only a shape: if one drew
    along other axes than its layer's, and the kernel is as drawn, it is drawn again along the true
    ones.

    Args:
        model: A built Keras 3 model, as for `sparsify`.
        masks: dict from weight path to a bool array of its shape, or from the path of a layer with
            one kernel; other kernels stay dense. `None` (default): the masks that the layers'
            initializers, such as `initializers.ExactOrthogonal`, drew.
        data: A few hundred rows of inputs, as for `prune`, on which live entries get the values of
            least squared error of their layers' outputs. Default: kernels keep their values.
        include: Which kernels, as for `sparsify`. Default: all that have a mask.
        exclude: Which kernels not.
        storage: str. As for `sparsify`; with `"blocks"` masks that were drawn of regular blocks are
            stored as live blocks, others compactly.

    Returns:
        As for `sparsify`.

    Raises:
        NotPrunableError: A model that is not built or has no such initializers; a mask of another
            shape or type, or without live entries; a trained kernel in which the mask of its
            initializer would drop nonzero entries; layers that are wrapped or quantized already.
        UnknownWeightError: A mask, `include` or `exclude` that names nothing.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> orthogonal = kso.initializers.ExactOrthogonal(0.1, seed=0)
        >>> layer = keras.layers.Dense(100, kernel_initializer=orthogonal)
        >>> dense = keras.Sequential([keras.Input((64,)), layer, keras.layers.Dense(10)])
        >>> kso.report(apply_masks(dense)).rows[0].live
        640
    """
    return carry_out(
        model,
        plan_apply_masks(
            model,
            masks,
            data=data,
            include=include,
            exclude=exclude,
            storage=storage,
        ),
    )


def _masks_by_path(
    model: keras.Model, masks: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The masks by the paths of their weights; a layer's name stands for its only kernel."""
    weights = prunable_weights(model, unregistered=True)
    masks_by_path: dict[str, np.ndarray] = {}
    for name, mask in masks.items():
        matches = [
            weight
            for weight in weights
            if weight.path == name or weight.path.startswith(f"{name}/")
        ]
        if len(matches) != 1 or matches[0].path in masks_by_path:
            known_paths = ", ".join(weight.path for weight in weights)
            matching_paths = [weight.path for weight in matches]
            raise UnknownWeightError(
                "`masks` must name each prunable weight once, by its path, or by its layer's if it "
                f"is the only one there. There are: {known_paths or 'none'}. "
                f"Received: {name!r}, which names {matching_paths or 'none'}"
            )
        (weight,) = matches
        masks_by_path[weight.path] = _checked_mask(np.asarray(mask), weight)
    return masks_by_path


def _checked_mask(mask: np.ndarray, weight: PrunableWeight) -> np.ndarray:
    if mask.dtype != bool or mask.shape != weight.shape or not mask.any():
        raise NotPrunableError(
            f"The mask of {weight.path!r} must be a bool array of shape {weight.shape} "
            f"with at least one live entry. Received: dtype {mask.dtype}, shape {mask.shape}, "
            f"{np.count_nonzero(mask)} live"
        )
    return mask
