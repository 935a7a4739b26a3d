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
from keras_sparse_ortho.export._latency import BenchmarkCase, latencies
from keras_sparse_ortho.export._litert_file import WeightZeros
from keras_sparse_ortho.export._load_litert import LiteRTModel, load_litert
from keras_sparse_ortho.export._outcome import RouteOutcome
from keras_sparse_ortho.export._report import ExportReport

__all__ = [
    "BenchmarkCase",
    "ExportConversionError",
    "ExportFallbackWarning",
    "ExportReport",
    "ExportRouteError",
    "ExportVerificationError",
    "LiteRTFileError",
    "LiteRTModel",
    "RouteOutcome",
    "WeightZeros",
    "export_litert",
    "export_routes",
    "latencies",
    "load_litert",
]
