"""Schedules: a density for every step, and the steps at which masks are updated."""

import abc
import copy
import inspect
import math
from typing import Any

import keras

from keras_sparse_ortho._checks import (
    as_float,
    as_text,
    check_config,
    check_density,
    check_integer,
    check_moment,
    check_number,
    other_keywords,
)
from keras_sparse_ortho._types import Config, Tensor
from keras_sparse_ortho.schedules._in_tfmot import answer_tfmot

_LEAST_UPDATES = 100
_MOST_STEPS = 100  # between two updates
# Steps of a run in which every fraction but 0 is a later step.
_LONG_RUN = 10**9
_ROUNDING = 1e-9  # of a fraction of a run: 0.29 of 100 steps are 28.999... in floating point


class Schedule(abc.ABC):
    """A live fraction `d(t)` over the optimizer step `t`, and when masks are updated.

    Masks are updated at `begin_step`, every `frequency` steps after it, and at `end_step`. Step `t`
    is the state after `t` updates of the optimizer. Begin and end are steps (integers), or
    fractions of the run (floats in [0, 1]), which `resolved` makes steps when training begins.
    Subclasses implement `at`; and `get_config`, unless every argument is an attribute.

    Args:
        density: float in (0, 1]. Live fraction at the end. `None` where `parametrize(density=...)`
            or `TargetDensity(density)` sets it.
        begin_step: int or float. First step at which masks are updated.
        end_step: int or float. Last one; `None` if there is none.
        frequency: int. Steps between updates. Default: a hundredth of the steps from begin to end,
            or to the end of the run if the schedule has none; from 1 to 100.

    Raises:
        DensityError: A density outside (0, 1].
        ValueError: Steps that are negative or in the wrong order, fractions outside [0, 1].
    """

    @other_keywords
    def __init__(
        self,
        density: float | None = None,
        begin_step: int | float = 0,
        end_step: int | float | None = None,
        frequency: int | None = None,
    ) -> None:
        self.density: float | None = None
        self.begin_step = check_moment("begin_step", begin_step)
        self.end_step: int | float | None = None
        self.frequency: int | None = None
        if density is not None:
            self.density = check_density(density)
        if end_step is not None:
            self.end_step = check_moment("end_step", end_step)
        if frequency is not None:
            self.frequency = check_integer("frequency", frequency)
        self._check_order()

    def _check_order(self) -> None:
        """Refuses an end before the begin, where both are known; sets the default frequency."""
        if isinstance(self.end_step, int) and self.begin_step == 0:
            self.begin_step = 0  # not 0.0, the start of each `fit`: steps count over all of them
        if self.end_step is not None and type(self.begin_step) is type(
            self.end_step
        ):
            if self.end_step < self.begin_step:
                raise ValueError(
                    "`end_step` must not come before `begin_step`. "
                    f"Received: begin_step={self.begin_step}, end_step={self.end_step}"
                )
            if self.frequency is None and isinstance(self.begin_step, int):
                self.frequency = default_frequency(
                    int(self.end_step) - self.begin_step
                )

    @abc.abstractmethod
    def at(self, step: int) -> float:
        """The live fraction at `step`."""

    def __call__(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Answers TFMOT's `prune_low_magnitude`: whether to prune at a step, to which sparsity.

        Begin and end in fractions are those of the first `fit`. In a custom training loop, and
        under a `tf.distribute.Strategy`, give steps: else this raises ValueError. TFMOT cannot load
        a saved wrapper with this schedule: call `strip_pruning` before saving.
        """
        return answer_tfmot(self, step)

    def get_config(self) -> Config:
        arguments = inspect.signature(type(self)).parameters
        return {name: getattr(self, name) for name in arguments}

    @classmethod
    def from_config(cls, config: Config) -> "Schedule":
        config = dict(config)
        if "final_density" in config:  # in older files
            config["density"] = config.pop("final_density")
        return cls(**config)

    def with_density(self, density: float) -> "Schedule":
        """The same schedule towards another density."""
        return type(self).from_config({**self.get_config(), "density": density})

    @property
    def is_resolved(self) -> bool:
        """Whether begin and end are steps; `at` and `due` need that."""
        return not isinstance(self.begin_step, float) and not isinstance(
            self.end_step, float
        )

    def resolved(self, steps: int | None, start: int = 0) -> "Schedule":
        """Returns this schedule for a run of `steps`, with `start` steps before it.

        A fraction `f` of the run becomes the step `start + floor(f * steps)`; `start` is negative
        if the optimizer does not count some steps of the run. ValueError for fractions of a run of
        unknown length, and an end that is not after the begin.

        Examples:
            >>> import keras_sparse_ortho as kso
            >>> kso.schedules.Cubic(0.1).resolved(steps=2000)  # by default over 70% of the run
            Cubic(density=0.1, begin_step=0, end_step=1400, initial_density=1.0, frequency=14)
        """
        if steps is None and not self.is_resolved:
            raise ValueError(
                "Fractions of a run need a number of steps that is known before training; give "
                f"`begin_step` and `end_step` in steps. Received: schedule={self!r}, steps=None"
            )
        begin = _step(self.begin_step, steps, start)
        end = None
        if self.end_step is not None:
            end = _step(self.end_step, steps, start)
            if isinstance(self.begin_step, float) and isinstance(
                self.end_step, float
            ):
                after_begin = begin + (self.end_step > self.begin_step)
                end = max(end, after_begin)  # in very short runs
            if end < begin:
                raise ValueError(
                    "`end_step` comes before `begin_step` in this run. "
                    f"Received: schedule={self!r}, {steps=}"
                )
        schedule = copy.copy(self)
        schedule.begin_step = begin
        schedule.end_step = end
        if self.frequency is None:
            schedule.frequency = _MOST_STEPS
            if end is not None:
                schedule.frequency = default_frequency(end - begin)
            elif steps is not None:
                schedule.frequency = default_frequency(start + steps - begin)
        return schedule

    def at_start(self) -> float:
        """The live fraction before the first step, in a run of any length."""
        return self.resolved(_LONG_RUN).at(0)

    def due(self, step: int, executed: int = 1) -> bool:
        """Whether masks are updated at `step`, or were due in the `executed` steps before."""
        begin, end = self._steps()
        latest = step
        if end is not None:
            latest = min(step, end)
        asked_before = step - executed
        if latest < begin or latest <= asked_before:
            return False
        frequency = self.frequency or _MOST_STEPS
        update = latest - (latest - begin) % frequency
        return latest == self.end_step or update > asked_before

    def _final_density(self) -> float:
        """The density at the end; a ValueError if nothing has set it."""
        if self.density is None:
            raise ValueError(
                "A schedule needs a `density`, its own or that of `parametrize` or TargetDensity. "
                f"Received: schedule={self!r}"
            )
        return self.density

    def _steps(self) -> tuple[int, int | None]:
        """Begin and end as steps; a ValueError for fractions of a run."""
        if not self.is_resolved:
            raise ValueError(
                "This schedule is in fractions of a run: `resolved(steps)` makes them steps. "
                f"Received: schedule={self!r}"
            )
        begin = int(self.begin_step)
        if self.end_step is None:
            return begin, None
        return begin, int(self.end_step)

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}={value!r}" for name, value in self.get_config().items()
        )
        return f"{type(self).__name__}({fields})"


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class Constant(Schedule):
    """`d(t) = density`, with masks updated from `begin_step` on, and 1 before; see `Schedule`.

    Examples:
        >>> schedule = Constant(0.1, begin_step=100, frequency=50)
        >>> [schedule.due(step) for step in (0, 100, 120, 150)]
        [False, True, False, True]
    """

    def at(self, step: int) -> float:
        begin, _ = self._steps()
        return self._final_density() if step >= begin else 1.0


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class OneShot(Constant):
    """`d(t) = 1` before `step` (a fraction of the run as a float), and `density` from then on.

    Examples:
        >>> schedule = OneShot(0.1, step=500)
        >>> schedule.at(499), schedule.at(500), schedule.due(500), schedule.due(501)
        (1.0, 0.1, True, False)
    """

    @other_keywords
    def __init__(
        self, density: float | None = None, step: int | float = 0
    ) -> None:
        super().__init__(density, step, step, 1)

    def get_config(self) -> Config:
        return {"density": self.density, "step": self.begin_step}


class Ramp(Schedule):
    """Density that falls from `initial_density` to `density`: the base of schedules of your own.

    With `u = (t - begin_step) / (end_step - begin_step)`, at most 1:

        d(t) = between(initial_density, density, u) from `begin_step` on, and 1 before

    A subclass implements `between`. One with more arguments has a constructor, which keeps each
    as an attribute of its name; `keras.saving.register_keras_serializable` lets models with the
    schedule be loaded.

    Args:
        initial_density: float in (0, 1]. Live fraction at `begin_step`; nothing is pruned before.

    The other arguments, and errors, are those of `Schedule`; `end_step` comes after `begin_step`.

    Examples:
        >>> class Sine(Ramp):
        ...     def between(self, initial, final, progress):
        ...         return initial + (final - initial) * math.sin(math.pi / 2 * progress)
        >>> round(Sine(0.1, begin_step=0, end_step=1000).at(500), 4)
        0.3636
    """

    @other_keywords
    def __init__(
        self,
        density: float | None = None,
        begin_step: int | float = 0.0,
        end_step: int | float = 0.7,
        initial_density: float = 1.0,
        frequency: int | None = None,
    ) -> None:
        super().__init__(density, begin_step, end_step, frequency)
        if (
            type(self.begin_step) is type(self.end_step)
            and end_step <= begin_step
        ):
            raise ValueError(
                f"`end_step` must come after `begin_step`. Received: {begin_step=}, {end_step=}"
            )
        self.initial_density = check_density(initial_density)

    @abc.abstractmethod
    def between(self, initial: float, final: float, progress: float) -> float:
        """The live fraction at `progress`: `initial` where that is 0, `final` where it is 1."""

    def at(self, step: int) -> float:
        begin, end = self._steps()
        if end is None or step < begin:
            return 1.0
        progress = (step - begin) / max(end - begin, 1)
        progress = min(progress, 1.0)
        return self.between(
            self.initial_density, self._final_density(), progress
        )


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class Polynomial(Ramp):
    """A `Ramp` that follows a power of `1 - u`: TFMOT's `PolynomialDecay`.

        d(t) = final + (initial - final) * (1 - u) ** power

    Args:
        power: positive float. The exponent.

    The other arguments, and errors, are those of `Ramp`.

    Examples:
        >>> round(Polynomial(0.1, begin_step=0, end_step=1000, power=2.0).at(500), 3)
        0.325
    """

    @other_keywords
    def __init__(
        self,
        density: float | None = None,
        begin_step: int | float = 0.0,
        end_step: int | float = 0.7,
        initial_density: float = 1.0,
        power: float = 3.0,
        frequency: int | None = None,
    ) -> None:
        super().__init__(
            density, begin_step, end_step, initial_density, frequency
        )
        self.power = check_number("power", power)
        if self.power <= 0:
            raise ValueError(
                f"`power` must be positive. Received: power={power!r}"
            )

    def between(self, initial: float, final: float, progress: float) -> float:
        return final + (initial - final) * (1 - progress) ** self.power


class _FixedPower(Polynomial):
    """A `Polynomial` without the argument `power`."""

    _POWER: float

    @other_keywords
    def __init__(
        self,
        density: float | None = None,
        begin_step: int | float = 0.0,
        end_step: int | float = 0.7,
        initial_density: float = 1.0,
        frequency: int | None = None,
    ) -> None:
        super().__init__(
            density,
            begin_step,
            end_step,
            initial_density,
            self._POWER,
            frequency,
        )


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class Cubic(_FixedPower):
    """A `Polynomial` of power 3, the schedule of gradual magnitude pruning.

    Examples:
        >>> round(Cubic(0.1, begin_step=0, end_step=1000).at(500), 4)
        0.2125

    Reference: Zhu and Gupta (2017), arXiv 1710.01878.
    """

    _POWER = 3.0


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class Linear(_FixedPower):
    """A `Polynomial` of power 1.

    Examples:
        >>> round(Linear(0.1, begin_step=0, end_step=1000).at(500), 4)
        0.55
    """

    _POWER = 1.0


def _step(
    moment: int | float,
    steps: int | None,
    start: int,
) -> int:
    """A moment of a run of `steps`, with `start` steps before it, as a step."""
    if not isinstance(moment, float):
        return moment
    steps_of_run = steps or 0
    return start + math.floor(moment * steps_of_run + _ROUNDING)


def default_frequency(steps: int) -> int:
    """A hundredth of the steps over which masks change, at least 1 and at most 100."""
    frequency = max(steps // _LEAST_UPDATES, 1)
    return min(frequency, _MOST_STEPS)


_SPARSITIES_OF_TFMOT = {
    "PolynomialDecay": "final_sparsity",
    "ConstantSparsity": "target_sparsity",
}


def as_schedule(value: Any, frequency: int | None = None) -> Schedule:
    """The schedule of a schedule, a density (`Constant`), or an object of TFMOT.

    TFMOT's wrapper counts updates from 1, and prunes one update earlier than these schedules.
    """
    if isinstance(value, Schedule):
        return value
    if not hasattr(value, "get_config"):
        return Constant(value, frequency=frequency)
    config = value.get_config()
    return _like_tfmot(type(value).__name__, config.get("config", config))


def _like_tfmot(name: object, config: Any) -> Schedule:
    """The schedule with the class name and the configuration of one of TFMOT's."""
    if not isinstance(name, str) or name not in _SPARSITIES_OF_TFMOT:
        raise ValueError(
            f"TFMOT's schedules {' and '.join(_SPARSITIES_OF_TFMOT)} work here; for another one "
            f"write a subclass of schedules.Schedule. Received: {as_text(name)}"
        )
    sparsity = _SPARSITIES_OF_TFMOT[name]
    check_config(name, config, sparsity, "begin_step", "end_step", "frequency")
    density = _density(config[sparsity])
    begin = config["begin_step"]
    end = config["end_step"]
    frequency = config["frequency"]
    if name == "ConstantSparsity":
        if end == -1:
            end = None
        return Constant(density, begin, end, frequency)
    initial = _density(config.get("initial_sparsity"))
    return Polynomial(
        density, begin, end, initial, config.get("power"), frequency
    )


def _density(sparsity: Any) -> float:
    """The density for a sparsity, without the error of the subtraction."""
    return round(1 - as_float(sparsity), 12)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class TfmotSchedule(Constant):
    """In older files: a schedule of TFMOT."""

    @classmethod
    def from_config(cls, config: Config) -> Schedule:
        check_config(cls.__name__, config, "schedule")
        schedule = config["schedule"]
        if not isinstance(schedule, dict):
            schedule = {}
        return _like_tfmot(schedule.get("name"), schedule.get("config"))
