"""What came out: density, parameters, FLOPs and orthogonality of every kernel."""

from keras_sparse_ortho.analysis._jacobian import (
    jacobian_singular_values as jacobian_singular_values,
)
from keras_sparse_ortho.analysis._jacobian_spectrum import JacobianSpectrum as JacobianSpectrum
from keras_sparse_ortho.analysis._orthogonality import orthogonality_error as orthogonality_error
from keras_sparse_ortho.analysis._plot_history import plot_history as plot_history
from keras_sparse_ortho.analysis._report import report as report
from keras_sparse_ortho.analysis._sparsity_report import SparsityReport as SparsityReport
from keras_sparse_ortho.initializers import CriticalPoint as CriticalPoint
from keras_sparse_ortho.initializers import critical_gain as critical_gain
from keras_sparse_ortho.initializers import critical_point as critical_point

__all__ = [
    "CriticalPoint",
    "JacobianSpectrum",
    "SparsityReport",
    "critical_gain",
    "critical_point",
    "jacobian_singular_values",
    "orthogonality_error",
    "plot_history",
    "report",
]
