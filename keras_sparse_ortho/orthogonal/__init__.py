"""Exactly orthogonal sparse kernels, their layouts, counts and density law; NumPy and SciPy."""

from keras_sparse_ortho._other_names import public_names
from keras_sparse_ortho.orthogonal._block import Block
from keras_sparse_ortho.orthogonal._block import best_regular as best_regular
from keras_sparse_ortho.orthogonal._constant_fan import ConstantFan
from keras_sparse_ortho.orthogonal._counts import (
    apportion,
    covering_count,
    dead_outputs,
    largest_mask,
    least_count,
    least_density,
    live_count,
    unmask_at_random,
)
from keras_sparse_ortho.orthogonal._counts import largest_masks as largest_masks
from keras_sparse_ortho.orthogonal._density_law import expected_density, rotations_for_density
from keras_sparse_ortho.orthogonal._isometry import approximate_isometry
from keras_sparse_ortho.orthogonal._isometry import check_stops as check_stops
from keras_sparse_ortho.orthogonal._kernel import StructureLike as StructureLike
from keras_sparse_ortho.orthogonal._kernel import as_structure as as_structure
from keras_sparse_ortho.orthogonal._kernel import check_options as check_options
from keras_sparse_ortho.orthogonal._kernel import exact_orthogonal, regular_blocks
from keras_sparse_ortho.orthogonal._layout import KernelLayout, to_polyphase
from keras_sparse_ortho.orthogonal._n_by_m import NByM
from keras_sparse_ortho.orthogonal._regular_blocks import RegularBlocks
from keras_sparse_ortho.orthogonal._regular_pattern import block_count as block_count
from keras_sparse_ortho.orthogonal._regular_pattern import (
    check_regular,
    fan_step,
    regular_pattern,
    slots_of,
)
from keras_sparse_ortho.orthogonal._regular_pattern import clear_padding as clear_padding
from keras_sparse_ortho.orthogonal._regular_pattern import from_blocks as from_blocks
from keras_sparse_ortho.orthogonal._regular_pattern import matched_by_score as matched_by_score
from keras_sparse_ortho.orthogonal._regular_pattern import to_blocks as to_blocks
from keras_sparse_ortho.orthogonal._regular_pattern import whole_blocks as whole_blocks
from keras_sparse_ortho.orthogonal._rotations import AngleLaw, Rotations
from keras_sparse_ortho.orthogonal._rotations import random_orthogonal as random_orthogonal
from keras_sparse_ortho.orthogonal._structure import Structure
from keras_sparse_ortho.orthogonal._structure import center_of as center_of

# Public; the other names above are for the other rooms.
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
    "slots_of",
    "to_polyphase",
    "unmask_at_random",
]

__getattr__, __dir__ = public_names(__name__, __all__)
