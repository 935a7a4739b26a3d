"""Export: LiteRT (TFLite) files that were run and compared first, in subprocesses."""

from keras_sparse_ortho._foreign_names import answer
from keras_sparse_ortho.errors import (
    ExportConversionError as ExportConversionError,
)
from keras_sparse_ortho.errors import ExportRouteError as ExportRouteError
from keras_sparse_ortho.errors import (
    ExportVerificationError as ExportVerificationError,
)
from keras_sparse_ortho.errors import LiteRTFileError as LiteRTFileError
from keras_sparse_ortho.export._c_array import c_array
from keras_sparse_ortho.export._export_litert import check_path as check_path
from keras_sparse_ortho.export._export_litert import export_litert
from keras_sparse_ortho.export._load_litert import (
    LiteRTModel,
    latencies,
    load_litert,
)
from keras_sparse_ortho.export._routes import ExportReport, RouteOutcome
from keras_sparse_ortho.export._task import Steps as Steps

__all__ = [
    "ExportReport",
    "LiteRTModel",
    "c_array",
    "export_litert",
    "latencies",
    "load_litert",
]

answer(__name__)
