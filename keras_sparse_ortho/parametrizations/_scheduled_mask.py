"""The base of parametrizations whose mask is renewed by magnitude in the course of training."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import assign, to_numpy
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

    def renew(self, step: int, density: float | None = None) -> np.ndarray:
        """Renews the mask for a step; returns which entries the optimizer is to forget.

        Args:
            step: Updates of the optimizer so far.
            density: Live fraction. Default: that of the schedule, which then has to be in steps.
        """
        self.clear_dead()
        mask = self._ranked(self.schedule.density(step) if density is None else density)
        self.assign_mask(mask)
        assign(self.renewed, step)
        return self._forgotten(mask)

    @property
    def last_renewed(self) -> int:
        """The step at which the mask was last renewed, -1 if it never was."""
        return int(to_numpy(self.renewed))

    def counts(self) -> tuple[int, int]:
        """How many entries are live now, and how many are to be in the end."""
        size = self.weight.size
        return int(np.count_nonzero(self.mask_value())), live_count(
            self.schedule.final_density, size
        )

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

    def _forgotten(self, mask: np.ndarray) -> np.ndarray:
        return ~mask

    def _ranked(self, density: float) -> np.ndarray:
        value = self.weight.finite_raw_value()
        return largest_mask(np.abs(value), live_count(density, value.size))
