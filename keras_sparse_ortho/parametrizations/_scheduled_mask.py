"""Masks by magnitude on a schedule: `MagnitudeMask`, `StraightThroughTopK`, `Feather`."""

import functools
from typing import ClassVar

import keras
import numpy as np

from keras_sparse_ortho._checks import (
    check_config,
    check_number,
    other_keywords,
)
from keras_sparse_ortho._keras_internals import (
    after_epochs,
    applied_batches,
    model_in_fit,
    restored,
    warn_user,
)
from keras_sparse_ortho._types import AddWeight, Config, Tensor, TensorLike
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import DensityError, DensityWarning
from keras_sparse_ortho.kernels import (
    KernelLayout,
    PrunableWeight,
    storages_of,
    walk,
)
from keras_sparse_ortho.orthogonal import (
    Block,
    NByM,
    StructureLike,
    as_structure,
    best_blocks,
    block_unit,
    floored_mask,
    live_count,
)
from keras_sparse_ortho.parametrizations._parametrization import Masked
from keras_sparse_ortho.schedules import Schedule, as_schedule

ScheduleLike = Schedule | float | object | None
"""A schedule, a density, or a schedule of TFMOT."""

# A share 1 - (T / |w|)^p; here a live entry has fallen below T between two updates.
_SMALLEST_SHARE = 1e-6
_TINY = 1e-7  # also in float16
_WHOLE_LINES = ("inputs", "outputs", None)


