"""When and how much: densities as functions of the training step."""

from keras_sparse_ortho.schedules._constant import Constant as Constant
from keras_sparse_ortho.schedules._constant import OneShot as OneShot
from keras_sparse_ortho.schedules._polynomial import Cubic as Cubic
from keras_sparse_ortho.schedules._polynomial import Linear as Linear
from keras_sparse_ortho.schedules._polynomial import Polynomial as Polynomial
from keras_sparse_ortho.schedules._schedule import Schedule as Schedule
from keras_sparse_ortho.schedules._tfmot_schedule import TfmotSchedule as TfmotSchedule
from keras_sparse_ortho.schedules._tfmot_schedule import as_schedule as as_schedule

__all__ = [
    "Constant",
    "Cubic",
    "Linear",
    "OneShot",
    "Polynomial",
    "Schedule",
    "TfmotSchedule",
    "as_schedule",
]
