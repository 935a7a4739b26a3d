"""`TfmotSchedule` and `as_schedule`: what is accepted in place of a schedule."""

from typing import Any

import keras

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho.schedules._schedule import Constant, Schedule

# What TFMOT's own schedules call their final sparsity.
_FINAL_NAMES = ("final_sparsity", "target_sparsity")
# All of TFMOT that a configuration may name.
_TFMOT_CLASSES = ("ConstantSparsity", "PolynomialDecay")


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class TfmotSchedule(Schedule):
    """`d(t) = 1 - sparsity(t)`, updated at the steps at which the TFMOT schedule prunes.

    A TFMOT schedule returns `(should_prune, sparsity)` for a step, as TensorFlow tensors, so this
    works where TensorFlow is installed, on any backend of Keras. `as_schedule` makes one wherever
    a schedule is expected, so `MagnitudeMask(tfmot.sparsity.keras.PolynomialDecay(...))` works.

    Args:
        schedule: A `tfmot.sparsity.keras.PruningSchedule`, or anything with its interface.

    Raises:
        ValueError: Something that does not return `(should_prune, sparsity)` for a step.

    Limits: masks that are due at step `t` are updated after `t` updates of the optimizer. TFMOT's
    wrapper counts from 1 and does it one update earlier: with `begin_step=0, frequency=100` it
    first prunes at step 100, here at step 0 as well. For the same masks use TFMOT's schedule with
    `begin_step` and `end_step` one smaller.
    """

    def __init__(self, schedule: Any) -> None:
        if isinstance(schedule, dict):  # from a configuration
            schedule = _restored(schedule)
        if not callable(schedule) or not hasattr(schedule, "get_config"):
            raise ValueError(
                "A TFMOT schedule returns (should_prune, sparsity) for a step. "
                f"Received: schedule={schedule!r}"
            )
        self.schedule = schedule
        end = getattr(schedule, "end_step", -1)
        begin = getattr(schedule, "begin_step", 0)
        last = None if end in (-1, None) else end
        final = self._sparsity(begin if last is None else last)
        super().__init__(1 - final, begin, last, getattr(schedule, "frequency", 1))

    def at(self, step: int) -> float:
        return 1.0 if step < self.begin_step else 1 - self._sparsity(step)

    def due(self, step: int, executed: int = 1) -> bool:
        steps = range(max(step - executed + 1, 0), step + 1)
        if all(hasattr(self.schedule, name) for name in ("begin_step", "end_step", "frequency")):
            # TFMOT's `_should_prune_in_step`, without a TensorFlow call in every step. Unlike our
            # schedules, it prunes at `end_step` only if that is a multiple of the frequency.
            last = step if self.end_step is None else self.end_step
            frequency = self.frequency or 1
            return any(
                self.begin_step <= at <= last and (at - self.begin_step) % frequency == 0
                for at in steps
            )
        return any(bool(self._answer(at)[0]) for at in steps)

    def with_density(self, density: float) -> "TfmotSchedule":
        density = check_density(density)
        config = dict(_inner_config(self.schedule))
        names = [name for name in _FINAL_NAMES if name in config]
        if not names:
            raise ValueError(
                "A TFMOT schedule needs `final_sparsity` or `target_sparsity` to be given another "
                f"density. Received: schedule={self.schedule!r}"
            )
        config[names[0]] = 1 - density
        return TfmotSchedule(type(self.schedule)(**config))

    def get_config(self) -> dict[str, Any]:
        kind = type(self.schedule)
        return {
            "schedule": {
                "module": kind.__module__,
                "name": keras.saving.get_registered_name(kind),
                "config": _inner_config(self.schedule),
            }
        }

    def _answer(self, step: int) -> Any:
        import tensorflow as tf

        return self.schedule(tf.constant(step, "int64"))

    def _sparsity(self, step: int) -> float:
        try:
            _, sparsity = self._answer(step)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "A TFMOT schedule returns (should_prune, sparsity) for a step. "
                f"Received: schedule={self.schedule!r}, which raised {error!r}"
            ) from error
        # TFMOT computes in float32: 1 - 0.9 is to be 0.1.
        return round(float(sparsity), 6)


def as_schedule(value: Any, frequency: int | None = None) -> Schedule:
    """A schedule from a schedule, a density, or a TFMOT `PruningSchedule`.

    Args:
        value: A `Schedule`; a density in (0, 1] or `None`, for `Constant`; or a TFMOT schedule.
        frequency: Steps between updates if `value` is a density; see `Constant`.

    Raises:
        DensityError: A number outside (0, 1].
        ValueError: Anything else.

    Example:

    >>> as_schedule(0.1)
    Constant(density=0.1, begin_step=0, end_step=None, frequency=None)
    """
    if isinstance(value, Schedule):
        return value
    if callable(value) and hasattr(value, "get_config"):
        return TfmotSchedule(value)
    return Constant(value, frequency=frequency)


def _inner_config(schedule: Any) -> dict[str, Any]:
    config = schedule.get_config()
    return config.get("config", config)


def _restored(config: dict[str, Any]) -> Any:
    """The schedule of a configuration, which may be a stranger's: it calls only schedules."""
    module, name = config.get("module"), config.get("name")
    in_tfmot = str(module).startswith("tensorflow_model_optimization.")
    kind = keras.saving.get_registered_object(name) if isinstance(name, str) else None
    if kind is None and in_tfmot and name in _TFMOT_CLASSES:
        from tensorflow_model_optimization.sparsity import keras as sparsity

        kind = getattr(sparsity, name)
    problem = ""
    if kind is not None and _is_pruning_schedule(kind):
        try:
            return kind(**config.get("config", {}))
        except TypeError as error:
            problem = f", {error}"
    raise ValueError(
        f"A configuration may name TFMOT's {' and '.join(_TFMOT_CLASSES)}, and subclasses of its "
        "PruningSchedule that are registered with Keras or passed as custom objects, each with "
        f"its arguments. Received: {module}.{name}{problem}"
    )


def _is_pruning_schedule(kind: Any) -> bool:
    """Whether an object is a subclass of TFMOT's PruningSchedule; TFMOT is not imported."""
    return isinstance(kind, type) and any(
        base.__name__ == "PruningSchedule"
        and base.__module__.startswith("tensorflow_model_optimization.")
        for base in kind.__mro__
    )
