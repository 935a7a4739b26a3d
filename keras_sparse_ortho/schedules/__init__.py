"""When and how much: densities as functions of the training step."""

from keras_sparse_ortho.schedules._schedule import (
    Constant,
    Cubic,
    Linear,
    OneShot,
    Polynomial,
    Ramp,
    Schedule,
    TfmotSchedule,
    as_schedule,
    default_frequency,
)

__all__ = [
    "Constant",
    "Cubic",
    "Linear",
    "OneShot",
    "Polynomial",
    "Ramp",
    "Schedule",
]
