"""Keras callbacks around sparse training."""

from keras_sparse_ortho.callbacks._backup_and_restore import BackupAndRestore as BackupAndRestore
from keras_sparse_ortho.callbacks._best_at_density import BestAtDensity as BestAtDensity
from keras_sparse_ortho.callbacks._check_workers import CheckWorkers as CheckWorkers
from keras_sparse_ortho.callbacks._density_logger import DensityLogger as DensityLogger
from keras_sparse_ortho.callbacks._finish import finish as finish
from keras_sparse_ortho.callbacks._rigl import RigL as RigL
from keras_sparse_ortho.callbacks._set import SET as SET
from keras_sparse_ortho.callbacks._target_density import TargetDensity as TargetDensity
from keras_sparse_ortho.callbacks._threshold_steering import (
    ThresholdSteering as ThresholdSteering,
)
from keras_sparse_ortho.callbacks._update_masks import UpdateMasks as UpdateMasks

# Public; `ThresholdSteering` is for `tfmot`.
__all__ = [
    "SET",
    "BackupAndRestore",
    "BestAtDensity",
    "CheckWorkers",
    "DensityLogger",
    "RigL",
    "TargetDensity",
    "UpdateMasks",
    "finish",
]
