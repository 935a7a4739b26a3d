"""The base of parametrizations whose mask is renewed by magnitude in the course of training."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._ranking import largest_magnitudes, number_of, ranks_on_device
from keras_sparse_ortho._values import assign, placed, to_numpy
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import largest_mask, live_count
from keras_sparse_ortho.parametrizations._masked import Masked
from keras_sparse_ortho.schedules import as_schedule


class ScheduledMask(Masked):
    """A stored mask that the callback `UpdateMasks` renews on a schedule.

    Ranking a whole kernel in every step would cost many times the step itself, and sorting on the
    accelerator inside the compiled step more still; a stored mask costs one select.

    Args:
        schedule: A schedule, a density, or a TFMOT `PruningSchedule`.
        frequency: Steps between renewals where `schedule` is a density. Default: a hundredth of
            the run, but 100 at most.
    """

    def __init__(self, schedule: Any, frequency: int | None = None) -> None:
        super().__init__()
        self.schedule = as_schedule(schedule, frequency)
        self.renewed: Any = None

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        """Creates the mask, and the step at which it was last renewed (-1: never)."""
        super().build(weight, add_weight)
        self.renewed = add_weight(
            name="renewed",
            shape=(),
            dtype="int32",
            trainable=False,
            initializer=keras.initializers.Constant(-1),
        )

    def renew(self, step: int, density: float | None = None) -> "Renewal":
        """Renews the mask for a step, where the weight is.

        Args:
            step: Updates of the optimizer so far.
            density: Live fraction. Default: that of the schedule, which then has to be in steps.
        """
        self.clear_dead()
        mask = self._ranked(self.schedule.density(step) if density is None else density)
        mask = placed(mask, self.mask)  # once for all that follows
        fresh = keras.ops.logical_and(mask, keras.ops.logical_not(self.mask.value))
        grown = number_of(fresh)
        self.assign_mask(mask)
        assign(self.renewed, step)
        return Renewal(self._forgotten(mask), grown)

    @property
    def last_renewed(self) -> int:
        """The step at which the mask was last renewed, -1 if it never was."""
        return int(to_numpy(self.renewed))

    def counts(self) -> tuple[int, int]:
        """How many entries are live now, and how many are to be in the end."""
        live = number_of(self.mask.value)
        return live, live_count(self.schedule.final_density, self.weight.size)

    def for_density(self, density: float) -> "ScheduledMask":
        """An unbuilt clone whose schedule ends with this density."""
        clone = self.clone()
        clone.schedule = self.schedule.with_final(density)
        return clone

    def clone(self) -> "ScheduledMask":
        """An unbuilt parametrization with the same schedule, for another weight."""
        return type(self)(self.schedule)

    def get_config(self) -> dict[str, Any]:
        """The schedule."""
        return {"schedule": keras.saving.serialize_keras_object(self.schedule)}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "ScheduledMask":
        """The reverse of `get_config`."""
        return cls(keras.saving.deserialize_keras_object(config["schedule"]))

    def _forgotten(self, mask: Any) -> Any:
        return keras.ops.logical_not(mask)

    def _ranked(self, density: float) -> Any:
        """The mask of the largest magnitudes; a tensor, if it was ranked on a device."""
        count = live_count(density, self.weight.size)
        raw = self.weight.variable
        if not ranks_on_device(raw):
            return largest_mask(np.abs(self.weight.finite_raw_value()), count)
        mask, not_finite = largest_magnitudes(raw.value, count)
        if not_finite:
            self.weight.finite_raw_value()  # raises
        return mask


@dataclasses.dataclass(frozen=True)
class Renewal:
    """What a renewal of a mask has changed.

    Args:
        forgotten: Bool tensor of the entries that the optimizer is to forget; `None` for none.
        grown: How many entries are live now and were not before.
    """

    forgotten: Any
    grown: int
