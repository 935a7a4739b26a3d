"""Layers as Keras holds, builds, calls, compiles and restores them."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import keras
from keras.src.backend.common import dtypes
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.layers.rnn.conv_lstm import ConvLSTMCell as ConvLSTMCell

from keras_sparse_ortho._checks import as_text
from keras_sparse_ortho._interception import Enough, intercepted, with_settings
from keras_sparse_ortho._types import Config


def sublayers(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    """The layers that `layer` itself holds, in order of creation, those outside its graph last."""
    held = list(layer._flatten_layers(include_self=False, recursive=False))
    if not isinstance(layer, keras.Model):
        return held
    graph = {id(inner): inner for inner in layer.layers}
    return [
        *graph.values(),
        *(inner for inner in held if id(inner) not in graph),
    ]


def own_variables(layer: keras.layers.Layer) -> list[Any]:
    """The variables that a layer itself tracks, without those of the layers that it holds."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def created_trainable(layer: keras.layers.Layer) -> list[Any]:
    """The variables that the layer itself created as trainable, frozen now or not."""
    return list(layer._trainable_variables)


def graph_of(model: keras.Model) -> Any:
    # A Sequential model that knows its input holds a functional one.
    inner = model._functional if isinstance(model, keras.Sequential) else model
    # Another layer may show the attributes of one.
    is_model = isinstance(model, keras.Model)
    return inner if is_model and hasattr(inner, "_nodes_by_depth") else None


def is_graph(model: keras.Model) -> bool:
    """Whether this is a model of calls: functional, or Sequential with a known input."""
    return graph_of(model) is not None


def graph_ends(model: keras.Model) -> tuple[Any, Any]:
    """Inputs and outputs of a model that `is_graph`, nested as it takes and gives them."""
    # `input` of a Sequential model is that of its first call, if any.
    graph = graph_of(model)
    return graph.input, graph.output


def computes_its_graph(model: keras.Model) -> bool:
    """Whether this is a graph, and its `call` is Keras' own, which runs the graph."""
    return (
        is_graph(model)
        and type(model).call.__module__.partition(".")[0] == "keras"
    )


