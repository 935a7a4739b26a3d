"""Whole models: listing their kernels, rewriting and stripping them."""

from keras_sparse_ortho._foreign_names import public_names
from keras_sparse_ortho.models._apply import Plan, apply
from keras_sparse_ortho.models._apply import Target as Target
from keras_sparse_ortho.models._apply import verb as verb
from keras_sparse_ortho.models._at_density import DensityGap as DensityGap
from keras_sparse_ortho.models._at_density import density_gap as density_gap
from keras_sparse_ortho.models._at_density import model_gap as model_gap
from keras_sparse_ortho.models._at_density import warn_of_gap as warn_of_gap
from keras_sparse_ortho.models._at_density import warn_unless_at_density as warn_unless_at_density
from keras_sparse_ortho.models._at_density import watch_saving as watch_saving
from keras_sparse_ortho.models._convert import convert, strip
from keras_sparse_ortho.models._flops import input_specs as input_specs
from keras_sparse_ortho.models._flops import kernel_positions
from keras_sparse_ortho.models._remove_channels import flattened as flattened
from keras_sparse_ortho.models._remove_channels import remove_channels
from keras_sparse_ortho.models._rewrite import check_built as check_built
from keras_sparse_ortho.models._rewrite import never_called as never_called
from keras_sparse_ortho.models._rewrite import prunable_weights
from keras_sparse_ortho.models._rewrite import refuse_unfit as refuse_unfit
from keras_sparse_ortho.models._rewrite import rewrite as rewrite
from keras_sparse_ortho.models._rewrite import weights_of as weights_of
from keras_sparse_ortho.models._saved_layers import is_clonable as is_clonable
from keras_sparse_ortho.models._saved_layers import is_graph_of_class as is_graph_of_class
from keras_sparse_ortho.models._stateless_loss import StatelessLoss
from keras_sparse_ortho.models._stateless_loss import check_labels as check_labels

# Public; the other names above are for the other rooms.
__all__ = [
    "Plan",
    "apply",
    "convert",
    "kernel_positions",
    "prunable_weights",
    "remove_channels",
    "strip",
]

__getattr__, __dir__ = public_names(__name__, __all__)
