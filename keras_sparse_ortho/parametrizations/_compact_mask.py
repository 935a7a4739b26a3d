"""`CompactMask`: a fixed mask of which only the live values are stored."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import scatter_sorted
from keras_sparse_ortho._keras_internals import (
    Read,
    StandIns,
    check_assignments,
    in_stateless_scope,
    saves_by_itself,
    value_in_scope,
    value_source,
)
from keras_sparse_ortho._optimizer_slots import move_slots
from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer, are_weights_set_later, axes_for
from keras_sparse_ortho.kernels import DenseGradient, PrunableWeight, Storage
from keras_sparse_ortho.orthogonal import live_count
from keras_sparse_ortho.parametrizations._fake_quantization import quantized_value
from keras_sparse_ortho.parametrizations._fixed_mask import FixedMask, digest

_LARGEST = 2**31 - 1
_SUMS_OVER_ENTRIES = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class CompactMask(FixedMask):
    """`FixedMask` in compact storage: live values and their indices are the only variables.

    With `n` live entries, `values` (n,) and sorted flat `indices` (n,) int32 of a kernel `K`:

        vec(K)[indices] = values, and 0 elsewhere;  dL/dvalues = vec(dL/dK)[indices]

    The dense kernel is a temporary of the step: at density 0.1, weights, Adam's moments and files
    take a tenth of what they take dense, and the indices as much as the values. Outputs, gradients
    and training are those of a `FixedMask` up to rounding. The arguments are those of `FixedMask`.

    The layer's own variable keeps shape, dtype and path, but has no value outside of the calls of
    its layer: read `keras_sparse_ortho.prunable_weights(model)`, whose `value` is dense.

    Raises:
        NotPrunableError: When built: as `FixedMask`; a kernel of 2**31 entries and more; one with a
            constraint other than `NonNeg`, which needs the whole kernel after every update; a
            custom layer that overrides `save_own_variables`.
        DensityError: As `FixedMask`.

    Limits: a step costs about what the dense one does, and at its largest its temporaries hold one
    dense kernel for each layer. Optimizers that treat matrices specially (Adafactor, Muon) see a
    vector. Regularizers other than L1 and L2 are those of the effective kernel. What needs the
    dense raw weight is refused: learnt and scheduled masks, LoRA and `quantize` (convert with
    `keras_sparse_ortho.convert`, or strip).

    Example:

    >>> import keras
    >>> from keras_sparse_ortho import PrunableLayer
    >>> layer = PrunableLayer(keras.layers.Dense(8, name="d"), CompactMask(0.25))
    >>> layer.build((None, 16))
    >>> [(weight.name, tuple(weight.shape)) for weight in layer.weights]
    [('kernel_values', (32,)), ('bias', (8,)), ('kernel_indices', (32,))]
    """

    compact = True

    @other_keywords()
    def __init__(
        self,
        density: float | None = None,
        mask: np.ndarray | None = None,
        initializer: SparseInitializer | None = None,
        *,
        drawn_digest: int | None = None,
    ) -> None:
        super().__init__(density, mask, initializer, drawn_digest=drawn_digest)
        self.kernel: Any = None
        self.values: Any = None
        self.indices: Any = None
        self._stand_ins: StandIns | None = None
        # What gives the dense kernel until `values` holds it.
        self._source: Callable[[], Any] | None = None
        self._has_value = False
        self._drawn: tuple[np.ndarray, np.ndarray] | None = None

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        refuse_compact(weight)
        variable = self.kernel = weight.variable
        self._source, self._has_value = value_source(variable)
        self._weight = dataclasses.replace(weight, storage=self)
        live = self._count()
        stand_ins = StandIns(
            weight.owner,
            variable,
            f"The weight '{weight.path}' is stored compactly (CompactMask): its variable has a "
            "value only while its wrapped layer is called, and takes none. Read "
            "`keras_sparse_ortho.prunable_weights(model)`, each with its `value`, or convert with "
            "keras_sparse_ortho.convert(model, 'masked') or strip(model). "
            f"Received: a use of '{variable.path}' outside of a call",
        )
        values = stand_ins.create(
            "values",
            shape=(live,),
            dtype=variable.dtype,
            trainable=variable.trainable,
            initializer=self._initial_values,
        )
        indices = stand_ins.create(
            "indices",
            shape=(live,),
            dtype="int32",
            trainable=False,
            autocast=False,
            initializer=self._initial_indices,
        )
        values.regularizer = _of_values(variable.regularizer, self.effective)
        values.constraint = variable.constraint
        self.values, self.indices, self._stand_ins = values, indices, stand_ins
        self._weight = dataclasses.replace(self.weight, variable=values)
        stand_ins.put(values, indices)
        check_assignments(indices, self._check_given)

    def effective(self, value: Any, after: Any = None) -> Any:
        """The dense kernel for the live values, which XLA makes once `after` is there."""
        flat = scatter_sorted(value, self.indices.value, self.weight.size, after)
        return keras.ops.reshape(flat, self.weight.shape)

    def current(self, after: Any = None) -> Any:
        """The dense kernel; that of the enclosing scope, if it has one, as for dense gradients."""
        given = value_in_scope(self.kernel)
        return self.quantized(self.effective(self.values.value, after) if given is None else given)

    @property
    def layer_variable(self) -> Any:
        return self.kernel

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.kernel.shape)

    @property
    def live(self) -> int:
        return int(self.values.shape[0])

    def value(self) -> np.ndarray:
        return quantized_value(self.quantizer, self.raw_value(), self.weight.outputs_shape)

    def raw_value(self, *, copy: bool = True) -> np.ndarray:
        if self._source is not None:
            return to_numpy(self._source())
        return self._scattered(to_numpy(self.values), to_numpy(self.indices))

    def mask_value(self) -> np.ndarray:
        flat = np.zeros(self.weight.size, dtype=bool)
        flat[to_numpy(self.indices)] = True
        return flat.reshape(self.weight.shape)

    def support(self) -> list[Any]:
        return [self.indices]

    def assign_mask(self, mask: np.ndarray) -> None:
        """Moves live entries: those that stay keep their values, new ones are zero."""
        mask = np.asarray(mask)
        count = int(np.count_nonzero(mask))
        if mask.shape != self.weight.shape or mask.dtype != bool or count != self.live:
            raise ValueError(
                f"In compact storage the mask of '{self.weight.path}' is a bool array of shape "
                f"{self.weight.shape} with {self.live} live entries, for which there is room. "
                f"Received: dtype {mask.dtype}, shape {mask.shape}, {count} live"
            )
        indices, raw = np.flatnonzero(mask), self.raw_value().reshape(-1)
        assign(self.indices, indices.astype(np.int32))
        assign(self.values, raw[indices])

    def move(self, live: Any, optimizer: Any) -> None:
        before, after = to_numpy(self.indices), np.flatnonzero(live)
        source = np.searchsorted(before, after)
        source[~np.isin(after, before)] = -1
        self.assign_mask(live)
        move_slots(optimizer, self.values, source)

    def dense_gradient(self) -> DenseGradient:
        """That of a dense kernel in place of the values, and of what regularizes the values."""

        def collect(gradient: np.ndarray, of_values: np.ndarray) -> np.ndarray:
            gradient = gradient.copy()
            gradient.reshape(-1)[to_numpy(self.indices)] += of_values
            return gradient

        # As arrays: tensors of which one is computed from the other are not independent.
        return DenseGradient(
            variables=[self.kernel, self.values],
            values=lambda: [self.raw_value(), to_numpy(self.values)],
            collect=collect,
        )

    def slot_to_dense(self, slot: np.ndarray, start: float) -> np.ndarray:
        dense = np.full(self.shape, start, dtype=slot.dtype)
        dense.reshape(-1)[to_numpy(self.indices)] = slot
        return dense

    def slot_from_dense(self, slot: np.ndarray) -> np.ndarray:
        return slot.reshape(-1)[to_numpy(self.indices)]

    def assign_raw(self, value: Any) -> None:
        if isinstance(value, np.ndarray):  # no dense tensor on the device
            live = value.reshape(-1)[to_numpy(self.indices)]
        else:
            flat = keras.ops.reshape(keras.ops.convert_to_tensor(value), (-1,))
            live = keras.ops.take(flat, self.indices.value, axis=0)
        assign(self.values, live)

    def clear_dead(self) -> None:
        """Nothing: there is no raw weight that is not live."""

    def materialize(self) -> None:
        """Nothing: what is stored is the effective weight."""

    def release(self) -> None:
        assert self._stand_ins is not None
        self._stand_ins.take_away(self.value())
        self._weight = dataclasses.replace(self.weight, variable=self.kernel, storage=None)

    # What is stored at first.

    def _count(self) -> int:
        """How many entries will be live."""
        weight, drawn_by = self.weight, self.drawn_by
        if not in_stateless_scope() or self._given is not None:
            return self._draw()[1].size
        # Only shapes are traced now; kernel and mask are drawn when the variables get values.
        if drawn_by is not None:
            layout = axes_for(weight, drawn_by)
            return int(np.count_nonzero(drawn_by.sample(weight.shape, layout=layout)[1]))
        if self.density is None:
            return self.resolve(weight).mask.size  # raises
        return live_count(self.density, weight.size)

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Values and indices, drawn once."""
        if self._drawn is not None:
            return self._drawn
        assert self._source is not None
        if self._given is not None and are_weights_set_later() and not self._has_value:
            indices = np.flatnonzero(self.resolve(self.weight).mask)
            values = np.zeros(indices.size, dtype=np.float32)
        else:
            kernel = to_numpy(self._source())  # first, as an initializer then knows the mask
            self._source = functools.partial(keras.ops.convert_to_tensor, kernel)
            drawn = self.resolve(self.weight)
            kernel = kernel if drawn.kernel is None else drawn.kernel
            indices = np.flatnonzero(drawn.mask)
            values = kernel.reshape(-1)[indices]
            if drawn.fresh:
                self._drawn_digest = digest(self._scattered(values, indices))
        self._drawn = values, indices.astype(np.int32)
        return self._drawn

    def _initial_values(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        if in_stateless_scope():  # a placeholder: Keras only uses the shape
            return keras.ops.zeros(shape, dtype=dtype)
        return keras.ops.convert_to_tensor(self._draw()[0], dtype=dtype)

    def _initial_indices(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        if in_stateless_scope():
            return keras.ops.zeros(shape, dtype=dtype)
        indices = keras.ops.convert_to_tensor(self._draw()[1])
        # From here on the variables, of which this is the second, hold them.
        self._drawn = self._source = self._given = None
        self._weight = dataclasses.replace(self.weight, drawn_mask=None)
        return indices

    def _scattered(self, values: np.ndarray, indices: np.ndarray) -> np.ndarray:
        flat = np.zeros(self.weight.size, dtype=values.dtype)
        flat[indices] = values
        return flat.reshape(self.weight.shape)

    def _check_given(self, given: Read) -> None:
        """Raises unless indices and values, from a file or an argument, are those of the kernel."""
        indices, values = given(self.indices), given(self.values)
        wrong = None
        if indices.shape != (self.live,) or values.shape != (self.live,):
            wrong = f"indices of shape {indices.shape}, values of shape {values.shape}"
        elif not np.issubdtype(indices.dtype, np.integer):
            wrong = f"indices of dtype {indices.dtype}"
        elif indices.min() < 0 or indices.max() >= self.weight.size:
            wrong = f"indices from {indices.min()} to {indices.max()}"
        elif (steps := np.diff(indices.astype(np.int64)) <= 0).any():
            at = int(np.flatnonzero(steps)[0])
            wrong = f"{indices[at]} and then {indices[at + 1]}, at {at}"
        if wrong is not None:
            raise ValueError(
                f"The compact indices of '{self.weight.path}' must be {self.live} integers in "
                f"[0, {self.weight.size}), strictly increasing; what is loaded or set is damaged, "
                f"or of another model. Received: {wrong}"
            )


def refuse_unless_fixed(storage: Storage, received: str) -> None:
    """Raises for what needs the dense raw weight, as thresholds and scheduled masks do."""
    if not storage.movable:
        raise NotPrunableError(
            "Compact storage is for masks that are fixed: other parametrizations need the dense "
            f"raw weight. Received: {received}"
        )


def refuse_compact(weight: PrunableWeight) -> None:
    """Raises for a weight that cannot be stored compactly, with the reason."""
    reason = None
    constraint = weight.variable.constraint
    if weight.size > _LARGEST:
        reason = f"its flat indices are no int32. Received: {weight.size} entries"
    elif constraint is not None and type(constraint) is not keras.constraints.NonNeg:
        reason = (
            "its constraint needs the dense kernel after every update; leave the weight masked. "
            f"Received: constraint={constraint!r}"
        )
    elif saves_by_itself(weight.owner):
        reason = (
            "the class of its layer overrides `save_own_variables`, which would read the kernel; "
            f"leave the weight masked. Received: {type(weight.owner).__name__}"
        )
    if reason is not None:
        raise NotPrunableError(f"The weight '{weight.path}' cannot be stored compactly: {reason}")


class _Dense(keras.regularizers.Regularizer):
    """A regularizer of the dense kernel, for its live values."""

    def __init__(self, regularizer: Any, dense: Callable[[Any], Any]) -> None:
        self._regularizer = regularizer
        self._dense = dense

    def __call__(self, values: Any) -> Any:
        return self._regularizer(self._dense(keras.ops.convert_to_tensor(values)))


def _of_values(regularizer: Any, dense: Callable[[Any], Any]) -> Any:
    """The regularizer of live values that equals one of the kernel, `dense(values)`."""
    if regularizer is None or type(regularizer) in _SUMS_OVER_ENTRIES:
        return regularizer
    return _Dense(regularizer, dense)