class GraphCall(NamedTuple):
    """A call in a graph: layer or operation, tensors, and all arguments.

    `settings` are the arguments but the first, `args` and `kwargs` all of them.
    """

    operation: Any
    inputs: list[Any]
    outputs: list[Any]
    settings: list[Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = MappingProxyType({})


def graph_calls(model: keras.Model) -> list[GraphCall]:
    """The calls of a model that `is_graph`, each after the calls that it depends on."""
    nodes = graph_of(model)._nodes_by_depth
    return [
        GraphCall(
            node.operation,
            list(node.input_tensors),
            list(node.output_tensors),
            [*node.arguments.args[1:], *node.arguments.kwargs.values()],
            tuple(node.arguments.args),
            node.arguments.kwargs,
        )
        for depth in sorted(nodes, reverse=True)
        for node in nodes[depth]
    ]


@contextlib.contextmanager
def instead_of_graph(
    model: keras.Model,
    function: Callable[[list[Any], Callable[..., Any]], None],
) -> Iterator[None]:
    """Inside, in this thread, a call of a model runs a function in the place of its graph.

    The call has converted its inputs, and has set the context that layers ask for `training`. It
    ends with the function.

    Args:
        model: Model that `is_graph`.
        function: callable. Gets the flat list of inputs, and what turns a layer or operation of the
            graph into the function to call.
    """

    def run(
        original: Any, inputs: Any, operation_fn: Callable[..., Any]
    ) -> None:
        function(keras.tree.flatten(inputs), operation_fn)
        raise Enough

    with (
        intercepted(graph_of(model), "_run_through_graph", run),
        contextlib.suppress(Enough),
    ):
        yield


def leave_graphs(layer: keras.layers.Layer) -> None:
    """Clears where a layer has been called, so that it can join another model."""
    layer._inbound_nodes.clear()
    layer._outbound_nodes.clear()


def maps_one_tensor(layer: keras.layers.Layer) -> bool:
    """Whether all symbolic calls of a layer are with a single tensor that has no mask."""
    calls = [node.input_tensors for node in layer._inbound_nodes]
    return all(
        len(tensors) == 1 and getattr(tensors[0], "_keras_mask", None) is None
        for tensors in calls
    )


def maybe_build(layer: keras.layers.Layer, call_spec: Any) -> None:
    """Builds a layer, and those inside it, as its own call would, with every shape it asks for."""
    with layer._open_name_scope():
        if not layer.built:
            layer._maybe_build(call_spec)
        if any(not inner.built for inner in layer._flatten_layers()):
            keras.Operation.compute_output_spec(
                layer, **call_spec.arguments_dict
            )


def is_built_in_calls(layer: keras.layers.Layer) -> bool:
    """Whether only a call builds a layer: no `build`, or not of Keras and with layers inside."""
    if type(layer).build is keras.layers.Layer.build:
        return True
    return bool(sublayers(layer)) and not type(layer).__module__.startswith(
        "keras."
    )


_CALL_SETTINGS = ("call_signature_parameters", "supports_masking")


class WrapperBuiltByCalls(keras.layers.Wrapper):
    """A wrapper that stands for its layer, which is built with all shapes of its call.

    It takes the layer's call arguments (training, mask, ...), and keeps the paths of its variables.
    Override `wrapper_config`: the settings besides the layer.
    """

    _waits_for_call = False

    def __init__(self, layer: keras.layers.Layer, **kwargs: Any) -> None:
        super().__init__(layer, autocast=False, **kwargs)
        for name, value in vars(layer).items():
            if name.startswith("_call_") or name in _CALL_SETTINGS:
                setattr(self, name, value)
        stand_in_name_scope(self, layer)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets what only the layer inside has, such as `activation`, there."""
        # On torch Keras keeps layers apart from other attributes.
        inside = {**vars(self).get("_modules", {}), **vars(self)}.get("layer")
        is_own = (
            name.startswith("_")
            or name in vars(self)
            or hasattr(type(self), name)
        )
        if inside is None or is_own or not hasattr(inside, name):
            super().__setattr__(name, value)
        else:
            setattr(inside, name, value)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """A context around the building of the layer."""
        stand_in_name_scope(self, self.layer)
        yield

    def build_from_config(self, config: Config) -> None:
        self._waits_for_call = is_built_in_calls(self.layer)
        if not self._waits_for_call:
            super().build_from_config(config)

    def get_config(self) -> Config:
        config: Config = keras.saving.serialize_keras_object(self.layer)
        if is_built_in_calls(self.layer):  # shapes do not build it
            config.pop("build_config", None)
        return {**self.wrapper_config(), "layer": config}

    def get_build_config(self) -> dict[str, Any] | None:
        return (
            None
            if is_built_in_calls(self.layer)
            else super().get_build_config()
        )

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.compute_output_spec(*args, **kwargs)

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.compute_output_shape(*args, **kwargs)

    def compute_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.compute_mask(*args, **kwargs)

    def _maybe_build(self, call_spec: Any) -> None:
        # Keras says of a layer from a file that it is built, whatever its `build_from_config` did.
        if self._waits_for_call:
            self.built = self._waits_for_call = False
        with outside_of_functions():
            if not self.built:
                with self.building():
                    maybe_build(self.layer, call_spec)
            super()._maybe_build(call_spec)


def outside_of_functions() -> contextlib.AbstractContextManager[Any]:
    """Lets layers be built from values while TensorFlow traces a function, as its `fit` does."""
    if keras.backend.backend() != "tensorflow":
        return contextlib.nullcontext()
    import tensorflow as tf

    return tf.init_scope()


def stand_in_name_scope(wrapper: Any, layer: keras.layers.Layer) -> None:
    """Gives an unbuilt layer the place of another of its name, around it or in its stead.

    So the paths of variables begin as before, e.g. for a `LayoutMap`.
    """
    if layer.name != wrapper.name:
        return
    if wrapper._parent_path is None:  # around a layer that is built
        wrapper._parent_path = layer._parent_path
    elif layer._parent_path is None:
        layer._parent_path = wrapper._parent_path


def compile_like(model: keras.Model, other: Any) -> bool:
    """Compiles a model with another's arguments; `False` if that was not compiled."""
    # Optimizer and metrics are new, of the same settings; losses keep no state and are shared.
    if not getattr(other, "compiled", False) or not hasattr(
        other, "_compile_config"
    ):
        return False

    def copy(value: Any) -> Any:
        if isinstance(value, keras.Optimizer | keras.Metric):
            return type(value).from_config(value.get_config())
        return value

    arguments = keras.tree.map_structure(
        copy, dict(other._compile_config.config)
    )
    # The name alone would give an optimizer of default settings.
    arguments["optimizer"] = copy(other.optimizer)
    model.compile(**arguments)
    return True


def compiled_loss_waits(model: keras.Model) -> bool:
    """Whether the loss of `compile` makes its variables only at its first call, yet to come."""
    loss = getattr(model, "_compile_loss", None)
    return loss is not None and not loss.built


def restored(value: Any, custom_objects: dict[str, Any] | None = None) -> Any:
    """Deserializes a part of a configuration; ValueError or TypeError for other values."""
    try:
        return keras.saving.deserialize_keras_object(
            value, custom_objects=custom_objects
        )
    except (ValueError, TypeError):
        raise
    except Exception as error:
        raise ValueError(
            "A part of the configuration cannot be restored: the file was written by something "
            f"else, or is damaged. Received: {as_text(value)}, {type(error).__name__}: {error}"
        ) from error


class VariableOverrides(keras.StatelessScope):
    """Gives variables the tensors of their pairs; other values and updates are as outside.

    Losses of layers go to the enclosing scope, or else to `losses`. Assigning to an overridden
    variable raises RuntimeError.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        super().__init__()
        # StatelessScope's own mapping would forget other variables.
        self._overrides = {id(variable): tensor for variable, tensor in pairs}
        self._updates: dict[int, tuple[Any, Any]] = {}
        self.parent: keras.StatelessScope | None = None

    def __enter__(self) -> "VariableOverrides":
        super().__enter__()
        self.parent = self.original_scope
        self.collect_losses = self.parent is None or self.parent.collect_losses
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        super().__exit__(kind, *exception)
        for variable, value in self._updates.values() if kind is None else ():
            variable.assign(value)

    def get_current_value(self, variable: keras.Variable) -> Any:
        if id(variable) in self._overrides:
            return self._overrides[id(variable)]
        if id(variable) in self._updates:
            return self._updates[id(variable)][1]
        return (
            None
            if self.parent is None
            else self.parent.get_current_value(variable)
        )

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, _ = update
        if id(variable) in self._overrides:
            raise RuntimeError(
                f"The weight {variable.path} is parametrized, and its layer assigned to it during "
                "the call. Such layers cannot be wrapped."
            )
        if self.parent is None:
            self._updates[id(variable)] = update  # made when the scope ends
        else:
            self.parent.add_update(update)

    def add_loss(self, loss: Any) -> None:
        if self.parent is None:
            self.losses.append(loss)
        else:
            self.parent.add_loss(loss)


def value_in_scope(variable: keras.Variable) -> Any:
    """The value that the innermost scope has for a variable; `None` where there is none."""
    scope = get_stateless_scope()
    return None if scope is None else scope.get_current_value(variable)


def in_stateless_scope() -> bool:
    """Whether a scope answers for the values of variables, or shapes are only traced."""
    return get_stateless_scope() is not None


def float64_not_narrowed() -> contextlib.AbstractContextManager[None]:
    """Keeps Keras from casting float64 arguments of its operations to float32, in this thread."""

    def widest(original: Callable[..., str], *arguments: Any) -> str:
        return "float64" if "float64" in arguments else original(*arguments)

    return intercepted(dtypes, "_lattice_result_type", widest)


@contextlib.contextmanager
def replaced(
    owner: keras.layers.Layer, name: str, value: Any
) -> Iterator[None]:
    """Replaces an attribute or dict entry inside. Bypasses `__setattr__`: Keras would track it."""
    own = owner if isinstance(owner, dict) else vars(owner)
    before = own.get(name, own)  # its own dictionary stands for "not there"
    own[name] = value
    try:
        yield
    finally:
        if before is own:
            del own[name]
        else:
            own[name] = before


@contextlib.contextmanager
def from_zero_states(model: keras.Model) -> Iterator[None]:
    """Starts recurrent layers from zeros in every call of a model inside, in this thread."""
    # Stateful layers keep their states, and accept any batch size: with `stateful=True` Keras
    # refuses all but the one they were built for.
    with contextlib.ExitStack() as stack:
        for layer in model._flatten_layers():
            if isinstance(layer, keras.layers.RNN) and layer.stateful:
                stack.enter_context(with_settings(layer, stateful=False))
        yield
