"""Trained networks, layer by layer on calibration data: pruning, refits, statistics."""

from keras_sparse_ortho._foreign_names import answer
from keras_sparse_ortho.calibration._channels import Channels
from keras_sparse_ortho.calibration._elimination import (
    eliminate,
    refitted_without,
)
from keras_sparse_ortho.calibration._layerwise import (
    calibration_batches,
    measurable,
    prune_layers,
)
from keras_sparse_ortho.calibration._moments import Moments, stop_of
from keras_sparse_ortho.calibration._output_errors import OutputErrors
from keras_sparse_ortho.calibration._readers import ReaderMoments
from keras_sparse_ortho.calibration._recipe import Recipe, other_density
from keras_sparse_ortho.calibration._restore_statistics import (
    restore_statistics,
)
from keras_sparse_ortho.calibration._scores import LayerScore
from keras_sparse_ortho.calibration._shares import (
    Sensitivity,
    densities_around,
    measured_errors,
)
from keras_sparse_ortho.calibration._solve import (
    Blocks,
    Entries,
    RefitProblem,
    damped,
    obs,
)
from keras_sparse_ortho.calibration._sweep import sweep
from keras_sparse_ortho.calibration._width_costs import check_cost
from keras_sparse_ortho.calibration._width_ladder import WidthCurve
from keras_sparse_ortho.calibration._width_search import (
    Costs,
    Ladder,
    WidthSearch,
    least_error_within,
)
from keras_sparse_ortho.calibration._width_table import (
    WidthTable,
    checked_widths,
)
from keras_sparse_ortho.calibration._widths import (
    measured_widths,
    narrowed,
    widths,
)
from keras_sparse_ortho.kernels import Rows as Rows
from keras_sparse_ortho.kernels import kernel_rows as kernel_rows

__all__ = [
    "Channels",
    "LayerScore",
    "Rows",
    "Sensitivity",
    "WidthTable",
    "kernel_rows",
    "restore_statistics",
    "widths",
]

answer(__name__)
