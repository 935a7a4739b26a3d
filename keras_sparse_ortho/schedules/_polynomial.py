"""`Polynomial`, `Cubic` and `Linear`: densities that fall as a power of the remaining time."""

from typing import Any

import keras

from keras_sparse_ortho._checks import check_density, explains_density
from keras_sparse_ortho.schedules._schedule import Schedule


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class Polynomial(Schedule):
    """Density that falls from `initial_density` to `final_density`, fast at first.

    With `u = (t - begin_step) / (end_step - begin_step)`, held to [0, 1]:

        d(t) = final + (initial - final) * (1 - u) ** power

    which is TFMOT's `PolynomialDecay` in terms of density. `Cubic` and `Linear` are this with a
    power of 3 and 1.

    Args:
        final_density: Live fraction at `end_step` and after it, in (0, 1].
        begin_step: First step at which a mask is renewed, or a part of the run (a float in
            [0, 1]); nothing is pruned before it. Default: the start of the run.
        end_step: Last one, after `begin_step`, or a part of the run. Default: at 70% of it.
        initial_density: Live fraction at `begin_step`.
        power: The exponent, positive.
        frequency: Steps between renewals. Default: a hundredth of the way from begin to end, but
            100 at most.

    Raises:
        ValueError: An `end_step` not after `begin_step`; a power that is not positive.

    Example:

    >>> schedule = Polynomial(0.1, begin_step=0, end_step=1000, power=2.0)
    >>> round(schedule.density(500), 3)
    0.325
    """

    @explains_density
    def __init__(
        self,
        final_density: float,
        begin_step: int | float = 0.0,
        end_step: int | float = 0.7,
        initial_density: float = 1.0,
        power: float = 3.0,
        frequency: int | None = None,
    ) -> None:
        super().__init__(final_density, begin_step, end_step, frequency)
        if type(self.begin_step) is type(self.end_step) and end_step <= begin_step:
            raise ValueError(
                "`end_step` must come after `begin_step`. "
                f"Received: begin_step={begin_step!r}, end_step={end_step!r}"
            )
        if not power > 0:
            raise ValueError(f"`power` must be positive. Received: power={power!r}")
        self.initial_density = check_density(initial_density)
        self.power = float(power)

    def density(self, step: int) -> float:
        """The formula above; 1 before `begin_step`."""
        begin, end = self._steps()
        if end is None or step < begin:
            return 1.0
        done = min((step - begin) / max(end - begin, 1), 1.0)
        fall = self.initial_density - self.final_density
        return self.final_density + fall * (1 - done) ** self.power

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {
            "final_density": self.final_density,
            "begin_step": self.begin_step,
            "end_step": self.end_step,
            "initial_density": self.initial_density,
            "power": self.power,
            "frequency": self.frequency,
        }


class _FixedPower(Polynomial):
    """A `Polynomial` without the argument `power`."""

    _POWER: float

    @explains_density
    def __init__(
        self,
        final_density: float,
        begin_step: int | float = 0.0,
        end_step: int | float = 0.7,
        initial_density: float = 1.0,
        frequency: int | None = None,
    ) -> None:
        super().__init__(
            final_density, begin_step, end_step, initial_density, self._POWER, frequency
        )

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        config = super().get_config()
        del config["power"]
        return config


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class Cubic(_FixedPower):
    """Density that falls with the cube of the remaining time: the schedule of gradual pruning.

    `d(t) = final + (initial - final) * (1 - u) ** 3`, where `u` in [0, 1] is the part of the
    way from `begin_step` to `end_step`; see `Polynomial`.

    Args:
        final_density: Live fraction at `end_step` and after it, in (0, 1].
        begin_step: First step at which a mask is renewed, or a part of the run (a float in
            [0, 1]); nothing is pruned before it. Default: the start of the run.
        end_step: Last one, after `begin_step`, or a part of the run. Default: at 70% of it.
        initial_density: Live fraction at `begin_step`.
        frequency: Steps between renewals. Default: a hundredth of the way from begin to end, but
            100 at most.

    Example:

    >>> schedule = Cubic(0.1, begin_step=0, end_step=1000)
    >>> round(schedule.density(500), 4)
    0.2125

    Reference:

    - Zhu and Gupta, "To prune, or not to prune" (2017), arXiv 1710.01878
    """

    _POWER = 3.0


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class Linear(_FixedPower):
    """Density that falls evenly from `initial_density` to `final_density`.

    `d(t) = final + (initial - final) * (1 - u)`, where `u` in [0, 1] is the part of the
    way from `begin_step` to `end_step`; see `Polynomial`.

    Args:
        final_density: Live fraction at `end_step` and after it, in (0, 1].
        begin_step: First step at which a mask is renewed, or a part of the run (a float in
            [0, 1]); nothing is pruned before it. Default: the start of the run.
        end_step: Last one, after `begin_step`, or a part of the run. Default: at 70% of it.
        initial_density: Live fraction at `begin_step`.
        frequency: Steps between renewals. Default: a hundredth of the way from begin to end, but
            100 at most.

    Example:

    >>> schedule = Linear(0.1, begin_step=0, end_step=1000)
    >>> round(schedule.density(500), 4)
    0.55
    """

    _POWER = 1.0
