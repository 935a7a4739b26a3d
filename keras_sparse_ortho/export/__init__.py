"""Export: LiteRT (TFLite) files that were run and compared before they are handed over.

TensorFlow and ai-edge-litert are loaded in subprocesses and only when an export is asked for;
importing this module loads neither.
"""

from keras_sparse_ortho.export._errors import ExportConversionError, ExportVerificationError
from keras_sparse_ortho.export._export_litert import export_litert
from keras_sparse_ortho.export._report import ExportReport
from keras_sparse_ortho.export._weights import WeightZeros

__all__ = [
    "ExportConversionError",
    "ExportReport",
    "ExportVerificationError",
    "WeightZeros",
    "export_litert",
]
