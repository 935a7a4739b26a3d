"""The private names of Keras that this room uses, and what each is for."""

PRIVATE_NAMES = {
    "Layer._call_...": "how a wrapper is handed the arguments (training, mask) of its layer's call",
    "Layer._maybe_build": "building a layer as its own call would, with every shape it asks for",
    "Layer._open_name_scope": "the paths of variables that are created in doing so",
    "Layer._parent_path": "a wrapped layer's variables have the paths that they have without it",
    "Layer._flatten_layers": "the layers that a layer holds",
    "Layer._inbound_nodes": "a layer's place in graphs, kept when it becomes another layer",
    "Layer._outbound_nodes": "the same for its consumers; copies leave out those of other models",
    "Layer._trainable_variables": "the variables that a layer (or an optimizer) itself tracks",
    "Layer._non_trainable_variables": "the same, for variables that are not trained",
    "Layer._tracker": "adding a variable to a layer that is built",
    "Layer._track_variable": "live values take a kernel's place among the variables of its layer",
    "Layer._untrack_variable": "the kernel that they replace leaves it",
    "Layer._torch_params": "the parameters that torch sees; copies do not share them",
    "Layer._track_variables": "makes these parameters, when variables have changed",
    "Variable._value": "a kernel that is not stored holds no array",
    "Variable._initializer": "a placeholder for a variable without a value in a trace",
    "Variable._initialize": "the first value of a variable, in a copy or given later",
    "Variable._layout": "where a variable lies on several devices",
    "Function._nodes_by_depth": "the calls of a functional model, in order",
    "Function._run_through_graph": "a sweep over layers runs parts of a graph in its place",
    "Function._nodes": "the same as a set of keys, which copies have to make again",
    "Sequential._functional": "the functional model that a Sequential one holds",
    "KerasTensor._keras_mask": "whether a layer is called on a tensor with a mask",
    "Trainer._compile_config": "compiling a converted model as the given one was",
    "Trainer._compile_loss": "whether the loss has made its variables",
    "Trainer._initial_epoch": "a resumed `fit` starts with the epoch that was interrupted",
    "keras.src.backend.common.dtypes": "orthogonality is measured in float64",
    "keras.src.backend.common.global_state": "variables that Keras has yet to initialize",
    "keras.src.backend.common.stateless_scope.get_stateless_scope": "the scope that gives values",
    "keras.src.backend.common.symbolic_scope.in_symbolic_scope": "whether shapes are only traced",
    "keras.src.layers.rnn.conv_lstm.ConvLSTMCell": "its kernels' axes and FLOPs",
    "keras.src.ops.function.make_node_key": "the keys in `Function._nodes`",
}
"""The purpose by name, as `Class.attribute` or as it is imported. Tested on each Keras."""

BEHAVIOURS = {
    "a layer is its class and its dictionary": "`become` gives an object another layer's",
    "graphs call the layer objects that they hold": "a layer that has become another one is called",
    "Keras binds `build` to the object": "`become` binds it to the new object",
    "a variable asks the scope for its value": "wrapped layers see effective weights",
    "a scope knows the one around it": "what is not overridden goes there: losses, updates, values",
    "variables are created without values in a stateless scope": "no dense kernel is allocated",
    "a layer saves its own variables by number": "live values and indices take a kernel's place",
    "set_weights assigns one variable after the other": "indices are checked before the first",
    "a class is saved by its registered name": "a derived class saves wrappers inside a layer",
    "optimizers build one slot after the other for each variable": "slots move with live entries",
}
"""Behaviours that Keras does not promise, and their use here. `docs/core.md` explains the parts;
`tests/test_private_keras.py` tests each on the Keras that is installed."""
