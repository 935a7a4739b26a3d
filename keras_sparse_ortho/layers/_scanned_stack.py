"""`ScannedStack`: many equal layers one after the other, of which one is traced."""

from collections.abc import Iterable
from typing import Any

import keras

from keras_sparse_ortho._backend import scan
from keras_sparse_ortho._checks import is_integer
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import are_weights_set_later
from keras_sparse_ortho.kernels import (
    KernelLayout,
    StoredKernel,
    find_kernels,
    kernel_layouts,
)
from keras_sparse_ortho.layers._block_functions import constant
from keras_sparse_ortho.layers._layers_in_stack import LayersInStack, unbuilt_config
from keras_sparse_ortho.layers._stacked_kernel import StackedKernel, stacked_layout

ops = keras.ops
_LONGEST = 100  # layers in a row, of a model that is unrolled


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class ScannedStack(keras.layers.Layer):
    """So many layers of one kind in a row, each with weights of its own.

        x_(k + 1) = layer(x_k; w_k)    for k = 0 ... depth - 1

    Every weight `w` of the layer is one variable of shape `(depth, *w.shape)` here, and the layer
    is traced once, as the body of a loop: compiling a network of 1000 layers takes as long as one
    of 10. Outputs are those of the layers in a `Sequential` model, which `unrolled` gives.

    A kernel of the stack is `depth` matrices. `PrunableLayer`, `sparsify`, `prune` and the rest
    take it as they take other kernels: exact orthogonality is that of each matrix, and a mask
    holds its count over all of them. `strip` unrolls the stack.

    Args:
        layer: The layer, not built: one tensor in, one of the same shape out. A layer of live
            blocks can be one, and a Sequential model of several. Layers start as it would, each
            with its own draw: integer seeds in its configuration are derived for each of them.
        depth: Number of layers.
        **kwargs: As for `keras.layers.Layer`.

    Raises:
        ValueError: A `depth` under 1, a layer that is built already, or whose output has another
            shape than its input.
        NotPrunableError: A layer that holds a `PrunableLayer`: the stack is wrapped, not its layer.

    Limits: masks of padded sequences are not handed on, and neither are initial states. On torch
    the loop is one of Python, with nothing to gain. Live blocks in a stack stay where they are:
    `RigL` and `SET` do not move them.

    Example:

    >>> import keras, numpy as np
    >>> stack = ScannedStack(keras.layers.Dense(16, activation="tanh"), depth=100)
    >>> tuple(stack(np.ones((2, 16))).shape), tuple(stack.kernel.shape)
    ((2, 16), (100, 16, 16))
    """

    def __init__(self, layer: keras.layers.Layer, depth: int, **kwargs: Any) -> None:
        _check(layer, depth)
        # The layer casts its own inputs and weights.
        kwargs.setdefault("dtype", layer.variable_dtype)
        super().__init__(autocast=False, **kwargs)
        self.depth = int(depth)
        self._inside = LayersInStack(layer, self.depth)
        self.draws = True
        self.activation = getattr(layer, "activation", None)  # what follows its kernels

    @property
    def layer(self) -> Any:
        """The layer that is repeated. Its own weights are not those of any layer in the stack."""
        return self._inside.layer

    def build(self, input_shape: Any) -> None:
        """Draws the weights of all layers; with `draws = False` they are zero, to be set later."""
        _check_shapes(self.layer, tuple(input_shape))
        draws = self.draws and not are_weights_set_later()
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
            if not hasattr(type(self), name):
                setattr(self, name, weight)

    def call(self, inputs: Any) -> Any:
        """The loop."""
        spec = self.layer.compute_output_spec(keras.KerasTensor(inputs.shape, inputs.dtype))
        inside = self._inside
        added = False

        def body(carry: tuple[Any, Any], weights: list[Any], states: list[Any]) -> Any:
            nonlocal added
            outputs, states, losses = inside.call(carry[0], weights, states)
            added = added or bool(losses)
            total = sum((ops.cast(loss, "float32") for loss in losses), carry[1])
            return (ops.cast(outputs, spec.dtype), total), states

        start = (ops.cast(inputs, spec.dtype), ops.zeros((), "float32"))
        trained, others = inside.stacked()
        weights, states = ([variable.value for variable in group] for group in (trained, others))
        (outputs, loss), states = scan(body, start, weights, states)
        for variable, value in zip(others, states, strict=True):
            assign(variable, value)
        if added:
            self.add_loss(loss)
        return outputs

    def compute_output_spec(self, inputs: Any) -> Any:
        """That of the layer."""
        return self.layer.compute_output_spec(inputs)

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, ...]:
        """That of the input."""
        return tuple(input_shape)

    def unrolled(self, values: Iterable[tuple[Any, Any]] = ()) -> keras.Sequential:
        """The same function as a Sequential model of `depth` layers, built, with copies of weights.

        Over 100 layers are Sequential models of 100 in one: Keras recurs from layer to layer where
        it builds, clones or loads a model, and Python ends that at a thousand.

        Args:
            values: Pairs of a weight of the stack and a value that it is to have instead of its
                own.
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

    def stored_kernels(self) -> dict[str, StoredKernel] | None:
        """What `prunable_weights` lists where kernels in the layer are no variables themselves."""
        kept = [weight for weight in find_kernels(self.layer, "") if weight.stored is not None]
        if not kept:
            return None
        return {w.path.replace("/", "_"): StackedKernel(self._inside, w) for w in kept}

    def get_config(self) -> dict[str, Any]:
        """The layer and the depth."""
        return {**super().get_config(), "layer": unbuilt_config(self.layer), "depth": self.depth}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> "ScannedStack":
        """The reverse of `get_config`."""
        layer = keras.saving.deserialize_keras_object(config["layer"], custom_objects)
        return cls(**{**config, "layer": layer})


@kernel_layouts.register(ScannedStack)
def _stack(stack: ScannedStack) -> dict[str, KernelLayout | None]:
    found = find_kernels(stack.layer, "")
    return {
        weight.path.replace("/", "_"): stacked_layout(weight.layout, len(weight.shape))
        for weight in found
    }


def _check(layer: Any, depth: Any) -> None:
    if not is_integer(depth) or depth < 1:
        raise ValueError(f"`depth` must be an integer of at least 1. Received: depth={depth!r}")
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
            f"The layers of a ScannedStack must return what they take; '{layer.name}' makes "
            f"{output_shape} of it. Received: input of shape {input_shape}"
        )
