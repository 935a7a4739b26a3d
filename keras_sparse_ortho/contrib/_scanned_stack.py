"""`ScannedStack`: many equal layers one after the other, of which one is traced."""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import scan
from keras_sparse_ortho._checks import check_config, is_integer, told
from keras_sparse_ortho._keras_internals import (
    DeferredVariables,
    Read,
    check_assignments,
    check_given,
    check_of,
    check_stored,
    outside_of_functions,
    restored,
    sublayers,
    track_variable,
    value_in_scope,
)
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.contrib._stacked_kernel import StackedKernel, stacked_layout
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import are_weights_set_later
from keras_sparse_ortho.kernels import (
    KernelLayout,
    RepeatedLayer,
    Storage,
    derived_seed,
    find_kernels,
    is_sparse_layer,
    kernel_layouts,
    walk,
)
from keras_sparse_ortho.layers import LARGEST, constant, variable_dtype
from keras_sparse_ortho.models import kernel_positions

ops = keras.ops
_LONGEST = 100  # layers in a row, of a model that is unrolled
_DEEPEST = 1_000_000


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class ScannedStack(keras.layers.Layer, RepeatedLayer):
    """`depth` layers of one kind in a row, each with its own weights.

        x_(k + 1) = layer(x_k; w_k)    for k = 0 ... depth - 1

    Every weight `w` of the layer is one variable of shape `(depth, *w.shape)` here, and the layer
    is traced once, as the body of a loop: compiling a network of 1000 layers takes as long as one
    of 10. A kernel of the stack is `depth` matrices. `PrunableLayer`, `sparsify`, `prune` and the
    rest take it as other kernels: exact orthogonality is that of each matrix, and a mask holds its
    count over all of them. `strip` unrolls the stack.

    Args:
        layer: The unbuilt layer: one tensor in, one of the same shape out. It may hold live blocks,
            and be a Sequential model of several. Integer seeds in its configuration are derived for
            each layer.
        depth: Number of layers.
        **kwargs: As for `keras.layers.Layer`.

    Raises:
        ValueError: A `depth` under 1 or over a million, a layer that is built already, or whose
            output has another shape than its input.
        NotPrunableError: A layer that holds a `PrunableLayer`: the stack is wrapped, not its layer.

    Limits: masks of padded sequences and initial states are not passed on. On torch the loop is a
    Python loop, with nothing to gain.

    Example:

    >>> import keras, numpy as np
    >>> stack = ScannedStack(keras.layers.Dense(16, activation="tanh"), depth=100)
    >>> tuple(stack(np.ones((2, 16))).shape), tuple(stack.kernel.shape)
    ((2, 16), (100, 16, 16))
    """

    def __init__(self, layer: keras.layers.Layer, depth: int, **kwargs: Any) -> None:
        _check(layer, depth)
        # The layer casts its own inputs and weights.
        kwargs.setdefault("dtype", variable_dtype(layer))
        super().__init__(autocast=False, **kwargs)
        self.depth = int(depth)
        self._inside = LayersInStack(layer, self.depth)
        self.activation = getattr(layer, "activation", None)  # what follows its kernels

    @property
    def layer(self) -> Any:
        """The layer that is repeated. Its own weights are not those of any layer in the stack."""
        return self._inside.layer

    @outside_of_functions()
    def build(self, input_shape: Any) -> None:
        """Draws the weights of all layers; where they are set later, they are zero."""
        _check_shapes(self.layer, tuple(input_shape))
        draws = not are_weights_set_later()
        for name, variable, values in self._inside.variables(tuple(input_shape), draws):
            weight = self.add_weight(
                name=name,
                shape=values.shape,
                dtype=variable.dtype,
                initializer=constant(values),
                trainable=variable.trainable,
                autocast=False,
                constraint=self._inside.constraint(variable),
            )
            self._inside.add(variable, weight)
            track_variable(self, weight)
            if (check := check_of(variable)) is not None:
                each = functools.partial(self._inside.check_each, check)
                check_assignments(weight, each)
            if not hasattr(type(self), name):
                setattr(self, name, weight)

    def call(self, inputs: Any) -> Any:
        spec = self.layer.compute_output_spec(keras.KerasTensor(inputs.shape, inputs.dtype))
        inside = self._inside
        given = inside.given()
        added = False

        def body(carry: tuple[Any, Any], weights: list[Any], states: list[Any]) -> Any:
            nonlocal added
            outputs, states, losses = inside.call(
                carry[0], weights, states, [own for own, _ in given]
            )
            added = added or bool(losses)
            total = sum((ops.cast(loss, "float32") for loss in losses), carry[1])
            return (ops.cast(outputs, spec.dtype), total), states

        start = (ops.cast(inputs, spec.dtype), ops.zeros((), "float32"))
        trained, others = inside.stacked()
        weights, states = ([variable.value for variable in group] for group in (trained, others))
        weights += [value for _, value in given]
        (outputs, loss), states = scan(body, start, weights, states)
        for variable, value in zip(others, states, strict=True):
            assign(variable, value)
        if added:
            self.add_loss(loss)
        return outputs

    def compute_output_spec(self, inputs: Any) -> Any:
        return self.layer.compute_output_spec(inputs)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        return tuple(input_shape)

    def unrolled(self, values: Iterable[tuple[Any, Any]] = ()) -> keras.Sequential:
        """A Sequential model of the layers with copies of the weights, or other `values` of some.

        Over 100 layers are nested in models of 100: Keras recurses from layer to layer where it
        builds, clones or loads a model, and Python allows a thousand calls.
        """
        shape = self.get_build_config()["input_shape"]
        inputs = keras.Input(batch_shape=shape, dtype=self.layer.compute_dtype)
        layers = self._inside.unrolled(shape, {id(weight): value for weight, value in values})
        if len(layers) > _LONGEST:
            layers = [
                keras.Sequential(layers[k : k + _LONGEST], name=f"{self.name}_from_{k}")
                for k in range(0, len(layers), _LONGEST)
            ]
        return keras.Sequential([inputs, *layers], name=self.name)

    def set_each(self, set_layer: Callable[[int], None]) -> None:
        """Calls `set_layer(k)` for a `layer` with the weights of layer `k`; changes are kept."""
        self._inside.at_each(set_layer, changes=True)

    def build_like(self, plain: "ScannedStack") -> None:
        if not self.built:
            self.build(plain.get_build_config()["input_shape"])
        biases = {v.name: v for v in plain.weights if len(v.shape) == 2}
        for variable in self.weights:
            if variable.name in biases:
                # A copy: on JAX `fit` frees the arrays of its model, which may not be shared.
                assign(variable, ops.copy(biases[variable.name].value))

    def to_plain_stack(self) -> "ScannedStack":
        """The stack of plain layers, built, for one of a layer of live blocks."""
        if not is_sparse_layer(self.layer):
            raise NotPrunableError(
                f"Live blocks inside the layers of the ScannedStack '{self.name}' have no masked "
                "form. Make its layers the layers with blocks themselves, or unroll it: "
                f"keras_sparse_ortho.strip. Received: layers of {type(self.layer).__name__}"
            )
        one = self.layer.dense_layer()
        plain = self.like(one)
        plain.build(self.get_build_config()["input_shape"])

        def weights(k: int) -> list[np.ndarray]:
            self.layer.fill_dense_layer(one)
            return [to_numpy(variable) for variable in one.weights]

        rows = self._inside.at_each(weights)
        plain.set_each(lambda k: one.set_weights(rows[k]))
        return plain

    def like(self, layer: Any) -> "ScannedStack":
        return type(self)(**{**super().get_config(), "layer": layer, "depth": self.depth})

    def storages(self) -> dict[str, Storage]:
        return {
            weight.path.replace("/", "_"): StackedKernel(self, self._inside, weight)
            for weight in find_kernels(self.layer, "")
            if weight.storage is not None
        }

    def load_own_variables(self, store: Any) -> None:
        """As every layer does; where live blocks stand is checked before anything is changed."""
        check_stored(self, store)
        super().load_own_variables(store)

    def set_weights(self, weights: list[Any]) -> None:
        check_given(self.weights, weights)
        super().set_weights(weights)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "layer": unbuilt_config(self.layer), "depth": self.depth}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "ScannedStack":
        check_config(cls.__name__, config, "layer", "depth")
        layer = restored(config["layer"], custom_objects)
        return cls(**{**config, "layer": layer})


