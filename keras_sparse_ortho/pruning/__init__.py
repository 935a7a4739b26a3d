"""Whole models made sparse: `sparsify`, `prune`, `apply_masks`, `parametrize`."""

from keras_sparse_ortho._foreign_names import public_names
from keras_sparse_ortho.pruning._apply_masks import apply_masks as apply_masks
from keras_sparse_ortho.pruning._blocks import why_not_on_blocks as why_not_on_blocks
from keras_sparse_ortho.pruning._parametrize import parametrize as parametrize
from keras_sparse_ortho.pruning._planning import BudgetLike as BudgetLike
from keras_sparse_ortho.pruning._planning import plan_for as plan_for
from keras_sparse_ortho.pruning._prune import prune as prune
from keras_sparse_ortho.pruning._sparsify import draw_kernels as draw_kernels
from keras_sparse_ortho.pruning._sparsify import sparsify as sparsify

# Public; the other names above are for the other rooms.
__all__ = ["apply_masks", "parametrize", "prune", "sparsify"]

__getattr__, __dir__ = public_names(__name__, __all__)
