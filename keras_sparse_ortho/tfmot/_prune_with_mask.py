"""Fixed masks: `PruneWithMask` and `prune_with_mask`."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import (
    AnyDraw,
    Draw,
    SparseInitializer,
    adopt,
    draw,
)
from keras_sparse_ortho.kernels import PrunableWeight, Selection, select
from keras_sparse_ortho.orthogonal import floored_mask, live_count
from keras_sparse_ortho.pruning import BudgetLike, plan_for
from keras_sparse_ortho.tfmot._tf_keras_internals import tf_keras
from keras_sparse_ortho.tfmot._weights import (
    Masked,
    TfKerasWeight,
    find_kernels,
    prunable_weights,
    rewrite,
    select_weights,
)
from keras_sparse_ortho.tfmot._wrapper import EffectiveWeightWrapper


@tf_keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class PruneWithMask(EffectiveWeightWrapper):
    """Wraps a tf_keras layer with fixed masks: `w_e = w` where live, 0 elsewhere.

    A subclass of TFMOT's `PruneLowMagnitude`. The mask holds from the first step, with or without
    callbacks, and raw weights, gradients and optimizer moments of dead entries are exactly zero. It
    comes from the first of these: `masks`; the `initializers`, which draw kernel and mask; `live`
    or `density`, as the largest magnitudes of each kernel when the wrapper is built; the layer's
    own sparse initializers.

    Args:
        layer: tf_keras Layer, built or not, whether or not TFMOT supports it.
        masks: dict from weight name (`"kernel"`, or `"query/kernel"` for a sublayer) to a bool
            array of its shape; other weights stay dense.
        selected: list of int. Indices of kernels in the list of the layer's; `None` for all.
        initializers: list of a sparse initializer, or `None`, for each kernel.
        live: list of int. Live entries of each kernel.
        density: float in (0, 1]. Live fraction of every kernel.
        **kwargs: As for tf_keras' `Layer`.

    Raises:
        NotPrunableError: When built: a layer without kernels, weights that are not finite, or no
            source of a mask.
        ValueError: Several of `masks`, `live` and `density`; TFMOT's arguments for ranking. When
            built: masks, initializers or counts that do not fit the kernels.

    Limits: the dense kernel is stored and multiplied. Under `MirroredStrategy`, wrap the sublayers
    of a layer that holds a BatchNormalization besides kernels.

    Examples:
        >>> import numpy as np, keras_sparse_ortho as kso
        >>> dense = kso.tfmot.register_initializers().layers.Dense(4, name="hidden")
        >>> layer = kso.tfmot.PruneWithMask(dense, {"kernel": np.eye(4, dtype=bool)})
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
        if sum(source is not None for source in (masks, live, density)) > 1:
            raise ValueError(
                f"Give only one of these. Received: {masks=}, {live=}, {density=}"
            )
        self._density = None if density is None else check_density(density)
        self._pending = None if masks is None else dict(masks)
        get = tf_keras.initializers.get
        self._initializers = (
            None
            if initializers is None
            else [get(initializer) for initializer in initializers]
        )
        self._live = None if live is None else [int(count) for count in live]
        super().__init__(layer, selected, **kwargs)

    def build(self, input_shape: Any) -> None:
        """Builds the layer, and draws or takes the mask of each kernel."""
        self._build_layer(input_shape)
        paths = [w.path for w in find_kernels(self.layer, self.layer.name)]
        if self._pending is not None:
            names = [path.removeprefix(f"{self.layer.name}/") for path in paths]
            if not self._pending or not set(self._pending) <= set(names):
                raise ValueError(
                    f"`masks` must name kernels of the layer {self.layer.name!r}, which are "
                    f"{names}. Received: masks={list(self._pending)}"
                )
            self._selected = [
                k for k, name in enumerate(names) if name in self._pending
            ]
        if self._selected is not None:
            paths = [paths[k] for k in self._selected]
        for name, values in (
            ("initializers", self._initializers),
            ("live", self._live),
        ):
            if values is not None and paths and len(values) != len(paths):
                raise ValueError(
                    f"`{name}` must hold one for each kernel, which are {paths}. "
                    f"Received: {len(values)} of them, {values!r}"
                )
        super().build(input_shape)
        self._pending = self._density = None

    def _new_state(
        self, index: int, weight: TfKerasWeight, mask: Any, threshold: Any
    ) -> Any:
        state = Masked(weight, weight.variable, mask)
        _hold(state, self._drawn(index, weight))
        return state

    def _drawn(self, index: int, weight: TfKerasWeight) -> AnyDraw:
        """The mask of one kernel: as given, as its initializer draws it, or by magnitude."""
        initializer = (
            None if self._initializers is None else self._initializers[index]
        )
        if self._pending is not None:
            name = weight.path.removeprefix(f"{self.layer.name}/")
            return Draw(np.asarray(self._pending[name]))
        magnitudes = np.abs(weight.finite_raw_value())
        if initializer is not None:
            return draw(weight, initializer)
        if self._live is not None:
            return Draw(
                floored_mask(magnitudes, weight.layout, self._live[index])
            )
        if self._density is not None:
            count = live_count(self._density, weight.size)
            return Draw(floored_mask(magnitudes, weight.layout, count))
        if isinstance(weight.initializer, SparseInitializer):
            return adopt(weight, weight.initializer)
        raise NotPrunableError(
            f"PruneWithMask has no mask for {weight.path!r}: give it `masks`, `density`, "
            "`initializers` or `live` counts, or the layer a sparse initializer. "
            f"Received: initializer={type(weight.initializer).__name__}"
        )

    def take(self, draws: Sequence[AnyDraw]) -> None:
        """Sets masks, and values if there are any; clones of the wrapper draw them again."""
        for state, drawn in zip(self.states, draws, strict=True):
            _hold(state, drawn)
        if any(drawn.initializer is not None for drawn in draws):
            self._initializers = [drawn.initializer for drawn in draws]

    def get_config(self) -> dict[str, Any]:
        initializers = self._initializers
        if initializers is not None:
            # `initializers.serialize` warns of initializers that are not tf_keras' own.
            initializers = [
                initializer
                and tf_keras.saving.serialize_keras_object(initializer)
                for initializer in initializers
            ]
        live = [int(state.mask().sum()) for state in self.states] or self._live
        settings = {
            "initializers": initializers,
            "live": live,
            "density": self._density,
        }
        return super().get_config() | settings