class ScheduledMask(Masked):
    """A stored mask that the callback `UpdateMasks` updates on a schedule; see `MagnitudeMask`."""

    watched = False
    """Whether something updates the mask, or a warning has said that nothing does."""

    settings: ClassVar[tuple[str, ...]] = ("schedule",)

    @other_keywords
    def __init__(
        self, schedule: ScheduleLike = None, frequency: int | None = None
    ) -> None:
        self.schedule = as_schedule(schedule, frequency)

    def build(self, weight: PrunableWeight, add_weight: AddWeight) -> None:
        if self.schedule.density is None:
            name = type(self).__name__
            raise ValueError(
                f"{name} needs a density: give its schedule one, or `density` to `parametrize`. "
                f"Received: schedule={self.schedule!r}"
            )
        super().build(weight, add_weight)
        self._updated = add_weight(
            name="renewed",  # as in older files
            shape=(),
            dtype="int32",
            trainable=False,
            initializer=keras.initializers.Constant(-1),
        )

    def update(
        self, step: int, density: float | None = None
    ) -> tuple[np.ndarray | None, int]:
        """Ranks the weight and sets the mask for a step, by default to the schedule's density.

        Returns a bool array of the entries whose optimizer slots must be reset (`None` for none),
        and how many entries are live now and were dead before.
        """
        self.watched = True
        self.clear_dead()
        if density is None:
            density = self.schedule.at(step)
        mask = self._ranked(density)
        grown = int(np.count_nonzero(mask & ~self.mask_value()))
        self.assign_mask(mask)
        assign(self._updated, step)
        return self._slots_to_reset(mask), grown

    @property
    def last_updated(self) -> int:
        """The step of the last update, -1 before the first."""
        return int(to_numpy(self._updated))

    def current(self, after: Tensor = None) -> Tensor:
        if not self.watched:
            model = model_in_fit()
            if model is not None:
                after_epochs(model, functools.partial(_warn_after_epoch, model))
        return super().current(after)

    def is_overdue(self, steps: int, share: float = 0.0) -> bool:
        """Whether the mask was never updated after `steps`, a `share` of the run, although due."""
        begin = self.schedule.begin_step
        position: float = steps
        if isinstance(begin, float):
            position = share
        if steps == 0 or begin > position:
            return False
        return self.last_updated < 0 and self.weight.variable.trainable

    def counts(self) -> tuple[int, int]:
        """How many entries are live now, and how many at the end of the schedule."""
        density = self.schedule.density
        assert density is not None  # see `build`
        return self.live, self.live_at(density)

    def live_at(self, density: float) -> int:
        return live_count(density, self.weight.size)

    def for_density(self, density: float) -> "ScheduledMask":
        clone = self.clone()
        clone.schedule = self.schedule.with_density(density)
        return clone

    def clone(self) -> "ScheduledMask":
        return type(self)(
            **{name: getattr(self, name) for name in self.settings}
        )

    def get_config(self) -> Config:
        config = {}
        for name in self.settings:
            value = getattr(self, name)
            if name != "structure" or value is not None:
                config[name] = keras.saving.serialize_keras_object(value)
        return config

    @classmethod
    def from_config(cls, config: Config) -> "ScheduledMask":
        check_config(
            cls.__name__, config, *sorted({*cls.settings} - {"structure"})
        )
        schedule = restored(config["schedule"])
        if not isinstance(schedule, Schedule):  # a file could name any callable
            raise ValueError(
                f"The configuration of a {cls.__name__} holds a Schedule. "
                f"Received: schedule={schedule!r}"
            )
        return cls(**{**config, "schedule": schedule})

    def _slots_to_reset(self, mask: np.ndarray) -> np.ndarray | None:
        return np.logical_not(mask)

    def _ranked(self, density: float) -> np.ndarray:
        magnitudes = np.abs(self.weight.finite_raw_value())
        return floored_mask(
            magnitudes, self.weight.layout, self.live_at(density)
        )


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class MagnitudeMask(ScheduledMask):
    """Effective weight `w_e = w` on the `round(d(t) * size)` largest magnitudes, 0 elsewhere.

    Gradual magnitude pruning (GMP). At the steps of a schedule of `d(t)` `callbacks.UpdateMasks`
    ranks `|w|` (ties to the lower flat index; each output of a depthwise kernel keeps its largest
    entry), stores the mask, and sets dropped raw weights and
    their optimizer slots to zero. Masked entries get no gradient: they return only if `d(t)` rises.

    Args:
        schedule: Schedule: `Cubic`, `Linear`, `Constant`, `OneShot`; a density; or TFMOT's
            `PolynomialDecay` or `ConstantSparsity`. Default: `Constant`; `parametrize` sets it.
        frequency: int. Steps between updates where `schedule` is a density. Default: a hundredth of
            the run, but 100 at most.
        structure: Entries that live or die together, by their sums of squares. `Block(r, c)`, or
            `(r, c)` or `"32x32"`: blocks, at all taps of a convolution, in the end with at most 6
            different counts in their lines, with `regular=True` equal ones. `NByM(n, m)` or
            `"2:4"`: at most `n` of every `m` consecutive inputs, in the end. `"inputs"` or
            `"outputs"`: whole ones. Counts are rounded to whole blocks. Default: single entries.

    Once the schedule of blocks has ended, `convert(model, "blocks")` moves kernels and optimizer
    slots to layers of live blocks. End it within the first 15% of the steps, and the rest trains at
    their speed; see `UpdateMasks(stop=True)`.

    Raises:
        NotPrunableError: At an update, if the weight is not finite; when stripped, if no mask was
            set because `UpdateMasks` was not among the callbacks.
        LayoutError: When built, for a kernel that the structure does not fit.
        DensityError: When built, for more than `n / m`.

    Limits: training starts dense, and costs as much as dense training until it is converted.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> schedule = kso.schedules.Cubic(0.25, begin_step=0, end_step=4, frequency=2)
        >>> model = kso.parametrize(dense, MagnitudeMask(schedule))
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((16, 8)), np.ones((16, 4)), batch_size=2, verbose=0,
        ...                     callbacks=[kso.callbacks.UpdateMasks()])
        >>> kso.prunable_weights(model)[0].live
        8

    Reference: Zhu and Gupta (2017), arXiv 1710.01878.
    """

    settings = ("schedule", "structure")

    @other_keywords
    def __init__(
        self,
        schedule: ScheduleLike = None,
        frequency: int | None = None,
        structure: StructureLike | Config | None = None,
    ) -> None:
        super().__init__(schedule, frequency)
        checked: object = structure
        if isinstance(structure, dict):
            checked = restored(structure)
        if checked not in _WHOLE_LINES:
            checked = as_structure(checked)
            if not isinstance(checked, Block | NByM):
                raise ValueError(
                    '`structure` must be Block, NByM, "inputs", "outputs" or None. '
                    f"Received: structure={structure!r}"
                )
        self.structure: Block | NByM | str | None = checked

    def build(self, weight: PrunableWeight, add_weight: AddWeight) -> None:
        self._layout = weight.layout or KernelLayout.convolution()
        self._shape = self._layout.canonical_shape(weight.shape)
        *_, inputs, outputs = self._shape
        self._pattern = self._pattern_for(inputs, outputs)
        if self._pattern is not None:
            self._pattern.check(self._shape)
        density = self.schedule.density
        if isinstance(self._pattern, NByM) and density is not None:
            largest = self._pattern.n / self._pattern.m
            if density > largest:
                raise DensityError(
                    f"{self._pattern} allows at most {largest:g}. Received: {density=}"
                )
        super().build(weight, add_weight)

    def _pattern_for(self, inputs: int, outputs: int) -> Block | NByM | None:
        """The structure of a matrix: whole inputs and outputs are blocks."""
        if self.structure == "inputs":
            return Block(1, outputs)
        if self.structure == "outputs":
            return Block(inputs, 1)
        assert not isinstance(self.structure, str)
        return self.structure

    def live_at(self, density: float) -> int:
        if not isinstance(self._pattern, Block):
            return super().live_at(density)
        unit = block_unit(self._pattern, self._shape)
        return max(round(density * self.weight.size / unit), 1) * unit

    def _ranked(self, density: float) -> np.ndarray:
        if self._pattern is None:
            return super()._ranked(density)
        count = self.live_at(density)
        value = self.weight.finite_raw_value()
        scores = np.asarray(self._layout.to_canonical(value), np.float64) ** 2
        if isinstance(self._pattern, NByM):
            mask = self._pattern.largest(scores, count)
        else:
            _, final_count = self.counts()
            rng = np.random.default_rng(0)
            mask = best_blocks(
                self._pattern, scores, count, rng, few=count <= final_count
            )
        return np.ascontiguousarray(
            self._layout.from_canonical(mask, value.shape)
        )

    @property
    def block_size(self) -> tuple[int, int] | None:
        if isinstance(self.structure, Block):
            return self.structure.rows, self.structure.cols
        return None

    @property
    def fixed(self) -> bool:
        live, final = self.counts()
        return live == final and self.last_updated >= 0

    def support(self) -> list[keras.Variable]:
        return [self.mask, self._updated]

    def unfinished(self) -> str | None:
        if self.last_updated >= 0:
            return None
        begin = self.schedule.begin_step or 1
        duration = f"{begin} steps"
        if isinstance(begin, float):
            duration = f"{begin:.0%} of the run"
        elif begin == 1:
            duration = "1 step"
        return (
            "its mask was never set: train with keras_sparse_ortho.callbacks.UpdateMasks(), for "
            f"at least {duration}"
        )

    def _initial_mask(self) -> np.ndarray:
        self.weight.finite_raw_value()
        return np.ones(self.weight.shape, dtype=bool)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class StraightThroughTopK(ScheduledMask):
    """Effective weight `w_e = w` on the largest magnitudes, with `dL/dw = dL/dw_e` everywhere.

    The straight-through estimator of "Discovering Neural Wirings" (DNW): the forward pass uses the
    `round(d * size)` largest magnitudes (ties to the lower flat index), the gradient passes to all
    raw weights, and dead entries come back. `callbacks.UpdateMasks` updates the mask.

    Args:
        schedule: float in (0, 1] or Schedule. The density `d`.
        frequency: int. Steps between updates where `schedule` is a density. Default: 1, as in the
            paper. More steps exchange more of the mask at once, which can cost many points of
            accuracy.

    Limits: raw weights, their gradients and optimizer slots are dense. Every update ranks all
    weights, which can take as long as a step of a small network.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="head")])
        >>> kso.prunable_weights(kso.parametrize(dense, StraightThroughTopK(0.25)))
        [<head/kernel shape=(8, 4), density=0.25>]

    Reference: Wortsman, Farhadi and Rastegari (NeurIPS 2019), arXiv 1906.00586.
    """

    @other_keywords
    def __init__(
        self, schedule: ScheduleLike = None, frequency: int | None = 1
    ) -> None:
        super().__init__(schedule, frequency)

    def effective(self, value: Tensor) -> Tensor:
        """`w + stop_gradient(where(mask, w, 0) - w)`, which is exactly `w` or exactly 0."""
        return value + keras.ops.stop_gradient(super().effective(value) - value)

    def settle(self) -> None:
        assign(self.mask, self._initial_mask())

    def _initial_mask(self) -> np.ndarray:
        return self._ranked(self.schedule.at_start())

    def _clear(self, mask: np.ndarray) -> None:
        """Raw weights stay, so that dead entries can come back."""

    def _slots_to_reset(self, mask: np.ndarray) -> None: ...


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class Feather(StraightThroughTopK):
    """Effective weight `w_e = w (1 - (T / |w|)^p)^(1/p)` on the largest magnitudes, 0 elsewhere.

    `T` is the largest magnitude outside the mask, so entries enter and leave the mask at the value
    0, as under a soft threshold; far above it they keep their size. At the steps of the schedule
    `callbacks.UpdateMasks` ranks `|w|` (ties to the lower flat index), and stores `T` and the mask
    of the `round(d(t) * size)` largest. Gradients pass straight through:

        dL/dw = dL/dw_e on the mask, theta dL/dw_e elsewhere

    Args:
        schedule, frequency: As for `MagnitudeMask`.
        power: positive float `p`. 1 is the soft threshold; large ones approach
            `StraightThroughTopK`.
        theta: float in [0, 1]. The share of the gradients that dead entries get.

    Limits: raw weights, their gradients and optimizer slots are dense.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="head")])
        >>> kso.prunable_weights(kso.parametrize(dense, Feather(0.25)))
        [<head/kernel shape=(8, 4), density=0.25>]

    Reference: Glentis Georgoulakis, Retsinas and Maragos (2023), arXiv 2310.02448.
    """

    settings = ("schedule", "power", "theta")

    @other_keywords
    def __init__(
        self,
        schedule: ScheduleLike = None,
        frequency: int | None = None,
        power: float = 3.0,
        theta: float = 0.3,
    ) -> None:
        super().__init__(schedule, frequency)
        self.power = check_number("power", power)
        self.theta = check_number("theta", theta)
        if self.power <= 0:
            raise ValueError(
                f"`power` must be greater than 0. Received: power={power!r}"
            )
        if not 0 <= self.theta <= 1:
            raise ValueError(
                f"`theta` must be in [0, 1]. Received: theta={theta!r}"
            )

    def build(self, weight: PrunableWeight, add_weight: AddWeight) -> None:
        super().build(weight, add_weight)
        self._threshold = add_weight(
            name="threshold",
            shape=(),
            trainable=False,
            initializer=self._largest_dead,
        )

    def effective(self, value: Tensor) -> Tensor:
        ops = keras.ops
        threshold = ops.cast(self._threshold.value, value.dtype)
        ratio = threshold / ops.maximum(ops.abs(value), _TINY)
        shares = ops.maximum(1 - ratio**self.power, _SMALLEST_SHARE) ** (
            1 / self.power
        )
        mask = self.mask.value
        zero = ops.zeros((), dtype=value.dtype)
        one = ops.ones((), dtype=value.dtype)
        with_gradient = value * ops.where(mask, one, self.theta)
        effective = ops.where(mask, value * shares, zero)
        return with_gradient + ops.stop_gradient(effective - with_gradient)

    def assign_mask(self, mask: TensorLike) -> None:
        super().assign_mask(mask)
        self._set_threshold()

    def settle(self) -> None:
        super().settle()
        self._set_threshold()

    def _set_threshold(self) -> None:
        assign(self._threshold, self._largest_dead())

    def _largest_dead(
        self, shape: tuple[int, ...] = (), dtype: str | None = None
    ) -> Tensor:
        """The largest magnitude outside the mask; it has the arguments of an initializer."""
        magnitudes = keras.ops.abs(self.weight.variable.value)
        zeros = keras.ops.zeros_like(magnitudes)
        dead = keras.ops.where(self.mask.value, zeros, magnitudes)
        return keras.ops.cast(
            keras.ops.max(dead), dtype or self._threshold.dtype
        )


