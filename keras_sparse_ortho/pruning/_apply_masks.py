"""`apply_masks`: masks that exist already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho.calibration import Recipe, prune_layers
from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError
from keras_sparse_ortho.initializers import AnyDraw, Draw, SparseInitializer, adopt
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose
from keras_sparse_ortho.models import Plan, prunable_weights, refuse_unfit, verb
from keras_sparse_ortho.pruning._planning import check_storage, hold, shows_progress


@verb
@other_keywords()
def apply_masks(
    model: keras.Model,
    masks: Mapping[str, np.ndarray] | None = None,
    *,
    data: Any = None,
    include: Selection = None,
    exclude: Selection = None,
    storage: str = "masked",
) -> Plan:
    """Holds given masks, or those that the layers' own initializers drew: `w_e = M * w`.

    An initializer alone holds no mask: training moves every entry, and the kernel is dense after
    one step. With this function dead entries stay 0. Kernels keep their values. An initializer sees
    only a shape: if it drew along other axes than those of its layer, and the kernel is as it was
    drawn, it is drawn again along the true ones.

    Args:
        model: A built Keras 3 model: Sequential, functional, nested, or written as a class.
        masks: From weight path to a bool array of its shape, or from layer path where the layer
            has one kernel; kernels that are not named stay dense. `None` (default): the masks that
            the layers' initializers, such as `initializers.ExactOrthogonal`, drew.
        data: A few hundred rows of inputs, as for `prune`, on which live entries get the values of
            least squared error of their layers' outputs. Default: kernels keep their values.
        include: Which kernels, as for `sparsify`. Default: all that have a mask.
        exclude: Which kernels not.
        storage: As for `sparsify`; with `"blocks"` masks that were drawn of regular blocks are
            stored as live blocks, others compactly.

    Returns:
        A new model, not compiled. The given one stays as it was; `apply_masks.in_place` changes the
        model itself.

    Raises:
        NotPrunableError: A model that is not built or has no such initializers; a mask of another
            shape or type, or without live entries; a kernel that was trained, so that the mask of
            its initializer would drop entries that are not zero; layers that are wrapped or
            quantized already.
        UnknownWeightError: A mask, `include` or `exclude` that names nothing.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> orthogonal = kso.initializers.ExactOrthogonal(0.1, seed=0)
    >>> dense = keras.Sequential([
    ...     keras.Input((64,)),
    ...     keras.layers.Dense(100, kernel_initializer=orthogonal, name="hidden"),
    ...     keras.layers.Dense(10, name="head"),
    ... ])
    >>> kso.report(apply_masks(dense)).rows[0].live
    640
    >>> mask = np.random.default_rng(0).random((100, 10)) < 0.25
    >>> kso.report(apply_masks(dense, {"head": mask})).rows[1].live == int(mask.sum())
    True
    """
    check_storage(storage)
    draws: dict[str, AnyDraw]
    if masks is not None:
        found, by_path = _named(model, masks)
        weights = choose(found, include, exclude)
        draws = {weight.path: Draw(by_path[weight.path]) for weight in weights}
    else:
        found = choose(prunable_weights(model, unregistered=True), include, exclude)
        weights = [w for w in found if isinstance(w.initializer, SparseInitializer)]
        refuse_unfit(model, weights, "no layer with one of our initializers")
        draws = {weight.path: adopt(weight, weight.initializer) for weight in weights}
    if data is not None:
        recipe = Recipe(masks={path: draw.mask for path, draw in draws.items()}, refit=True)
        draws = prune_layers(model, weights, recipe, data, verbose=shows_progress())
    return hold(model, weights, draws, storage)


def _named(model: Any, masks: Mapping[str, Any]) -> tuple[list[PrunableWeight], dict[str, Any]]:
    """The weights that masks are for, and the masks by the paths of these."""
    known = prunable_weights(model, unregistered=True)
    by_path: dict[str, Any] = {}
    for name, mask in masks.items():
        found = [w for w in known if w.path == name or w.path.startswith(f"{name}/")]
        if len(found) != 1 or found[0].path in by_path:
            raise UnknownWeightError(
                "`masks` must name each prunable weight once, by its path, or by its layer's if it "
                f"is the only one there. There are: {', '.join(w.path for w in known) or 'none'}. "
                f"Received: {name!r}, which names {[w.path for w in found] or 'none'}"
            )
        mask = np.asarray(mask)
        if mask.dtype != bool or mask.shape != found[0].shape or not mask.any():
            raise NotPrunableError(
                f"The mask of '{found[0].path}' must be a bool array of shape {found[0].shape} "
                f"with at least one live entry. Received: dtype {mask.dtype}, shape {mask.shape}, "
                f"{np.count_nonzero(mask)} live"
            )
        by_path[found[0].path] = mask
    weights = [weight for weight in known if weight.path in by_path]
    refuse_unfit(model, weights, "no kernel that is named by `masks`")
    return weights, by_path
