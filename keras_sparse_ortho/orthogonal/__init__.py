"""Exactly orthogonal sparse kernels, their layouts, counts and density law; NumPy and SciPy."""

from keras_sparse_ortho.orthogonal._counts import (
    apportion,
    expected_density,
    largest_mask,
    largest_masks,
    live_count,
    rotations_for_density,
    unmask_at_random,
)
from keras_sparse_ortho.orthogonal._eoi import (
    covering_rotations,
    random_orthogonal,
    random_rotations,
    unite,
)
from keras_sparse_ortho.orthogonal._floors import (
    depthwise_outputs,
    floored_columns,
    floored_mask,
    floored_masks,
)
from keras_sparse_ortho.orthogonal._isometry import approximate_isometry
from keras_sparse_ortho.orthogonal._kernel import (
    KernelLayout,
    Structure,
    center_of,
    check_options,
    covering_count,
    dead_outputs,
    einsum_axes,
    exact_orthogonal,
    least_count,
)
from keras_sparse_ortho.orthogonal._mirrored import (
    CANONICAL,
    Mirror,
    Mirrored,
    without_mirror,
)
from keras_sparse_ortho.orthogonal._regular_blocks import RegularBlocks
from keras_sparse_ortho.orthogonal._regular_pattern import (
    block_count,
    check_pattern,
    clear_padding,
    complete,
    fan_step,
    from_blocks,
    matched_by_score,
    regular_pattern,
    to_blocks,
    whole_blocks,
)
from keras_sparse_ortho.orthogonal._structures import (
    Block,
    GivenBlocks,
    NByM,
    StructureLike,
    as_structure,
    best_blocks,
    block_unit,
    regular_blocks,
)

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
