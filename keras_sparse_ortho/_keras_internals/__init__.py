"""Every private name of Keras that the package uses; `_names.py` has the table of them."""

from keras_sparse_ortho._keras_internals._become import (
    become,
    body_of,
    track_parameters_anew,
)
from keras_sparse_ortho._keras_internals._building import (
    WrapperBuiltByCalls,
    adopt_call_interface,
    is_built_in_calls,
    maybe_build,
    outside_of_functions,
)
from keras_sparse_ortho._keras_internals._checked_assignments import (
    Read,
    check_assignments,
    check_given,
    check_of,
    check_stored,
)
from keras_sparse_ortho._keras_internals._compiling import (
    compile_like,
    compiled_loss_waits,
)
from keras_sparse_ortho._keras_internals._fit import (
    after_epochs,
    after_fit,
    before_save,
    in_fit,
    initial_epoch_is,
    level_of_user,
    log_first,
    model_in_fit,
)
from keras_sparse_ortho._keras_internals._graph_calls import (
    GraphCall,
    computes_its_graph,
    graph_calls,
    graph_ends,
    leave_graphs,
    maps_one_tensor,
)
from keras_sparse_ortho._keras_internals._graphs import (
    ConvLSTMCell,
    created_trainable,
    is_graph,
    own_variables,
    sublayers,
)
from keras_sparse_ortho._keras_internals._layouts import (
    Axes,
    along_kernel,
    axes_at,
    create_along,
    layout_entries,
    layout_of,
    mesh_size,
    stand_in_name_scope,
)
from keras_sparse_ortho._keras_internals._names import BEHAVIOURS, PRIVATE_NAMES
from keras_sparse_ortho._keras_internals._object_copy import (
    copy_objects,
)
from keras_sparse_ortho._keras_internals._optimizers import (
    Slot,
    applied_batches,
    build_restored_optimizer,
    counter_of_batches,
    is_torch_optimizer,
    optimizer_slots,
    refuse_other_slots,
    slot_pairs,
    trains,
)
from keras_sparse_ortho._keras_internals._restoring import (
    restored,
)
from keras_sparse_ortho._keras_internals._scopes import (
    VariableOverrides,
    float64_not_narrowed,
    in_stateless_scope,
    replaced,
    value_in_scope,
)
from keras_sparse_ortho._keras_internals._snapshot import (
    Snapshot,
)
from keras_sparse_ortho._keras_internals._stand_ins import (
    DeferredVariables,
    StandIns,
    awaits_value,
    give_value,
    saves_by_itself,
    value_source,
)
from keras_sparse_ortho._keras_internals._tf_tracking import (
    track_layers,
    track_variable,
)
