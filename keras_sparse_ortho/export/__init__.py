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
from keras_sparse_ortho.export._arena import arena_of, require_micro
from keras_sparse_ortho.export._block_convolutions import (
    ConvAsConvolution,
    DenseAsConvolution,
)
from keras_sparse_ortho.export._blocks import as_convolutions, plan_of
from keras_sparse_ortho.export._c_array import LeanArray, c_array
from keras_sparse_ortho.export._candidates import Candidate
from keras_sparse_ortho.export._comparison import compare, find_zeros
from keras_sparse_ortho.export._explain import warn_of_rows
from keras_sparse_ortho.export._export_litert import check_path as check_path
from keras_sparse_ortho.export._export_litert import choose, export_litert
from keras_sparse_ortho.export._flatbuffer import (
    kind_of,
    name_of,
    read_model,
    write_model,
)
from keras_sparse_ortho.export._int8_errors import Int8Errors, int8_errors
from keras_sparse_ortho.export._kernel_names import name_kernels
from keras_sparse_ortho.export._load_litert import (
    LiteRTModel,
    latencies,
    load_litert,
)
from keras_sparse_ortho.export._lstms import plan_of_lstms
from keras_sparse_ortho.export._packed_zeros import (
    PackedZeros,
    check_filters,
    decode,
    encode,
    is_decode,
    pack_zeros,
)
from keras_sparse_ortho.export._process import JobError, Worker
from keras_sparse_ortho.export._record import with_digest, with_record
from keras_sparse_ortho.export._reference import (
    assigned_variables,
    kernels_of,
    plain_model,
)
from keras_sparse_ortho.export._remedies import REMEDIES
from keras_sparse_ortho.export._routes import (
    ROUTES,
    TARGETS,
    ExportReport,
    Route,
    RouteOutcome,
    routes_of,
)
from keras_sparse_ortho.export._rows import doubts, inputs_of, rows_of
from keras_sparse_ortho.export._short_names import shorten_names
from keras_sparse_ortho.export._signature import (
    leaves,
    nesting_of,
    pack,
    signature_of,
    unique_names,
)
from keras_sparse_ortho.export._stretch import TensorError, shortest_stretch
from keras_sparse_ortho.export._task import Steps as Steps
from keras_sparse_ortho.export._task import task_of
from keras_sparse_ortho.export._unread import drop_unread
from keras_sparse_ortho.export._weight_zeros import (
    WeightZeros,
    read_weights,
    stored_weights,
)
from keras_sparse_ortho.export._worker import interpreter_of
from keras_sparse_ortho.export._zero_blocks import zero_blocks

__all__ = [
    "ExportReport",
    "Int8Errors",
    "LiteRTModel",
    "c_array",
    "export_litert",
    "int8_errors",
    "latencies",
    "load_litert",
]

answer(__name__)
