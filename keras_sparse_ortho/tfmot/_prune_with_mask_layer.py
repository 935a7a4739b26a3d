"""`PruneWithMask`: TFMOT's wrapper with a mask that is given and held."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer, adopt, draw
from keras_sparse_ortho.orthogonal import largest_mask, live_count
from keras_sparse_ortho.tfmot._imports import tf_keras
from keras_sparse_ortho.tfmot._weights import TfKerasWeight, as_numpy, find_kernels
from keras_sparse_ortho.tfmot._wrapper import EffectiveWeightWrapper, WeightState, check_finite


class _Masked(WeightState):
    """Effective weight `w` where the mask is not 0, and exactly 0 elsewhere."""

    def __init__(self, weight: TfKerasWeight, raw: Any, mask: Any) -> None:
        super().__init__(weight, raw)
        self.variable = mask

    def effective(self) -> Any:
        # Unlike a product it is 0, and so is its gradient, even where the other is infinite or NaN.
        # Faster than `tf.where`, which has the mask converted and a scalar broadcast, both ways.
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
    """Wraps a tf_keras layer so that its kernels keep a mask: `w_e = w` where live, 0 elsewhere.

    A subclass of TFMOT's `PruneLowMagnitude`: `strip_pruning`, `UpdatePruningStep`,
    `PruningSummaries` and `collect_prunable_layers` take it as one of their own. The mask holds
    from the first step, whether or not a callback runs, and gradients and optimizer moments of
    dead entries are exactly zero. Raw weights are zero there as well, so that checkpoints are
    sparse at every step.

    Where a mask comes from, in this order: `masks`; the `initializers`, which draw kernel and mask;
    `density`, or the counts in `live`, as the largest magnitudes of each kernel when the wrapper is
    built (this is what `clone_model` does: it draws new weights, and so needs a new mask of the
    same count); the layer's own initializers, if they are ours.

    Args:
        layer: A tf_keras layer, built or not: one that TFMOT knows or any other.
        masks: Dict from weight name (`"kernel"`, or `"query/kernel"` below the layer) to a bool
            array of its shape; weights that are not named stay dense. `None` for the other ways.
        selected: Which of the layer's kernels, as indices into the list of them; `None` for all.
        initializers: One of our initializers for each kernel, or `None`.
        live: Number of live entries of each kernel, or `None`.
        density: Live fraction of every kernel, in (0, 1], or `None`.
        **kwargs: As for tf_keras' `Layer`. The name is `prune_with_mask_` and the layer's, in
            TFMOT's manner.

    Raises:
        DensityError: A density outside (0, 1].
        NotPrunableError: When built: a layer without kernels, weights that are not finite, or no
            source of a mask.
        ValueError: Several of `masks`, `live` and `density`; TFMOT's `pruning_schedule`,
            `block_size`, `block_pooling_type` and `sparsity_m_by_n`, as nothing is ranked here.
            When built: masks of other names, shapes or dtypes than the kernels', or not one
            initializer or count for each kernel.

    Limits: the dense kernel is stored and multiplied. Under `MirroredStrategy` a layer that holds
    a BatchNormalization besides kernels must be taken apart.

    Example:

    >>> import numpy as np
    >>> import keras_sparse_ortho as kso
    >>> tf_keras = kso.tfmot.register_initializers()
    >>> mask = np.eye(4, dtype=bool)
    >>> layer = kso.tfmot.PruneWithMask(tf_keras.layers.Dense(4, name="hidden"), {"kernel": mask})
    >>> _ = layer(np.ones((1, 4), "float32"))
    >>> int(np.count_nonzero(layer.layer.kernel.numpy())), layer.name
    (4, 'prune_with_mask_hidden')
    >>> kso.tfmot.PruneWithMask(tf_keras.layers.Dense(4), density=0.25).get_config()["density"]
    0.25
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
            raise ValueError(
                "One of `masks`, `live` and `density` says which entries are live. "
                f"Received: {given}"
            )
        self._density = None if density is None else check_density(density)
        self._pending = None if masks is None else dict(masks)
        self._initializers: list[Any] | None = None
        if initializers is not None:
            self._initializers = [tf_keras.initializers.get(one) for one in initializers]
        self._live = None if live is None else [int(count) for count in live]
        super().__init__(layer, selected, **kwargs)

    def build(self, input_shape: Any) -> None:
        """Builds the layer, and sets the masks."""
        pending = self._pending
        if pending is not None:
            self._selected = self._named(pending, input_shape)
        self._build_layer(input_shape)
        self._check_counts()
        super().build(input_shape)
        if pending is not None:
            states = self._masked()
            for name in pending:
                state = next(s for s in states if _relative(s, self.layer) == name)
                self.assign_mask(state.weight.path, np.asarray(pending[name]))
            self._pending = None
        self._live = [int(state.mask().sum()) for state in self._masked()]
        self._density = None

    def assign_mask(
        self, path: str, mask: np.ndarray, kernel: np.ndarray | None = None, initializer: Any = None
    ) -> None:
        """Sets another mask for a weight, and the weight to zero where it is not live.

        Args:
            path: Of the weight, beginning with the layer's name.
            mask: Bool array of its shape with at least one live entry.
            kernel: Values to set, or `None` to keep the weight's.
            initializer: What has drawn the two, so that clones draw the like.
        """
        states = self._masked()
        index = next((k for k, s in enumerate(states) if s.weight.path == path), None)
        if index is None:
            known = [state.weight.path for state in states]
            raise ValueError(f"The wrapper prunes {known}. Received: path={path!r}")
        state = states[index]
        if mask.shape != state.weight.shape or mask.dtype != bool or not mask.any():
            raise ValueError(
                f"The mask of '{path}' is a bool array of shape {state.weight.shape} with a live "
                f"entry. Received: dtype {mask.dtype}, shape {mask.shape}, {np.sum(mask)} live"
            )
        if kernel is not None:
            state.raw.assign(kernel)
        check_finite(state.weight)
        state.assign(mask)
        if self._live is not None and len(self._live) == len(states):
            self._live[index] = int(mask.sum())
        if initializer is not None:
            self._initializers = self._initializers or [None] * len(states)
            self._initializers[index] = initializer
        elif self._initializers is not None:
            self._initializers[index] = None

    def get_config(self) -> dict[str, Any]:
        """The layer, counts and initializers; masks are saved as variables."""
        config = super().get_config()
        initializers = self._initializers
        if initializers is not None:
            initializers = [
                None if one is None else tf_keras.initializers.serialize(one)
                for one in initializers
            ]
        return {
            **config,
            "initializers": initializers,
            "live": self._live,
            "density": self._density,
        }

    def _check_counts(self) -> None:
        """Raises ValueError unless there is one initializer or count for each kernel."""
        kernels = [w.path for w in find_kernels(self.layer, self.layer.name)]
        if self._selected is not None:
            kernels = [kernels[k] for k in self._selected]
        for name, values in (("initializers", self._initializers), ("live", self._live)):
            if values is not None and kernels and len(values) != len(kernels):
                raise ValueError(
                    f"`{name}` must hold one for each kernel, which are {kernels}. "
                    f"Received: {len(values)} of them, {values!r}"
                )

    def _masked(self) -> list[_Masked]:
        return [state for state in self.states if isinstance(state, _Masked)]

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
                "`initializers` or `live` counts, or the layer one of our initializers. "
                f"Received: initializer={type(initializer).__name__}"
            )
        return state

    def _named(self, masks: Mapping[str, np.ndarray], input_shape: Any) -> list[int]:
        self._build_layer(input_shape)
        prefix = f"{self.layer.name}/"
        names = [w.path.removeprefix(prefix) for w in find_kernels(self.layer, self.layer.name)]
        unknown = [name for name in masks if name not in names]
        if unknown or not masks:
            raise ValueError(
                f"`masks` must name kernels of the layer '{self.layer.name}', which are {names}. "
                f"Received: masks={list(masks)}"
            )
        return [k for k, name in enumerate(names) if name in masks]


def _relative(state: WeightState, layer: Any) -> str:
    return state.weight.path.removeprefix(f"{layer.name}/")
