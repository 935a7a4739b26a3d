"""Whole models made sparse: `sparsify`, `prune`, `apply_masks`, `parametrize`, `narrow`."""

from keras_sparse_ortho._foreign_names import answer
from keras_sparse_ortho.pruning._apply_masks import apply_masks
from keras_sparse_ortho.pruning._blocks import (
    BlockPlan,
    block_for,
    why_not_on_blocks,
)
from keras_sparse_ortho.pruning._draw_kernels import draw_kernels
from keras_sparse_ortho.pruning._following import (
    Role,
    role,
    role_by_name,
    role_of_layer,
)
from keras_sparse_ortho.pruning._narrow import narrow
from keras_sparse_ortho.pruning._parametrize import parametrize
from keras_sparse_ortho.pruning._planning import (
    BudgetLike,
    plan_for,
    shows_progress,
    weights_to_prune,
)
from keras_sparse_ortho.pruning._prune import prune
from keras_sparse_ortho.pruning._sparsify import sparsify
from keras_sparse_ortho.pruning._watched_calls import (
    CallWatch,
    Inside,
    WatchedCalls,
    watch_calls,
)

__all__ = ["apply_masks", "narrow", "parametrize", "prune", "sparsify"]

answer(__name__)
