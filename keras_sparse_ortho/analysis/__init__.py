"""What came out: density, parameters, FLOPs and orthogonality of every kernel."""

from keras_sparse_ortho.analysis._orthogonality import orthogonality_error as orthogonality_error
from keras_sparse_ortho.analysis._report import report as report
from keras_sparse_ortho.analysis._sparsity_report import SparsityReport as SparsityReport

__all__ = ["SparsityReport", "orthogonality_error", "report"]
