"""Export: LiteRT (TFLite) files that were run and compared before they are handed over.

TensorFlow and ai-edge-litert are loaded in subprocesses and only when an export is asked for;
importing this module loads neither.
"""

from keras_sparse_ortho._foreign_names import public_names
from keras_sparse_ortho.export._c_array import c_array
from keras_sparse_ortho.export._export_litert import export_litert
from keras_sparse_ortho.export._load_litert import LiteRTModel, latencies, load_litert
from keras_sparse_ortho.export._routes import ExportReport, RouteOutcome

__all__ = [
    "ExportReport",
    "LiteRTModel",
    "c_array",
    "export_litert",
    "latencies",
    "load_litert",
]

__getattr__, __dir__ = public_names(__name__, __all__)
