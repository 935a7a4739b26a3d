"""`FixedMask` and `CompactMask`: a mask that stays as it was set; dense or compact storage."""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import scatter_sorted
from keras_sparse_ortho._checks import check_density, other_keywords
from keras_sparse_ortho._keras_internals import (
    Read,
    StandIns,
    check_assignments,
    in_stateless_scope,
    saves_by_itself,
    value_in_scope,
    value_source,
)
from keras_sparse_ortho._optimizer_slots import move_slots, zero_slots
from keras_sparse_ortho._types import Config, Optimizer
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import DensityError, NotPrunableError
from keras_sparse_ortho.initializers import (
    AnyDraw,
    Draw,
    SparseInitializer,
    adopt,
    axes_for,
    draw,
)
from keras_sparse_ortho.kernels import DenseGradient, PrunableWeight, Storage
from keras_sparse_ortho.orthogonal import floored_mask, live_count
from keras_sparse_ortho.parametrizations._parametrization import (
    Masked,
    quantized_value,
)

_LARGEST = 2**31 - 1
_SUMS_OVER_ENTRIES = (
    keras.regularizers.L1,
    keras.regularizers.L2,
    keras.regularizers.L1L2,
)
_ENTRIES_AT_ONCE = 1 << 16  # entries of a kernel that are digested at once


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class FixedMask(Masked):
    """Effective weight `w_e = w` where the mask is live, and exactly 0 elsewhere.

    The gradient is exactly zero on masked entries. The raw weight is zero there too, so moments,
    weight decay and files are sparse. The mask comes from, in this order:

    1. `mask`; an `initializer` beside it says what drew the mask;
    2. `initializer`: kernel and mask are drawn again, with the true axes of the layer;
    3. the weight's own initializer, if it is one of ours (`ExactOrthogonal`, ...): its mask;
    4. `density`: the `round(density * size)` largest magnitudes, ties to the lower flat index.

    Args:
        density: float in (0, 1], or `None`. Live fraction.
        mask: bool array of the weight's shape, or `None`.
        initializer: SparseInitializer, or `None`.

    Raises:
        NotPrunableError: When built, if none of the four applies; if the weight is not finite; or
            if the initializer's mask would drop weights that have been trained.
        DensityError: When built, if `density` contradicts the initializer's or the mask's own.

    Limits: the dense kernel is stored and multiplied; masks save no time in training. Regularizers
    other than L1 and L2, such as Keras' `OrthogonalRegularizer`, move masked entries of the raw
    weight; `w_e` stays sparse.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> layer = kso.PrunableLayer(keras.layers.Dense(8), FixedMask(0.25))
        >>> layer.build((None, 16))
        >>> int(layer.parametrizations["kernel"].mask_value().sum())
        32
    """

    movable = True
    _drawn_digest: int | None = None  # of the weight as it was drawn

    @other_keywords
    def __init__(
        self,
        density: float | None = None,
        mask: np.ndarray | None = None,
        initializer: SparseInitializer | None = None,
    ) -> None:
        initializer = keras.initializers.get(initializer)
        if initializer is not None and not isinstance(
            initializer, SparseInitializer
        ):
            raise ValueError(
                "`initializer` must be one that draws a mask, such as ExactOrthogonal. "
                f"Received: initializer={initializer!r}"
            )
        self.density = None if density is None else check_density(density)
        self.initializer = initializer
        self._given = None if mask is None else self._checked(mask)
        # not drawn by the layer's own initializer
        self._was_given = mask is not None

    def _checked(self, mask: Any) -> np.ndarray:
        mask = np.asarray(mask)
        live = int(np.count_nonzero(mask))
        if mask.dtype != bool or not live:
            raise ValueError(
                "`mask` must be a bool array with at least one live entry. "
                f"Received: mask of dtype {mask.dtype} with {live} live"
            )
        if (
            self.density is not None
            and live_count(self.density, mask.size) != live
        ):
            raise DensityError(
                f"`mask` has the density {live / mask.size:.6g}. Received: density={self.density!r}"
            )
        self.density = live / mask.size
        return mask

    @classmethod
    def awaiting_values(
        cls, mask: np.ndarray, initializer: SparseInitializer | None
    ) -> "FixedMask":
        """A template for a kernel whose values are set after the wrapper is built.

        Args:
            mask: bool array. Live entries.
            initializer: SparseInitializer that drew them, or `None`.
        """
        template = cls(mask=mask, initializer=initializer)
        template.awaits_values = True
        return template

    def clone(self) -> "FixedMask":
        density = None if self._given is not None else self.density
        copy = type(self)(density, self._given, self.initializer)
        copy._was_given = self._was_given
        copy.awaits_values = self.awaits_values
        return copy

    def for_density(self, density: float) -> "FixedMask":
        return type(self)(density, None, self.initializer)

    def get_config(self) -> Config:
        initializer = keras.saving.serialize_keras_object(self.initializer)
        config = {"density": self.density, "initializer": initializer}
        if self._drawn_digest is not None:
            config["drawn_digest"] = self._drawn_digest
        if self._was_given:
            config["mask_given"] = True
        return config

    @classmethod
    def from_config(cls, config: Config) -> "FixedMask":
        config = dict(config)
        was_given, drawn = (
            config.pop("mask_given", False),
            config.pop("drawn_digest", None),
        )
        mask = cls(**config)
        mask._was_given, mask._drawn_digest = was_given is True, drawn
        return mask

    def mark_as_drawn(self, kernel: Any = None) -> None:
        if (
            not isinstance(kernel, np.ndarray)
            or kernel.dtype.name != self.weight.variable.dtype
        ):
            kernel = self.weight.raw_value(copy=False)
        self._drawn_digest = digest(kernel)

    def is_as_drawn(self) -> bool:
        drawn = self._drawn_digest
        return drawn is not None and drawn == digest(
            self.weight.raw_value(copy=False)
        )

    def move(self, live: Any, optimizer: Optimizer) -> None:
        moved = live ^ self.mask_value()
        self.assign_mask(live)
        zero_slots(optimizer, self.weight.variable, moved)

    def dense_gradient(self) -> DenseGradient:
        return DenseGradient(
            variables=[self.weight.variable],
            values=lambda: [self.effective(self.weight.variable.value)],
            collect=lambda gradient: gradient,
            replaced=((self.mask, self.all_live()),),
        )

    def all_live(self) -> np.ndarray:
        """The value of the mask's variable with which the gradient reaches all entries."""
        return np.broadcast_to(True, self.shape)

    @property
    def drawn_by(self) -> SparseInitializer | None:
        drawn_by = self.initializer
        if drawn_by is None and not self._was_given:
            drawn_by = self.weight.initializer
        return drawn_by if isinstance(drawn_by, SparseInitializer) else None

    def resolve(self, weight: PrunableWeight) -> AnyDraw:
        """Returns the mask for a weight, by the four rules above; the weight does not change."""
        if self._given is not None:
            if self._given.shape != weight.shape:
                raise ValueError(
                    f"The mask for {weight.path!r} must have its shape {weight.shape}. "
                    f"Received: mask of shape {self._given.shape}"
                )
            return Draw(self._given, None, self.initializer)
        if self.initializer is not None:
            return draw(weight, self.initializer)
        if (
            isinstance(weight.initializer, SparseInitializer)
            and not self._was_given
        ):
            drawn = adopt(weight, weight.initializer)
            live = int(np.count_nonzero(drawn.mask))
            if (
                self.density is not None
                and live_count(self.density, drawn.mask.size) != live
            ):
                raise DensityError(
                    f"The initializer of {weight.path!r} has a mask of density "
                    f"{live / drawn.mask.size:.6g}. Received: density={self.density!r}"
                )
            return drawn
        value = weight.finite_raw_value()
        if self.density is None:
            raise NotPrunableError(
                f"FixedMask() has no mask for {weight.path!r}: give it a `density` or a `mask`, or "
                "the layer one of our initializers. "
                f"Received: initializer={weight.initializer.__class__.__name__}"
            )
        count = live_count(self.density, value.size)
        return Draw(floored_mask(np.abs(value), weight.layout, count))

    def _initial_mask(self) -> np.ndarray:
        drawn = self.resolve(self.weight)
        self._given = None  # from here on the variable holds it
        if drawn.kernel is not None:
            assign(self.weight.variable, drawn.kernel)
        if drawn.fresh:
            self.mark_as_drawn()
        return drawn.mask


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class CompactMask(FixedMask):
    """`FixedMask` in compact storage: live values and their indices are the only variables.

    With `n` live entries, `values` (n,) and sorted flat `indices` (n,) int32 of a kernel `K`:

        vec(K)[indices] = values, and 0 elsewhere;  dL/dvalues = vec(dL/dK)[indices]

    The dense kernel is a temporary of the step: at density 0.1, weights, Adam's moments and files
    take a tenth of their dense size, and the indices as much as the values. Arguments, outputs,
    gradients and training are those of a `FixedMask`, up to rounding. The layer's own variable only
    has a value in calls of its layer: read `keras_sparse_ortho.prunable_weights(model)`, whose
    `value` is dense.

    Raises, when built and beside the errors of `FixedMask`, NotPrunableError for a kernel of 2**31
    entries and more; for a regularizer or constraint that needs the whole kernel (not L1, L2 or
    `NonNeg`); for a custom layer that overrides `save_own_variables`.

    Limits: a step costs about as much as the dense one, with temporaries of up to a dense kernel a
    layer. Optimizers that treat matrices specially (Adafactor, Muon) see a vector. Learnt and
    scheduled masks, LoRA and `quantize` need the dense weight: convert or strip first.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> layer = kso.PrunableLayer(keras.layers.Dense(8, name="d"), CompactMask(0.25))
        >>> layer.build((None, 16))
        >>> [(weight.name, tuple(weight.shape)) for weight in layer.weights]
        [('kernel_values', (32,)), ('bias', (8,)), ('kernel_indices', (32,))]
    """

    form_name = "compact"
    compact = True
    layer_variable: Any = None
    shape: tuple[int, ...] = ()
    live = 0
    _source: Callable[[], Any] | None = (
        None  # gives the dense kernel until `values` holds it
    )
    _has_value = False
    _drawn: tuple[np.ndarray, np.ndarray] | None = None

    def build(
        self, weight: PrunableWeight, add_weight: Callable[..., Any]
    ) -> None:
        """Creates live values and indices in the place of the layer's variable."""
        variable = self.layer_variable = weight.variable
        self.shape = weight.shape
        self._source, self._has_value = value_source(variable)
        self._weight = dataclasses.replace(weight, storage=self)
        stand_ins = self._stand_ins = StandIns(
            weight.owner,
            variable,
            f"The weight {weight.path!r} is stored compactly (CompactMask): its variable has a "
            "value only while its wrapped layer is called, and takes none. Read "
            "`keras_sparse_ortho.prunable_weights(model)`, each with its `value`, or convert with "
            "keras_sparse_ortho.convert(model, 'masked') or strip(model). "
            f"Received: a use of {variable.path!r} outside of a call",
        )
        self.live = self._count()
        shape, settings = (self.live,), {"trainable": False, "autocast": False}
        self.values = stand_ins.create(
            "values",
            shape=shape,
            dtype=variable.dtype,
            trainable=stand_ins.trained,
            initializer=self._initial_values,
        )
        self.indices = stand_ins.create(
            "indices",
            shape=shape,
            dtype="int32",
            initializer=self._initial_indices,
            **settings,
        )
        self._weight = dataclasses.replace(self.weight, variable=self.values)
        stand_ins.put(self.values, self.indices)
        check_assignments(self.indices, self._check_given)

    def effective(self, value: Any, after: Any = None) -> Any:
        """The dense kernel for the live values, which XLA makes once `after` is there."""
        flat = scatter_sorted(
            value, self.indices.value, self.weight.size, after
        )
        return keras.ops.reshape(flat, self.weight.shape)

    def current(self, after: Any = None) -> Any:
        dense = value_in_scope(self.layer_variable)  # for dense gradients
        return self.quantized(
            self.effective(self.values.value, after) if dense is None else dense
        )

    def value(self) -> np.ndarray:
        return quantized_value(
            self.quantizer, self.raw_value(), self.weight.outputs_shape
        )

    def raw_value(self, *, copy: bool = True) -> np.ndarray:
        if self._source is not None:
            return to_numpy(self._source())
        return self._scattered(to_numpy(self.values), to_numpy(self.indices))

    def mask_value(self) -> np.ndarray:
        return self._scattered(np.ones(self.live, bool), to_numpy(self.indices))

    def support(self) -> list[Any]:
        return [self.indices]

    def assign_mask(self, mask: np.ndarray) -> None:
        mask = np.asarray(mask)
        count = int(np.count_nonzero(mask))
        if (
            mask.shape != self.weight.shape
            or mask.dtype != bool
            or count != self.live
        ):
            raise ValueError(
                f"In compact storage the mask of {self.weight.path!r} is a bool array of shape "
                f"{self.weight.shape} with {self.live} live entries, for which there is room. "
                f"Received: dtype {mask.dtype}, shape {mask.shape}, {count} live"
            )
        indices, raw = np.flatnonzero(mask), self.raw_value().reshape(-1)
        assign(self.indices, indices.astype(np.int32))
        assign(self.values, raw[indices])

    def move(self, live: Any, optimizer: Optimizer) -> None:
        before, after = to_numpy(self.indices), np.flatnonzero(live)
        source = np.searchsorted(before, after)
        source[~np.isin(after, before)] = -1
        self.assign_mask(live)
        move_slots(optimizer, self.values, source)

    def dense_gradient(self) -> DenseGradient:
        # As arrays: tensors of which one is computed from the other are not independent.
        return DenseGradient(
            variables=[self.layer_variable, self.values],
            values=lambda: [self.raw_value(), to_numpy(self.values)],
            collect=lambda gradient, of_values: (
                gradient + self.slot_to_dense(of_values, 0)
            ),
        )

    def slot_to_dense(self, slot: np.ndarray, start: float) -> np.ndarray:
        return self._scattered(slot, to_numpy(self.indices), start)

    def slot_from_dense(self, slot: np.ndarray) -> np.ndarray:
        return slot.reshape(-1)[to_numpy(self.indices)]

    def assign_raw(self, value: Any) -> None:
        if isinstance(value, np.ndarray):  # no dense tensor on the device
            live = value.reshape(-1)[to_numpy(self.indices)]
        else:
            flat = keras.ops.reshape(keras.ops.convert_to_tensor(value), (-1,))
            live = keras.ops.take(flat, self.indices.value, axis=0)
        assign(self.values, live)

    def clear_dead(self) -> None: ...

    def materialize(self) -> None: ...

    def release(self) -> None:
        self._stand_ins.take_away(self.value())
        self._weight = dataclasses.replace(
            self.weight, variable=self.layer_variable, storage=None
        )

    def _count(self) -> int:
        weight, drawn_by = self.weight, self.drawn_by
        if not in_stateless_scope() or self._given is not None:
            return self._draw()[1].size
        # Only shapes are traced now; kernel and mask are drawn when the variables get values.
        if drawn_by is not None:
            layout = axes_for(weight, drawn_by)
            return int(
                np.count_nonzero(
                    drawn_by.sample(weight.shape, layout=layout)[1]
                )
            )
        if self.density is None:
            return self.resolve(weight).mask.size  # raises
        return live_count(self.density, weight.size)

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        """The live values and the mask, drawn once."""
        if self._drawn is not None:
            return self._drawn
        assert self._source is not None
        if (
            self._given is not None
            and self.awaits_values
            and not self._has_value
        ):
            indices = np.flatnonzero(self.resolve(self.weight).mask)
            values = np.zeros(indices.size, dtype=np.float32)
        else:
            # First, as an initializer then knows the mask.
            kernel = to_numpy(self._source())
            self._source = functools.partial(
                keras.ops.convert_to_tensor, kernel
            )
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

    def _initial_indices(
        self, shape: tuple[int, ...], dtype: Any = None
    ) -> Any:
        if in_stateless_scope():
            return keras.ops.zeros(shape, dtype=dtype)
        indices = keras.ops.convert_to_tensor(self._draw()[1])
        self._drawn = self._source = self._given = (
            None  # both variables hold them now
        )
        self._weight = dataclasses.replace(self.weight, drawn_mask=None)
        return indices

    def _scattered(
        self, values: np.ndarray, indices: np.ndarray, start: float = 0
    ) -> np.ndarray:
        dense = np.full(self.shape, start, dtype=values.dtype)
        dense.reshape(-1)[indices] = values
        return dense

    def _check_given(self, given: Read) -> None:
        indices, values = given(self.indices), given(self.values)
        are_integers = np.issubdtype(indices.dtype, np.integer)
        fits = are_integers and indices.shape == values.shape == (self.live,)
        ends = np.concatenate([[-1], indices.ravel(), [self.weight.size]])
        if not fits or (np.diff(ends) <= 0).any():
            raise ValueError(
                f"The compact indices of {self.weight.path!r} must be {self.live} integers in "
                f"[0, {self.weight.size}), strictly increasing; what is loaded or set is damaged, "
                f"or of another model. Received: indices of dtype {indices.dtype} and shape "
                f"{indices.shape}, values of shape {values.shape}"
            )


