"""Every private name of Keras that the package uses; `_names.py` has the table of them."""

from keras_sparse_ortho._keras_internals._assignments import (
    Read,
    check_assignments,
    check_given,
)
from keras_sparse_ortho._keras_internals._become import (
    become,
    body_of,
    track_parameters_anew,
)
from keras_sparse_ortho._keras_internals._copies import copy_objects
from keras_sparse_ortho._keras_internals._distribution import (
    Axes,
    along_kernel,
    axes_at,
    create_along,
    layout_entries,
    layout_of,
    mesh_size,
)
from keras_sparse_ortho._keras_internals._fit import (
    after_epochs,
    after_fit,
    before_save,
    in_fit,
    initial_epoch_is,
    log_first,
    model_in_fit,
    warn_user,
    without_warnings,
)
from keras_sparse_ortho._keras_internals._layers import (
    ConvLSTMCell,
    GraphCall,
    VariableOverrides,
    WrapperBuiltByCalls,
    compile_like,
    compiled_loss_waits,
    computes_its_graph,
    created_trainable,
    float64_not_narrowed,
    from_zero_states,
    graph_calls,
    graph_ends,
    in_stateless_scope,
    instead_of_graph,
    is_built_in_calls,
    is_graph,
    leave_graphs,
    maps_one_tensor,
    maybe_build,
    own_variables,
    replaced,
    restored,
    stand_in_name_scope,
    sublayers,
    value_in_scope,
)
from keras_sparse_ortho._keras_internals._names import BEHAVIOURS, PRIVATE_NAMES
from keras_sparse_ortho._keras_internals._optimizers import (
    Slot,
    applied_batches,
    build_restored_optimizer,
    is_torch_optimizer,
    optimizer_slots,
    refuse_other_slots,
    slot_pairs,
    trains,
)
from keras_sparse_ortho._keras_internals._quantized import (
    packed_shape,
    unpacked_value,
)
from keras_sparse_ortho._keras_internals._snapshot import Snapshot
from keras_sparse_ortho._keras_internals._symbolic_calls import (
    backend_calls,
    symbolic_calls,
)
from keras_sparse_ortho._keras_internals._tracking import (
    track_layers,
    track_variable,
)
from keras_sparse_ortho._keras_internals._variables import (
    DeferredVariables,
    StandIns,
    awaits_value,
    give_value,
    saves_by_itself,
    value_source,
)
