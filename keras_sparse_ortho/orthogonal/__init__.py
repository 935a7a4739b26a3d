"""Exactly orthogonal sparse kernels, their layouts, counts and density law; NumPy and SciPy."""

from keras_sparse_ortho._other_names import public_names
from keras_sparse_ortho.orthogonal._block import Block, best_regular
from keras_sparse_ortho.orthogonal._counts import (
    apportion,
    covering_count,
    dead_outputs,
    largest_mask,
    largest_masks,
    least_count,
    live_count,
    unmask_at_random,
)
from keras_sparse_ortho.orthogonal._density_law import expected_density, rotations_for_density
from keras_sparse_ortho.orthogonal._isometry import approximate_isometry, check_stops
from keras_sparse_ortho.orthogonal._kernel import (
    StructureLike,
    as_structure,
    check_options,
    exact_orthogonal,
    regular_blocks,
)
from keras_sparse_ortho.orthogonal._layout import KernelLayout, to_polyphase
from keras_sparse_ortho.orthogonal._n_by_m import NByM
from keras_sparse_ortho.orthogonal._regular_blocks import RegularBlocks
from keras_sparse_ortho.orthogonal._regular_pattern import (
    block_count,
    check_regular,
    clear_padding,
    fan_step,
    from_blocks,
    matched_by_score,
    regular_pattern,
    slots_of,
    to_blocks,
    whole_blocks,
)
from keras_sparse_ortho.orthogonal._rotations import AngleLaw, Rotations, random_orthogonal
from keras_sparse_ortho.orthogonal._structure import Structure, center_of

# Public; the other names above are for the other rooms.
__all__ = [
    "Block",
    "NByM",
    "approximate_isometry",
    "covering_count",
    "dead_outputs",
    "exact_orthogonal",
    "expected_density",
    "least_count",
    "regular_blocks",
]

__getattr__, __dir__ = public_names(__name__, __all__)