def _hold(state: Masked, drawn: AnyDraw) -> None:
    weight, mask, kernel = state.weight, drawn.mask, drawn.kernel
    if mask.shape != weight.shape or mask.dtype != bool or not mask.any():
        raise ValueError(
            f"The mask of {weight.path!r} must be a bool array of shape {weight.shape} with a "
            f"live entry. Received: dtype {mask.dtype}, shape {mask.shape}, {np.sum(mask)} live"
        )
    if kernel is not None:
        state.raw.assign(kernel)
    weight.finite_raw_value()
    state.assign(mask)


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

    The result is new and not compiled, with the same weights in `PruneWithMask` wrappers, which
    TFMOT's tools treat as its own. Any layer can be wrapped.

    Args:
        model: tf_keras Model, built: Sequential, functional or nested.
        masks: dict from weight path (see `prunable_weights`) to a bool array of its shape.
        density: float in (0, 1]. Global live fraction of the selected kernels.
        budget: `"erk"` (default), `"er"`, `"uniform"`, or a `Budget` for the selected kernels.
        include: Selection of kernels, in 2 and 3: weight paths, layer paths or regular expressions
            (one or a list), or a predicate. Default: all kernels and embeddings.
        exclude: Selection of kernels to leave out.

    Raises:
        NotPrunableError: A Keras 3, unbuilt or subclassed model; weights that are wrapped already
            or not finite; nothing to prune.
        BudgetError: A density or budget that does not fit the model.
        UnknownWeightError: A path that no weight has.
        ValueError: A mask of the wrong shape or dtype, or without live entries.

    Examples:
        >>> import keras_sparse_ortho as kso
        >>> tf_keras = kso.tfmot.register_initializers()
        >>> hidden = tf_keras.layers.Dense(8, name="hidden")
        >>> dense = tf_keras.Sequential([tf_keras.Input((16,)), hidden])
        >>> kso.tfmot.prunable_weights(kso.tfmot.prune_with_mask(dense, density=0.25))
        [<hidden/kernel shape=(16, 8), density=0.25>]
    """
    by_density = density is not None or isinstance(budget, Budget)
    if masks is not None and (
        by_density or include is not None or exclude is not None
    ):
        raise ValueError(
            f"Give `masks` or the other arguments. Received: {density=}, {include=}, {exclude=}"
        )
    if masks is not None:
        candidates = prunable_weights(model)
        for path in masks:
            select(candidates, path, "masks")
        weights = select_weights(model, lambda w: w.path in masks, None)
        return with_masks(
            model, {w.path: Draw(np.asarray(masks[w.path])) for w in weights}
        )
    weights = select_weights(model, include, exclude)
    if by_density:
        counts = plan_for(density, budget, weights, orthogonal=False).counts
        drawn = {
            w.path: floored_mask(
                np.abs(w.raw_value()), w.layout, counts[w.path]
            )
            for w in weights
        }
        return with_masks(
            model, {path: Draw(mask) for path, mask in drawn.items()}
        )
    weights_with_initializers = [
        (w, w.initializer)
        for w in weights
        if isinstance(w.initializer, SparseInitializer)
    ]
    if not weights_with_initializers:
        raise NotPrunableError(
            "No layer of the model has a sparse initializer, and neither `masks` nor `density` was "
            f"given. Received: model={model.name!r}"
        )
    adopted = {
        weight.path: adopt(weight, initializer)
        for weight, initializer in weights_with_initializers
    }
    # Without the initializer: the layer keeps it, and clones draw their masks from it.
    return with_masks(
        model,
        {
            path: Draw(drawn.mask, drawn.kernel)
            for path, drawn in adopted.items()
        },
    )


def with_masks(model: Any, table: Mapping[str, AnyDraw]) -> Any:
    """A copy of a model in which the weights of `table` have these masks and values."""
    weights = select_weights(model, lambda w: w.path in table, None)

    def wrap(
        copy: Any, indices: list[int], kernels: list[PrunableWeight]
    ) -> PruneWithMask:
        # Built with full masks: the weights of the given model are copied afterwards.
        return PruneWithMask(
            copy, selected=indices, live=[w.size for w in kernels]
        )

    result, wrapped = rewrite(model, weights, wrap)
    for wrapper, _, kernels in wrapped:
        wrapper.take([table[weight.path] for weight in kernels])
    return result
