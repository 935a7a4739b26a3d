"""Exactly orthogonal sparse starts: `prune_exact_orthogonal` and initializers for layers."""

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._types import AnyLayer
from keras_sparse_ortho.errors import UnknownWeightError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import Selection
from keras_sparse_ortho.orthogonal import Structure
from keras_sparse_ortho.pruning import BudgetLike, draw_kernels
from keras_sparse_ortho.tfmot._prune_with_mask import with_masks
from keras_sparse_ortho.tfmot._weights import select_weights


@other_keywords
def prune_exact_orthogonal(
    model: AnyLayer,
    density: float | None = None,
    budget: BudgetLike = "erk",
    initializer: str | SparseInitializer = "exact_orthogonal",
    *,
    structure: Structure | None = None,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
) -> AnyLayer:
    """Draws sparse, exactly orthogonal kernels for a tf_keras model, and fixes their masks.

    The counterpart of `keras_sparse_ortho.sparsify`, with its arguments and errors; with the same
    paths and seeds the kernels are those of Keras 3, before normalization, too. `model`,
    `include`, `exclude` and the result are as in `prune_with_mask`. Biases and kernels that are not
    selected keep their values.

    Examples:
        >>> import keras_sparse_ortho as kso
        >>> tf_keras = kso.tfmot.register_initializers()
        >>> layers = [tf_keras.layers.Dense(128), tf_keras.layers.Dense(10, name="head")]
        >>> dense = tf_keras.Sequential([tf_keras.Input((64,)), *layers])
        >>> model = kso.tfmot.prune_exact_orthogonal(dense, density=0.1, seed=0)
        >>> kso.tfmot.prunable_weights(model)[1]
        <head/kernel shape=(128, 10), density=0.309375>
    """
    weights = select_weights(model, include, exclude)
    draws = draw_kernels(
        model, weights, density, budget, initializer, structure, seed
    )
    return with_masks(model, draws)


@other_keywords
def exact_orthogonal_initializers(
    model: AnyLayer,
    density: float | None = None,
    budget: BudgetLike = "erk",
    initializer: str | SparseInitializer = "exact_orthogonal",
    *,
    structure: Structure | None = None,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
) -> dict[str, SparseInitializer]:
    """Initializers for the layers of a subclassed tf_keras model, by weight path.

    Wrappers cannot be put into a subclassed model, so it makes them itself: give each layer its
    initializer, and wrap it in `PruneWithMask`. An initializer has the density that the budget
    gives to its kernel, the gain that fits the layers that follow it, and a seed. So the kernels
    are those of `prune_exact_orthogonal` for a functional model of the same layers and paths.

    Args:
        model: tf_keras Model, called once on an input, without wrappers. It is not changed.
        density: float in (0, 1]. Global live fraction of the selected kernels.
        budget: As in `prune_with_mask`.
        initializer: str or sparse initializer, as in `keras_sparse_ortho.sparsify`.
        structure: Structure of all kernels, e.g. `Block(4)`.
        seed: int, or `None` for a new one.
        include: Selection of kernels, as in `prune_with_mask`.
        exclude: Selection of kernels to leave out, which have no initializer in the result.

    Raises:
        NotPrunableError: A Keras 3 or unbuilt model; weights that are wrapped already or not
            finite; nothing to prune.
        BudgetError: A density or budget that does not fit the model.
        UnknownWeightError: Where the result is asked for a path that no kernel has.

    Limits: TFMOT's `strip_pruning` takes no subclassed model: `copy_weights` copies the weights
    into the same model without wrappers.

    Examples:
        >>> import numpy as np, keras_sparse_ortho as kso
        >>> tf_keras = kso.tfmot.register_initializers()
        >>> class Net(tf_keras.Model):
        ...     def __init__(self, starts=None):
        ...         super().__init__()
        ...         self.hidden = tf_keras.layers.Dense(16, name="hidden")
        ...         if starts is not None:
        ...             self.hidden.kernel_initializer = starts["hidden/kernel"]
        ...             self.hidden = kso.tfmot.PruneWithMask(self.hidden)
        ...
        ...     def call(self, x):
        ...         return self.hidden(x)
        >>> x = np.ones((1, 16), "float32")
        >>> plain = Net()
        >>> _ = plain(x)
        >>> starts = kso.tfmot.exact_orthogonal_initializers(plain, 0.25, seed=0)
        >>> model = Net(starts)
        >>> _ = model(x)
        >>> kso.tfmot.prunable_weights(model)
        [<hidden/kernel shape=(16, 16), density=0.25>]
    """
    weights = select_weights(model, include, exclude, rewritten=False)
    draws = draw_kernels(
        model, weights, density, budget, initializer, structure, seed
    )
    initializers = _Initializers()
    for path, drawn in draws.items():
        assert drawn.initializer is not None
        initializers[path] = drawn.initializer
    return initializers


class _Initializers(dict[str, SparseInitializer]):
    """A dict whose error for another path has its paths."""

    def __missing__(self, path: str) -> SparseInitializer:
        raise UnknownWeightError(
            f"No kernel has this path. There are: {', '.join(self)}. Received: {path!r}"
        )
