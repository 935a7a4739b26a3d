"""Export: LiteRT (TFLite) files that were run and compared before they are handed over.

TensorFlow and ai-edge-litert are loaded in subprocesses and only when an export is asked for;
importing this module loads neither.
"""

from keras_sparse_ortho.export._errors import (
    ExportConversionError,
    ExportFallbackWarning,
    ExportRouteError,
    ExportVerificationError,
    LiteRTFileError,
)
from keras_sparse_ortho.export._export_litert import export_litert
from keras_sparse_ortho.export._export_routes import export_routes
from keras_sparse_ortho.export._latency import Rival, latencies
from keras_sparse_ortho.export._litert_model import LiteRTModel
from keras_sparse_ortho.export._load_litert import load_litert
from keras_sparse_ortho.export._outcome import RouteOutcome
from keras_sparse_ortho.export._report import ExportReport
from keras_sparse_ortho.export._weights import WeightZeros

__all__ = [
    "ExportConversionError",
    "ExportFallbackWarning",
    "ExportReport",
    "ExportRouteError",
    "ExportVerificationError",
    "LiteRTFileError",
    "LiteRTModel",
    "Rival",
    "RouteOutcome",
    "WeightZeros",
    "export_litert",
    "export_routes",
    "latencies",
    "load_litert",
]