@kernel_layouts.register(ScannedStack)
def _stack(stack: ScannedStack) -> dict[str, KernelLayout | None]:
    found = find_kernels(stack.layer, "")
    return {
        weight.path.replace("/", "_"): stacked_layout(weight.layout, len(weight.shape))
        for weight in found
    }


@kernel_positions.register(ScannedStack)
def _positions(stack: ScannedStack, inputs: Any, outputs: Any) -> int | None:
    owners = {id(weight.owner): weight.owner for weight in find_kernels(stack.layer, "")}
    if len(owners) != 1:
        return None  # unknown: which of them sees what
    (owner,) = owners.values()
    return kernel_positions(owner, inputs, outputs)


def _check(layer: Any, depth: Any) -> None:
    if not is_integer(depth) or not 1 <= depth <= _DEEPEST:
        raise ValueError(
            f"`depth` must be an integer from 1 to {_DEEPEST}. Received: depth={told(depth)}"
        )
    if not isinstance(layer, keras.layers.Layer):
        raise ValueError(
            f"A ScannedStack repeats a Keras layer. Received: layer of type {type(layer).__name__}"
        )
    if hasattr(layer, "transparent_path"):
        raise NotPrunableError(
            "A ScannedStack repeats a plain layer; wrap the stack, which masks every layer in it: "
            f"PrunableLayer(ScannedStack(layer, depth)). Received: layer={type(layer).__name__}"
        )
    if layer.built:
        raise ValueError(
            "A ScannedStack draws the weights of its layers itself, so that its layer must not be "
            f"built yet. Received: the layer '{layer.name}', which is"
        )


