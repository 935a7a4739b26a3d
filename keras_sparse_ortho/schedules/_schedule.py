"""The base of schedules: a density for every step, and the steps at which masks are renewed."""

import abc
from typing import Any

from keras_sparse_ortho._checks import check_density, check_integer


class Schedule(abc.ABC):
    """A live fraction `d(t)` over the optimizer step `t`, and when a mask is renewed.

    Masks are renewed at `begin_step`, every `frequency` steps after it, and at `end_step`; step
    `t` is the state after `t` updates of the optimizer, so step 0 is before the first.

    Args:
        final_density: Live fraction at the end, in (0, 1].
        begin_step: First step at which a mask is renewed.
        end_step: Last one; `None` if there is none.
        frequency: Steps between renewals.

    Raises:
        DensityError: A density outside (0, 1].
        ValueError: Steps that are negative or in the wrong order.

    Subclasses implement `density` and `get_config`.
    """

    def __init__(
        self, final_density: float, begin_step: int, end_step: int | None, frequency: int
    ) -> None:
        self.final_density = check_density(final_density)
        self.begin_step = check_integer("begin_step", begin_step, 0)
        self.end_step = (
            None if end_step is None else check_integer("end_step", end_step, self.begin_step)
        )
        self.frequency = check_integer("frequency", frequency)

    @abc.abstractmethod
    def density(self, step: int) -> float:
        """The live fraction that is asked for at `step`."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """JSON values from which `from_config` makes an equal schedule."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Schedule":
        """The reverse of `get_config`."""
        return cls(**config)

    def with_final(self, density: float) -> "Schedule":
        """The same schedule towards another final density."""
        return type(self).from_config({**self.get_config(), "final_density": density})

    def due(self, step: int, executed: int = 1) -> bool:
        """Whether a mask is renewed at `step`, or was to be at one of the steps before it.

        Args:
            step: Updates of the optimizer so far.
            executed: Updates since the last time that this was asked (`steps_per_execution`).
        """
        last = step if self.end_step is None else min(step, self.end_step)
        after = step - executed
        if last < self.begin_step or last <= after:
            return False
        if last == self.end_step:
            return True
        # The last renewal up to `last` lies after `after`.
        return last - (last - self.begin_step) % self.frequency > after

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self)
            and isinstance(other, Schedule)
            and (other.get_config() == self.get_config())
        )

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.final_density, self.begin_step, self.end_step))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({fields})"
