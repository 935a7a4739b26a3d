"""Pure NumPy: exactly orthogonal sparse kernels, their layouts, counts and density law."""

from keras_sparse_ortho.orthogonal._block import Block as Block
from keras_sparse_ortho.orthogonal._bounds import covering_count as covering_count
from keras_sparse_ortho.orthogonal._bounds import dead_outputs as dead_outputs
from keras_sparse_ortho.orthogonal._bounds import least_count as least_count
from keras_sparse_ortho.orthogonal._bounds import least_density as least_density
from keras_sparse_ortho.orthogonal._constant_fan import ConstantFan as ConstantFan
from keras_sparse_ortho.orthogonal._counts import apportion as apportion
from keras_sparse_ortho.orthogonal._counts import live_count as live_count
from keras_sparse_ortho.orthogonal._counts import unmask_at_random as unmask_at_random
from keras_sparse_ortho.orthogonal._dense_blocks import random_orthogonal as random_orthogonal
from keras_sparse_ortho.orthogonal._density_law import expected_density as expected_density
from keras_sparse_ortho.orthogonal._density_law import (
    rotations_for_density as rotations_for_density,
)
from keras_sparse_ortho.orthogonal._isometry import approximate_isometry as approximate_isometry
from keras_sparse_ortho.orthogonal._isometry import check_stops as check_stops
from keras_sparse_ortho.orthogonal._kernel import exact_orthogonal as exact_orthogonal
from keras_sparse_ortho.orthogonal._layout import KernelLayout as KernelLayout
from keras_sparse_ortho.orthogonal._n_by_m import NByM as NByM
from keras_sparse_ortho.orthogonal._options import check_options as check_options
from keras_sparse_ortho.orthogonal._polyphase import to_polyphase as to_polyphase
from keras_sparse_ortho.orthogonal._regular_blocks import RegularBlocks as RegularBlocks
from keras_sparse_ortho.orthogonal._regular_kernel import regular_blocks as regular_blocks
from keras_sparse_ortho.orthogonal._regular_pattern import check_regular as check_regular
from keras_sparse_ortho.orthogonal._regular_pattern import fan_step as fan_step
from keras_sparse_ortho.orthogonal._regular_pattern import regular_pattern as regular_pattern
from keras_sparse_ortho.orthogonal._regular_pattern import slots_of as slots_of
from keras_sparse_ortho.orthogonal._rotations import AngleLaw as AngleLaw
from keras_sparse_ortho.orthogonal._rotations import Rotations as Rotations
from keras_sparse_ortho.orthogonal._selection import largest_mask as largest_mask
from keras_sparse_ortho.orthogonal._selection import largest_masks as largest_masks
from keras_sparse_ortho.orthogonal._shift_taps import shift_taps as shift_taps
from keras_sparse_ortho.orthogonal._structure import Structure as Structure
from keras_sparse_ortho.orthogonal._structure import center_of as center_of

__all__ = [
    "AngleLaw",
    "Block",
    "ConstantFan",
    "KernelLayout",
    "NByM",
    "RegularBlocks",
    "Rotations",
    "Structure",
    "apportion",
    "approximate_isometry",
    "check_regular",
    "covering_count",
    "dead_outputs",
    "exact_orthogonal",
    "expected_density",
    "fan_step",
    "largest_mask",
    "least_count",
    "least_density",
    "live_count",
    "regular_blocks",
    "regular_pattern",
    "rotations_for_density",
    "shift_taps",
    "slots_of",
    "to_polyphase",
    "unmask_at_random",
]
