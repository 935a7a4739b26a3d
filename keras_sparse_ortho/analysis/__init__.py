"""Reports on a model: density, size, FLOPs and orthogonality of its kernels, Jacobian spectrum."""

from keras_sparse_ortho._foreign_names import answer
from keras_sparse_ortho.analysis._jacobian import jacobian_singular_values
from keras_sparse_ortho.analysis._orthogonality import orthogonality_error
from keras_sparse_ortho.analysis._report import SparsityReport, report
from keras_sparse_ortho.analysis._sensitivity import sensitivity
from keras_sparse_ortho.analysis._write_html import write_html
from keras_sparse_ortho.initializers import critical_gain

__all__ = [
    "SparsityReport",
    "critical_gain",
    "jacobian_singular_values",
    "orthogonality_error",
    "report",
    "sensitivity",
    "write_html",
]

answer(__name__)