def warn_unless_updated(model: keras.Model, share: float = 0.0) -> bool:
    """Warns of begun masks that nothing updated; returns whether all warnings were given."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return False
    masks: list[ScheduledMask] = []
    for layer, _ in walk(model, ""):
        for storage in storages_of(layer).values():
            if isinstance(storage, ScheduledMask):
                masks.append(storage)
    batches, accumulated = applied_batches(optimizer)
    steps = batches // accumulated
    overdue = [mask for mask in masks if mask.is_overdue(steps, share)]
    for mask in overdue:
        mask.watched = True
    if overdue:
        further = ""
        if len(overdue) > 1:
            further = f" and {len(overdue) - 1} more"
        warn_user(
            "Masks on a schedule were never updated, so they are as dense as at the start. Pass "
            "callbacks=[keras_sparse_ortho.callbacks.UpdateMasks()] to `fit`; in a custom training "
            "loop call its `update(step)` (docs/custom_loops.md). keras_sparse_ortho.finish(model) "
            "sets them to the final density at once. "
            f"Received: {overdue[0].weight.path!r}{further}, after {steps} steps",
            DensityWarning,
        )
    return bool(overdue) or all(mask.last_updated >= 0 for mask in masks)


def _warn_after_epoch(model: keras.Model, epochs: int) -> bool:
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
    all_epochs = model.history.params.get("epochs") or epochs
    return warn_unless_updated(model, epochs / all_epochs)
