"""Fixed masks: `PruneWithMask`, `prune_with_mask`, `prune_exact_orthogonal`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_sparse_ortho._checks import check_density, other_keywords
from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw, Draw, SparseInitializer, adopt, draw
from keras_sparse_ortho.kernels import PrunableWeight, Selection, select
from keras_sparse_ortho.orthogonal import Structure, largest_mask, live_count
from keras_sparse_ortho.pruning import BudgetLike, draw_kernels, plan_for
from keras_sparse_ortho.tfmot._tf_keras_internals import tf_keras
from keras_sparse_ortho.tfmot._weights import (
    TfKerasWeight,
    as_numpy,
    find_kernels,
    rewrite,
    select_weights,
)
from keras_sparse_ortho.tfmot._wrapper import EffectiveWeightWrapper, WeightState, check_finite


@dataclasses.dataclass(eq=False, repr=False)
class _Masked(WeightState):
    """Effective weight `w` where the mask is not 0, and exactly 0 elsewhere."""

    variable: Any  # of the mask

    def effective(self) -> Any:
        # Unlike in a product, 0 even for infinite or NaN weights; faster than `tf.where`.
        raw = tf.convert_to_tensor(self.raw)
        return tf.math.multiply_no_nan(raw, tf.cast(self.variable, raw.dtype))

    def mask(self) -> np.ndarray:
        return as_numpy(self.variable) != 0

    def settle(self) -> None:
        self.raw.assign(self.effective())

    def assign(self, mask: np.ndarray) -> None:
        self.variable.assign(mask.astype(self.variable.dtype.as_numpy_dtype))
        self.settle()


@tf_keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class PruneWithMask(EffectiveWeightWrapper):
    """Wraps a tf_keras layer with fixed masks: `w_e = w` where live, 0 elsewhere.

    A subclass of TFMOT's `PruneLowMagnitude`. The mask holds from the first step, with or without
    callbacks, and raw weights, gradients and optimizer moments of dead entries are exactly zero.

    The mask comes from the first of these: `masks`; the `initializers`, which draw kernel and mask;
    `density`, or the counts in `live`, as the largest magnitudes of each kernel when the wrapper is
    built; the layer's own sparse initializers.

    Args:
        layer: Any tf_keras layer, built or not, whether or not TFMOT supports it.
        masks: Dict from weight name (`"kernel"`, or `"query/kernel"` for a sublayer) to a bool
            array of its shape; other weights stay dense. `None` for another source.
        selected: Which of the layer's kernels, as indices into the list of them; `None` for all.
        initializers: A sparse initializer for each kernel, or `None`.
        live: Number of live entries of each kernel, or `None`.
        density: Live fraction of every kernel, in (0, 1], or `None`.
        **kwargs: As for tf_keras' `Layer`.

    Raises:
        DensityError: A density outside (0, 1].
        NotPrunableError: When built: a layer without kernels, weights that are not finite, or no
            source of a mask.
        ValueError: Several of `masks`, `live` and `density`; TFMOT's arguments for ranking. When
            built: masks, initializers or counts that do not fit the kernels.

    Limits: the dense kernel is stored and multiplied. Under `MirroredStrategy`, wrap the sublayers
    of a layer that holds a BatchNormalization besides kernels.

    Example:

    >>> import numpy as np
    >>> import keras_sparse_ortho as kso
    >>> tf_keras = kso.tfmot.register_initializers()
    >>> mask = np.eye(4, dtype=bool)
    >>> layer = kso.tfmot.PruneWithMask(tf_keras.layers.Dense(4, name="hidden"), {"kernel": mask})
    >>> _ = layer(np.ones((1, 4), "float32"))
    >>> int(np.count_nonzero(layer.layer.kernel.numpy())), layer.name
    (4, 'prune_with_mask_hidden')
    """

    def __init__(
        self,
        layer: Any,
        masks: Mapping[str, np.ndarray] | None = None,
        *,
        selected: Sequence[int] | None = None,
        initializers: Sequence[Any] | None = None,
        live: Sequence[int] | None = None,
        density: float | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"masks": masks, "live": live, "density": density}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"Give only one of `masks`, `live` and `density`. Received: {given}")
        self._density = None if density is None else check_density(density)
        self._pending = None if masks is None else dict(masks)
        self._initializers: list[Any] | None = None
        if initializers is not None:
            self._initializers = [tf_keras.initializers.get(one) for one in initializers]
        self._live = None if live is None else [int(count) for count in live]
        super().__init__(layer, selected, **kwargs)

    def build(self, input_shape: Any) -> None:
        self._build_layer(input_shape)
        self._check_sources()
        super().build(input_shape)
        for index, state in enumerate(self.states if self._pending is not None else []):
            name = state.weight.path.removeprefix(f"{self.layer.name}/")
            self._hold(index, np.asarray(self._pending[name]))  # type: ignore[index]
        self._pending = None
        self._live = [int(state.mask().sum()) for state in self.states]
        self._density = None

    def _hold(
        self, index: int, mask: np.ndarray, kernel: np.ndarray | None = None, drawn_by: Any = None
    ) -> None:
        """Sets the mask of a weight, and its dead entries to zero; new values, if there are any."""
        states = self.states
        state = states[index]
        path = state.weight.path
        if mask.shape != state.weight.shape or mask.dtype != bool or not mask.any():
            raise ValueError(
                f"The mask of '{path}' must be a bool array of shape {state.weight.shape} with a "
                f"live entry. Received: dtype {mask.dtype}, shape {mask.shape}, {np.sum(mask)} live"
            )
        if kernel is not None:
            state.raw.assign(kernel)
        check_finite(state.weight)
        state.assign(mask)
        if self._live is not None and len(self._live) == len(states):
            self._live[index] = int(mask.sum())
        if drawn_by is not None or self._initializers is not None:  # for clones
            self._initializers = self._initializers or [None] * len(states)
            self._initializers[index] = drawn_by

    def get_config(self) -> dict[str, Any]:
        initializers = self._initializers
        if initializers is not None:
            serialize = tf_keras.initializers.serialize
            initializers = [None if one is None else serialize(one) for one in initializers]
        own = {"initializers": initializers, "live": self._live, "density": self._density}
        return super().get_config() | own

    def _check_sources(self) -> None:
        """Selects the kernels that `masks` name; checks names, and counts of the other sources."""
        paths = [w.path for w in find_kernels(self.layer, self.layer.name)]
        if self._pending is not None:
            names = [path.removeprefix(f"{self.layer.name}/") for path in paths]
            if not self._pending or not set(self._pending) <= set(names):
                raise ValueError(
                    f"`masks` must name kernels of the layer '{self.layer.name}', which are "
                    f"{names}. Received: masks={list(self._pending)}"
                )
            self._selected = [k for k, name in enumerate(names) if name in self._pending]
        if self._selected is not None:
            paths = [paths[k] for k in self._selected]
        for name, values in (("initializers", self._initializers), ("live", self._live)):
            if values is not None and paths and len(values) != len(paths):
                raise ValueError(
                    f"`{name}` must hold one for each kernel, which are {paths}. "
                    f"Received: {len(values)} of them, {values!r}"
                )

    def _new_state(
        self, index: int, weight: TfKerasWeight, variable: Any, mask: Any, threshold: Any
    ) -> WeightState:
        state = _Masked(weight, variable, mask)
        if self._pending is not None:
            return state
        value = check_finite(weight)
        initializer = weight.initializer
        if self._initializers is not None and self._initializers[index] is not None:
            initializer = self._initializers[index]
            drawn = draw(weight, initializer)
            variable.assign(drawn.kernel)
            state.assign(drawn.mask)
        elif self._live is not None:
            state.assign(largest_mask(np.abs(value), self._live[index]))
        elif self._density is not None:
            state.assign(largest_mask(np.abs(value), live_count(self._density, weight.size)))
        elif isinstance(initializer, SparseInitializer):
            drawn = adopt(weight, initializer)
            if drawn.kernel is not None:
                variable.assign(drawn.kernel)
            state.assign(drawn.mask)
        else:
            raise NotPrunableError(
                f"PruneWithMask has no mask for '{weight.path}': give it `masks`, `density`, "
                "`initializers` or `live` counts, or the layer a sparse initializer. "
                f"Received: initializer={type(initializer).__name__}"
            )
        return state


def prune_with_mask(
    model: Any,
    masks: Mapping[str, np.ndarray] | None = None,
    *,
    density: float | None = None,
    budget: BudgetLike = "erk",
    include: Selection = None,
    exclude: Selection = None,
) -> Any:
    """Wraps the layers of a tf_keras model with fixed masks.

    1. `prune_with_mask(model, {"hidden/kernel": mask})`: the given masks.
    2. `prune_with_mask(model, density=0.1)`: the largest magnitudes of each kernel, with the counts
       of the budget. For trained models.
    3. `prune_with_mask(model)`: the masks of the layers' own sparse initializers.

    The wrappers are `PruneWithMask`; TFMOT's tools treat the model as if TFMOT had wrapped it. Any
    layer can be wrapped, whether or not TFMOT supports it: subclasses of Dense, depthwise
    convolutions, EinsumDense, Bidirectional, blocks of layers.

    Args:
        model: A built tf_keras model: Sequential, functional or nested. It is not changed.
        masks: Dict from weight path (see `prunable_weights`) to a bool array of its shape.
        density: Global live fraction over the selected kernels, in (0, 1].
        budget: `"erk"` (default), `"er"`, `"uniform"`, or a `Budget` for the selected kernels.
        include: Which kernels, in 2 and 3: weight paths, layer paths or regular expressions (one
            or a list), or a predicate. Default: all kernels and embeddings.
        exclude: Which kernels to leave out.

    Returns:
        A new model with the same weights, not compiled.

    Raises:
        NotPrunableError: A Keras 3, unbuilt or subclassed model; weights that are wrapped already
            or not finite; nothing to prune.
        BudgetError: A density or budget that does not fit the model.
        UnknownWeightError: A path that no weight has.
        ValueError: A mask of the wrong shape or dtype, or without live entries.

    Example:

    >>> import numpy as np
    >>> import keras_sparse_ortho as kso
    >>> tf_keras = kso.tfmot.register_initializers()
    >>> dense = tf_keras.Sequential(
    ...     [tf_keras.Input((16,)), tf_keras.layers.Dense(8, name="hidden")])
    >>> model = kso.tfmot.prune_with_mask(dense, density=0.25)
    >>> kso.tfmot.prunable_weights(model)
    [<hidden/kernel shape=(16, 8), density=0.25>]
    """
    by_density = density is not None or isinstance(budget, Budget)
    if masks is not None and (by_density or include is not None or exclude is not None):
        raise ValueError(
            "`masks` and the other arguments are mutually exclusive. "
            f"Received: density={density!r}, include={include!r}, exclude={exclude!r}"
        )
    if masks is not None:
        weights = select_weights(model, lambda w: w.path in masks, None)
        for path in masks:
            select(weights, path, "masks")
        return _with_masks(model, {w.path: Draw(np.asarray(masks[w.path])) for w in weights})
    weights = select_weights(model, include, exclude)
    if by_density:
        counts = plan_for(density, budget, weights, orthogonal=False).counts
        drawn = {w.path: largest_mask(np.abs(w.raw_value()), counts[w.path]) for w in weights}
        return _with_masks(model, {path: Draw(mask) for path, mask in drawn.items()})
    table: dict[str, Draw] = {}
    for weight in weights:
        if isinstance(weight.initializer, SparseInitializer):
            # The layer keeps its initializer, from which clones draw their masks.
            own = adopt(weight, weight.initializer)
            kernel = own.kernel if own.sets_values else None
            table[weight.path] = Draw(own.mask, kernel, fresh=own.fresh)
    if not table:
        raise NotPrunableError(
            "No layer of the model has a sparse initializer, and neither `masks` nor `density` was "
            f"given. Received: model={model.name!r}"
        )
    return _with_masks(model, table)


def _with_masks(model: Any, table: Mapping[str, AnyDraw]) -> Any:
    """A copy of a model in which the weights of `table` have these masks and values."""
    weights: list[PrunableWeight] = select_weights(model, lambda w: w.path in table, None)
    full_paths = {id(weight.variable): weight.path for weight in weights}
    plans: list[list[AnyDraw]] = []

    def wrap(copy: Any, indices: list[int], kernels: list[TfKerasWeight]) -> PruneWithMask:
        chosen = [kernels[k] for k in indices]
        # In the order of the wrapper's states: a copy may have another name.
        plans.append([table[full_paths[id(w.variable)]] for w in chosen])
        # Built with full masks: the weights of the given model are copied afterwards.
        selected = None if len(indices) == len(kernels) else indices
        return PruneWithMask(copy, selected=selected, live=[w.size for w in chosen])

    result, wrappers = rewrite(model, weights, wrap)
    for wrapper, plan in zip(wrappers, plans, strict=True):
        for index, drawn in enumerate(plan):
            wrapper._hold(index, drawn.mask, drawn.kernel, drawn.initializer)
    return result


@other_keywords()
def prune_exact_orthogonal(
    model: Any,
    density: float | None = None,
    budget: BudgetLike = "erk",
    initializer: str | SparseInitializer = "exact_orthogonal",
    *,
    structure: Structure | None = None,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
) -> Any:
    """Draws sparse, exactly orthogonal kernels for a tf_keras model, and fixes their masks.

    The counterpart of `keras_sparse_ortho.sparsify`, with its arguments and errors: layers are
    wrapped with `PruneWithMask`, and with the same paths and seeds the kernels are those of Keras
    3. `model`, `include` and `exclude` are as in `prune_with_mask`.

    Returns:
        A new model, not compiled. Biases and kernels that are not selected keep their values.

    Example:

    >>> import keras_sparse_ortho as kso
    >>> tf_keras = kso.tfmot.register_initializers()
    >>> dense = tf_keras.Sequential([
    ...     tf_keras.Input((64,)),
    ...     tf_keras.layers.Dense(128, activation="relu", name="hidden"),
    ...     tf_keras.layers.Dense(10, name="head"),
    ... ])
    >>> model = kso.tfmot.prune_exact_orthogonal(dense, density=0.1, seed=0)
    >>> for weight in kso.tfmot.prunable_weights(model):
    ...     print(weight)
    <hidden/kernel shape=(64, 128), density=0.0672607>
    <head/kernel shape=(128, 10), density=0.309375>
    """
    weights = select_weights(model, include, exclude)
    draws = draw_kernels(weights, weights, density, budget, initializer, structure, seed)
    return _with_masks(model, draws)
