"""Export: LiteRT (TFLite) files that were run and compared before they are handed over.

TensorFlow and ai-edge-litert are loaded in subprocesses and only when an export is asked for;
importing this module loads neither.
"""

from keras_sparse_ortho._other_names import public_names
from keras_sparse_ortho.export._c_array import CArray, c_array
from keras_sparse_ortho.export._candidates import ExportConversionError
from keras_sparse_ortho.export._compare import ExportVerificationError
from keras_sparse_ortho.export._export_litert import export_litert, export_routes
from keras_sparse_ortho.export._export_warnings import ExportFallbackWarning
from keras_sparse_ortho.export._flatbuffer import LiteRTFileError, WeightZeros
from keras_sparse_ortho.export._latency import BenchmarkCase, latencies
from keras_sparse_ortho.export._load_litert import LiteRTModel, load_litert
from keras_sparse_ortho.export._report import ExportReport, RouteOutcome
from keras_sparse_ortho.export._routes import ExportRouteError
from keras_sparse_ortho.export._vela import VelaReport, vela_report

__all__ = [
    "ExportConversionError",
    "ExportFallbackWarning",
    "ExportReport",
    "ExportRouteError",
    "ExportVerificationError",
    "LiteRTFileError",
    "LiteRTModel",
    "c_array",
    "export_litert",
    "export_routes",
    "latencies",
    "load_litert",
    "vela_report",
]

__getattr__, __dir__ = public_names(__name__, __all__)
