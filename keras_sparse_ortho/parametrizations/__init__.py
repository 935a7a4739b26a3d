"""How a raw variable becomes the effective weight of its layer."""

from keras_sparse_ortho.parametrizations._fake_quantization import (
    FakeQuantization,
    checked_quantizer,
)
from keras_sparse_ortho.parametrizations._fixed_mask import (
    CompactMask,
    FixedMask,
    digest,
    refuse_compact,
    refuse_unless_fixed,
    why_needs_dense,
    why_not_compact,
)
from keras_sparse_ortho.parametrizations._learnt_threshold import (
    LearntThreshold,
    critical_offsets,
)
from keras_sparse_ortho.parametrizations._low_rank_soft_threshold import (
    LowRankSoftThreshold,
)
from keras_sparse_ortho.parametrizations._parametrization import (
    Parametrization,
    quantized_value,
)
from keras_sparse_ortho.parametrizations._scheduled_mask import (
    Feather,
    MagnitudeMask,
    ScheduledMask,
    StraightThroughTopK,
    warn_unless_updated,
)
from keras_sparse_ortho.parametrizations._soft_threshold import (
    ChannelSoftThreshold,
    SoftThreshold,
)

__all__ = [
    "ChannelSoftThreshold",
    "CompactMask",
    "FakeQuantization",
    "Feather",
    "FixedMask",
    "LearntThreshold",
    "LowRankSoftThreshold",
    "MagnitudeMask",
    "Parametrization",
    "ScheduledMask",
    "SoftThreshold",
    "StraightThroughTopK",
]