def refuse_unless_fixed(storage: Storage, received: str) -> None:
    if not storage.fixed:
        raise NotPrunableError(
            "Compact storage is for masks that are fixed: other parametrizations need the dense "
            f"raw weight. Received: {received}"
        )


def refuse_compact(weight: PrunableWeight) -> None:
    """Raises NotPrunableError for a weight that compact storage cannot hold."""
    reason = why_not_compact(weight)
    if reason is not None:
        raise NotPrunableError(reason)


def why_not_compact(weight: PrunableWeight) -> str | None:
    """Says why compact storage cannot hold a weight; `None` if it can."""
    reason = why_needs_dense(
        weight.variable.regularizer, weight.variable.constraint
    )
    if weight.size > _LARGEST:
        reason = (
            f"its flat indices are no int32. Received: {weight.size} entries"
        )
    elif reason is None and saves_by_itself(weight.owner):
        reason = (
            "the class of its layer overrides `save_own_variables`, which would read the kernel. "
            f"Received: {type(weight.owner).__name__}"
        )
    if reason is None:
        return None
    return f"The weight {weight.path!r} cannot be stored compactly, only masked: {reason}"


def why_needs_dense(regularizer: Any, constraint: Any) -> str | None:
    """Why the regularizer or constraint of a kernel cannot act on live entries alone."""
    needs = "needs the dense kernel: it must be"
    if regularizer is not None and type(regularizer) not in _SUMS_OVER_ENTRIES:
        return f"its regularizer {needs} L1 or L2. Received: kernel_regularizer={regularizer!r}"
    if (
        constraint is not None
        and type(constraint) is not keras.constraints.NonNeg
    ):
        return f"its constraint {needs} NonNeg. Received: kernel_constraint={constraint!r}"
    return None


def digest(value: np.ndarray) -> int:
    """A number that tells whether a weight has changed in any bit."""
    flat, checksum = np.ascontiguousarray(value).reshape(-1), 0
    # In parts: a new array of the size of a kernel takes longer to get than to fill.
    for start in range(0, flat.size, _ENTRIES_AT_ONCE):
        # The sum turns -0.0, which a mask writes as 0.0, into that.
        checksum = zlib.crc32(
            (flat[start : start + _ENTRIES_AT_ONCE] + 0.0).data, checksum
        )
    return checksum