def _check_shapes(layer: Any, input_shape: tuple[int | None, ...]) -> None:
    output_shape = tuple(layer.compute_output_shape(input_shape))
    if output_shape != input_shape:
        raise ValueError(
            f"The layers of a ScannedStack must return the shape that they take; '{layer.name}' "
            f"returns {output_shape}. Received: input of shape {input_shape}"
        )


class LayersInStack:
    """One layer that stands for all, and the variables that hold the weights of all.

    Hides the layer from Keras' tracking: its variables are places that a call fills with the
    weights of one layer after the other.
    """

    def __init__(self, layer: Any, depth: int) -> None:
        self.layer = layer
        self.depth = depth
        self._pairs: list[tuple[Any, Any]] = []
        self._in_scopes: list[tuple[Any, Any]] = []

    def add(self, variable: Any, stacked: Any) -> None:
        """Notes which variable of the stack holds a variable of all layers."""
        self._pairs.append((variable, stacked))

    def stacked(self) -> tuple[list[Any], list[Any]]:
        """The stack's variables that are trained, and those that a call may change."""
        trained, others = self._split()
        return [stacked for _, stacked in trained], [stacked for _, stacked in others]

    def _split(self) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        own = {id(variable) for variable in self.layer.trainable_variables}
        trained = [pair for pair in self._pairs if id(pair[0]) in own]
        return trained, [pair for pair in self._pairs if id(pair[0]) not in own]

    def in_scopes(self, variable: Any) -> Any:
        """The variable of all layers for one that only scopes give a value, in the layer."""
        for own, stacked in self._in_scopes:
            if own is variable:
                return stacked
        shape, dtype = (self.depth, *variable.shape), variable.dtype
        with DeferredVariables().creating():
            stacked = keras.Variable("zeros", shape=shape, dtype=dtype, name=variable.name)
        self._in_scopes.append((variable, stacked))
        return stacked

    def given(self) -> list[tuple[Any, Any]]:
        """Such variables with the values for all layers that the enclosing scope has."""
        pairs = ((own, value_in_scope(stacked)) for own, stacked in self._in_scopes)
        return [(own, value) for own, value in pairs if value is not None]

    def call(
        self, inputs: Any, weights: list[Any], states: list[Any], given: list[Any]
    ) -> tuple[Any, list[Any], list[Any]]:
        """Output, new states and losses of the layer that has these weights and states.

        After the weights that are trained come those of variables that are `given`.
        """
        trained, others = self._split()
        places = [*(variable for variable, _ in trained), *given, *(v for v, _ in others)]
        mapping = list(zip(places, (*weights, *states), strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            outputs = self.layer(inputs)
            regularized = [v for v, _ in trained if v.regularizer is not None]
            losses = [*scope.losses, *(v.regularizer(v) for v in regularized)]
            states = [scope.get_current_value(variable) for variable, _ in others]
        return outputs, states, losses

    # --- one layer of them -----------------------------------------------------------------------

    def copy(self, k: int) -> Any:
        """Layer `k`, not built."""
        config = _reseeded(unbuilt_config(self.layer)["config"], k)
        return type(self.layer).from_config({**config, "name": f"{self.layer.name}_{k}"})

    def variables(
        self, input_shape: tuple[int | None, ...], draws: bool
    ) -> Iterator[tuple[str, Any, np.ndarray]]:
        """Builds the layer; its variables, with names and initial values for all layers, or 0."""
        self.layer.build(input_shape)
        entries = self.depth * max((math.prod(v.shape) for v in _variables(self.layer)), default=0)
        if entries > LARGEST:
            raise ValueError(
                f"Each weight of a ScannedStack has at most {LARGEST} entries. "
                f"Received: depth={self.depth}, for {entries} entries"
            )
        first = self._built(0, input_shape)
        _name_steadily(self.layer, first)
        names = _names(self.layer)
        layers = (self._built(k, input_shape) if k else first for k in range(self.depth))
        drawn = [[to_numpy(v) for v in _variables(layer)] for layer in layers] if draws else []
        for k, variable in enumerate(_variables(self.layer)):
            if draws:
                initial = np.stack([values[k] for values in drawn])
            elif "int" in variable.dtype:  # where blocks stand must be valid at any time
                initial = np.stack([to_numpy(variable)] * self.depth)
            else:
                initial = np.zeros((self.depth, *variable.shape), "float32")
            name = names.get(id(variable), variable.name)
            yield name.replace("/", "_"), variable, initial

    def _built(self, k: int, input_shape: tuple[int | None, ...]) -> Any:
        layer = self.copy(k)
        layer.build(input_shape)
        return layer

    def unrolled(self, input_shape: Any, values: dict[int, Any]) -> list[Any]:
        """All layers, built, with copies of their weights, or with other `values` by `id`."""
        rows = [to_numpy(values.get(id(stacked), stacked)) for _, stacked in self._pairs]
        layers = []
        for k in range(self.depth):
            layer = self._built(k, input_shape)
            for variable, row in zip(_variables(layer), rows, strict=True):
                assign(variable, row[k])
            layers.append(layer)
        return layers

    def at_each(self, action: Callable[[int], Any], *, changes: bool = False) -> list[Any]:
        """What `action(k)` returns for each layer; with `changes` the weights it sets are kept."""
        rows = [(variable, to_numpy(stacked)) for variable, stacked in self._pairs]
        found, after = [], []
        for k in range(self.depth):
            for variable, row in rows:
                assign(variable, row[k])
            found.append(action(k))
            after.append([to_numpy(variable) for variable, _ in rows] if changes else [])
        for values, (_, stacked) in zip(zip(*after, strict=True), self._pairs, strict=False):
            assign(stacked, np.stack(values))
        return found

    def constraint(self, variable: Any) -> Any:
        """The constraint of a variable, for each layer by itself."""
        own = variable.constraint
        return None if own is None else lambda stacked: ops.vectorized_map(own, stacked)

    def check_each(self, check: Callable[[Read], None], given: Read) -> None:
        """Runs the check of a variable of the layer on what each layer in the stack gets."""
        for k in range(self.depth):
            check(lambda own, k=k: given(self.stacked_like(own))[k])  # type: ignore[misc]

    def stacked_like(self, variable: Any) -> Any:
        """The variable of the stack that holds one of the layer."""
        return next(stacked for own, stacked in self._pairs if own is variable)


def _variables(layer: Any) -> list[Any]:
    """Weights and states of random generators."""
    return [*layer.trainable_variables, *layer.non_trainable_variables]


def _names(layer: Any) -> dict[int, str]:
    """By `id` the names of all variables: where they are in the layer."""
    return {
        id(variable): f"{path}/{variable.name}" if path else variable.name
        for inner, path in walk(layer, "")
        for variable in _variables(inner)
        if not any(variable is other for child in sublayers(inner) for other in _variables(child))
    }


def _name_steadily(layer: Any, other: Any) -> None:
    """Gives layers inside that `other`, another instance, names differently fixed names."""
    holders, others = ([inner for inner, _ in walk(one, "")] for one in (layer, other))
    for holder, its_twin in zip(holders, others, strict=False):
        pairs = [*zip(sublayers(holder), sublayers(its_twin), strict=False)]
        taken = {inner.name for inner, twin in pairs if inner.name == twin.name}
        for inner, twin in pairs:
            if inner.name == twin.name:
                continue
            usual = re.sub(r"_\d+$", "", inner.name)
            numbered = (f"{usual}_{k}" for k in itertools.count(1))
            inner.name = next(n for n in itertools.chain([usual], numbered) if n not in taken)
            taken.add(inner.name)


def unbuilt_config(layer: Any) -> dict[str, Any]:
    """The configuration of a layer without its build state, also of Sequential models in it."""
    return _unbuilt(keras.saving.serialize_keras_object(layer))


def _unbuilt(config: Any) -> Any:
    if isinstance(config, list | tuple):
        return type(config)(map(_unbuilt, config))
    if not isinstance(config, dict):
        return config
    rest = {k: _unbuilt(v) for k, v in config.items() if k != "build_config"}
    if rest.get("class_name") == "Sequential" and isinstance(rest.get("config"), dict):
        # Its input layer was added when it was built.
        own = dict(rest["config"])
        own.pop("build_input_shape", None)
        own["layers"] = [at for at in own["layers"] if at["class_name"] != "InputLayer"]
        rest["config"] = own
    return rest


def _reseeded(config: Any, k: int) -> Any:
    """A configuration with derived seeds, as equal seeds give equal weights."""
    if isinstance(config, dict):
        return {
            key: derived_seed(value, str(k))
            if key == "seed" and is_integer(value)
            else _reseeded(value, k)
            for key, value in config.items()
        }
    if isinstance(config, list | tuple):
        return type(config)(_reseeded(value, k) for value in config)
    return config
