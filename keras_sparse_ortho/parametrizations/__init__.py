"""How a raw variable becomes the effective weight of its layer."""

from keras_sparse_ortho.parametrizations._channel_soft_threshold import (
    ChannelSoftThreshold as ChannelSoftThreshold,
)
from keras_sparse_ortho.parametrizations._compact_mask import CompactMask as CompactMask
from keras_sparse_ortho.parametrizations._compact_mask import refuse_compact as refuse_compact
from keras_sparse_ortho.parametrizations._density_gap import DensityGap as DensityGap
from keras_sparse_ortho.parametrizations._density_gap import density_gap as density_gap
from keras_sparse_ortho.parametrizations._fixed_mask import FixedMask as FixedMask
from keras_sparse_ortho.parametrizations._fixed_mask import digest as digest
from keras_sparse_ortho.parametrizations._learnt_threshold import (
    LearntThreshold as LearntThreshold,
)
from keras_sparse_ortho.parametrizations._low_rank_soft_threshold import (
    LowRankSoftThreshold as LowRankSoftThreshold,
)
from keras_sparse_ortho.parametrizations._magnitude_mask import MagnitudeMask as MagnitudeMask
from keras_sparse_ortho.parametrizations._parametrization import (
    Parametrization as Parametrization,
)
from keras_sparse_ortho.parametrizations._scheduled_mask import ScheduledMask as ScheduledMask
from keras_sparse_ortho.parametrizations._soft_threshold import SoftThreshold as SoftThreshold
from keras_sparse_ortho.parametrizations._straight_through_top_k import (
    StraightThroughTopK as StraightThroughTopK,
)
from keras_sparse_ortho.parametrizations._threshold_functions import (
    ThresholdFunction as ThresholdFunction,
)
from keras_sparse_ortho.parametrizations._threshold_functions import (
    threshold_function as threshold_function,
)

# Public; the other names above are for the other rooms.
__all__ = [
    "ChannelSoftThreshold",
    "CompactMask",
    "FixedMask",
    "LearntThreshold",
    "LowRankSoftThreshold",
    "MagnitudeMask",
    "Parametrization",
    "ScheduledMask",
    "SoftThreshold",
    "StraightThroughTopK",
    "ThresholdFunction",
]
