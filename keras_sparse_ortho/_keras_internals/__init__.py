"""Every private name of Keras that the package uses; `_names.py` has the table of them."""

from keras_sparse_ortho._keras_internals._become import (
    become,
    body_of,
)
from keras_sparse_ortho._keras_internals._building import (
    WrapperBuiltByCalls,
    adopt_call_interface,
    is_built_in_calls,
    maybe_build,
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
    track_parameters_anew,
)
from keras_sparse_ortho._keras_internals._fit import (
    after_fit,
    before_save,
    in_fit,
    initial_epoch_is,
    length_of_data,
)
from keras_sparse_ortho._keras_internals._graphs import (
    GraphCall,
    computes_its_graph,
    graph_calls,
    graph_ends,
    is_graph,
    leave_graphs,
    maps_one_tensor,
)
from keras_sparse_ortho._keras_internals._layouts import (
    Axes,
    along_kernel,
    axes_at,
    axes_of,
    create_along,
    layout_entries,
    layout_of,
    mesh_size,
    stand_in_name_scope,
)
from keras_sparse_ortho._keras_internals._names import PRIVATE_NAMES
from keras_sparse_ortho._keras_internals._object_copy import (
    copy_objects,
)
from keras_sparse_ortho._keras_internals._optimizers import (
    applied_batches,
    counter_of_batches,
    optimizer_slots,
    refuse_other_slots,
    slot_pairs,
)
from keras_sparse_ortho._keras_internals._restoring import (
    restored,
)
from keras_sparse_ortho._keras_internals._scopes import (
    VariableOverrides,
    float64_not_narrowed,
    in_stateless_scope,
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
from keras_sparse_ortho._keras_internals._sublayers import (
    ConvLSTMCell,
    created_trainable,
    own_variables,
    sublayers,
)

__all__ = [
    "PRIVATE_NAMES",
    "Axes",
    "ConvLSTMCell",
    "DeferredVariables",
    "GraphCall",
    "Read",
    "Snapshot",
    "StandIns",
    "VariableOverrides",
    "WrapperBuiltByCalls",
    "adopt_call_interface",
    "after_fit",
    "along_kernel",
    "applied_batches",
    "awaits_value",
    "axes_at",
    "axes_of",
    "become",
    "before_save",
    "body_of",
    "check_assignments",
    "check_given",
    "check_of",
    "check_stored",
    "compile_like",
    "compiled_loss_waits",
    "computes_its_graph",
    "copy_objects",
    "counter_of_batches",
    "create_along",
    "created_trainable",
    "float64_not_narrowed",
    "give_value",
    "graph_calls",
    "graph_ends",
    "in_fit",
    "in_stateless_scope",
    "initial_epoch_is",
    "is_built_in_calls",
    "is_graph",
    "layout_entries",
    "layout_of",
    "leave_graphs",
    "length_of_data",
    "maps_one_tensor",
    "maybe_build",
    "mesh_size",
    "optimizer_slots",
    "own_variables",
    "refuse_other_slots",
    "restored",
    "saves_by_itself",
    "slot_pairs",
    "stand_in_name_scope",
    "sublayers",
    "track_parameters_anew",
    "value_in_scope",
    "value_source",
]
