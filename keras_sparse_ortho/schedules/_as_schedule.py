"""`as_schedule`: densities and TFMOT schedules where a schedule is expected."""

from typing import Any

from keras_sparse_ortho.schedules._constant import Constant
from keras_sparse_ortho.schedules._schedule import Schedule
from keras_sparse_ortho.schedules._tfmot_schedule import TfmotSchedule


def as_schedule(value: Any, frequency: int = 100) -> Schedule:
    """A schedule from a schedule, a density, or a TFMOT `PruningSchedule`.

    Args:
        value: One of ours; a density in (0, 1], for `Constant`; or a TFMOT schedule.
        frequency: Steps between renewals where `value` is a density.

    Raises:
        DensityError: A number outside (0, 1].
        ValueError: Anything else.

    Example:

    >>> as_schedule(0.1)
    Constant(final_density=0.1, begin_step=0, end_step=None, frequency=100)
    """
    if isinstance(value, Schedule):
        return value
    if callable(value) and hasattr(value, "get_config"):
        return TfmotSchedule(value)
    return Constant(value, frequency=frequency)
