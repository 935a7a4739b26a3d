"""`adopt_masks`: the masks that the layers' own initializers drew, held from now on."""

from __future__ import annotations

import keras

from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho.initializers import SparseInitializer, adopt
from keras_sparse_ortho.kernels import Selection, choose
from keras_sparse_ortho.models import prunable_weights, refuse_unfit
from keras_sparse_ortho.pruning._storage import mask_class
from keras_sparse_ortho.pruning._wrapping import hold


@other_keywords()
def adopt_masks(
    model: keras.Model,
    *,
    include: Selection = None,
    exclude: Selection = None,
    storage: str = "masked",
    in_place: bool = False,
) -> keras.Model:
    """Wraps the layers whose initializer is one of ours, and holds the masks that it drew.

    An initializer alone holds no mask: in training every entry moves, and the kernel is dense
    after one step. From here on `w_e = w` where the mask is live, and 0 elsewhere. Kernels keep
    their values; where an initializer, which sees only a shape, drew along other axes than those
    of its layer, and the kernel is as it was drawn, it is drawn along the true ones.

    Args:
        model: A built Keras 3 model: Sequential, functional, nested, or written as a class.
        include: Which kernels, as for `sparsify`. Default: all whose initializer is one of ours.
        exclude: Which kernels not.
        storage: `"masked"` keeps dense kernels with masks (`FixedMask`), `"compact"` live values
            and their indices only (`CompactMask`): at density 0.1 a fifth of the weights' memory,
            and a tenth of the optimizer's. `"auto"`: layers that compute on live blocks
            where masks are of regular blocks and layers allow, compact elsewhere. `to_blocks`,
            `to_compact` and `to_masked` convert.
        in_place: Changes the given model itself, not a copy. For subclassed models that cannot be
            copied; the error says so.

    Returns:
        A new model, not compiled. The given one stays as it was.

    Raises:
        NotPrunableError: A model that is not built or has no such initializers; a kernel that was
            trained, so that its mask would drop entries that are not zero; layers that are
            wrapped or quantized already.
        UnknownWeightError: An `include` or `exclude` that names nothing.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> orthogonal = kso.initializers.ExactOrthogonal(0.1, seed=0)
    >>> dense = keras.Sequential([
    ...     keras.Input((64,)),
    ...     keras.layers.Dense(100, kernel_initializer=orthogonal, name="hidden"),
    ...     keras.layers.Dense(10, name="head"),
    ... ])
    >>> kso.report(adopt_masks(dense)).rows[0].live
    640
    """
    mask_class(storage, masks_are_given=True)
    weights = choose(prunable_weights(model, unregistered=True), include, exclude)
    weights = [w for w in weights if isinstance(w.initializer, SparseInitializer)]
    refuse_unfit(model, weights, "no layer with one of our initializers")
    draws = {weight.path: adopt(weight, weight.initializer) for weight in weights}
    return hold(model, weights, draws, storage, in_place=in_place)
