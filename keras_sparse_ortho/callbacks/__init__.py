"""Keras callbacks around sparse training."""

from keras_sparse_ortho._foreign_names import answer
from keras_sparse_ortho.callbacks._at_density import BestAtDensity, finish
from keras_sparse_ortho.callbacks._backup_and_restore import BackupAndRestore
from keras_sparse_ortho.callbacks._density_run import (
    DensityLogger,
    UpdateMasks,
    warn_not_finite,
)
from keras_sparse_ortho.callbacks._dynamic_sparse_training import SET
from keras_sparse_ortho.callbacks._moves import (
    drop_and_grow,
    largest,
    move_blocks,
    move_regular,
)
from keras_sparse_ortho.callbacks._probe import probe
from keras_sparse_ortho.callbacks._rigl import RigL
from keras_sparse_ortho.callbacks._step_callback import StepCallback
from keras_sparse_ortho.callbacks._target_density import (
    DEFAULT_FLOOR,
    Entries,
    TargetDensity,
    ThresholdSteering,
    cut,
    floored_cut,
    floors_of,
)

__all__ = [
    "SET",
    "BackupAndRestore",
    "BestAtDensity",
    "DensityLogger",
    "RigL",
    "TargetDensity",
    "UpdateMasks",
    "finish",
    "probe",
]

answer(__name__)
