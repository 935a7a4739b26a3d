"""`ScannedStack`: a thousand equal layers in a row, of which one is traced.

Keras traces every layer of a model, so the networks of `thousand_mlp` and `circular_cnn` would take
hours to compile. The package has no such layer: only these two networks need one.
"""

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.initializers import KernelLayout, kernel_layouts
from keras_sparse_ortho.kernels import find_kernels
from keras_sparse_ortho.models import kernel_positions

ops = keras.ops


class _Inside:
    """A layer that Keras does not track: a call gives it the weights of one layer after another."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.stacked: list[Any] = []


class ScannedStack(keras.layers.Layer):
    """`x_(k + 1) = layer(x_k; w_k)` for `k = 0 ... depth - 1`, each with its own weights.

    Every weight `w` of the layer is one variable of shape `(depth, *w.shape)`; a kernel of the
    stack is `depth` matrices. All weights of the layer are trained; it has no state, no seeds and
    no losses. The stack cannot be saved to a `.keras` file.

    Args:
        layer: The unbuilt layer, whose output has the shape of its input.
        depth: Number of layers.
        **kwargs: As for `keras.layers.Layer`.
    """

    def __init__(self, layer: keras.layers.Layer, depth: int, **kwargs: Any) -> None:
        super().__init__(autocast=False, dtype=layer.variable_dtype, **kwargs)
        self.depth = depth
        self.activation = getattr(layer, "activation", None)  # what follows its kernels
        self._inside = _Inside(layer)

    @property
    def layer(self) -> Any:
        """The layer that is repeated. Its own weights are not those of any layer in the stack."""
        return self._inside.layer

    def build(self, input_shape: Any) -> None:
        """Draws the weights of all layers."""
        config = self.layer.get_config()
        layers = [self.layer, *(type(self.layer).from_config(config) for _ in range(1, self.depth))]
        for layer in layers:
            layer.build(input_shape)
        for k, variable in enumerate(self.layer.trainable_variables):
            drawn = np.stack([ops.convert_to_numpy(one.trainable_variables[k]) for one in layers])
            weight = self.add_weight(
                name=variable.name,
                shape=drawn.shape,
                initializer=lambda shape, dtype=None, drawn=drawn: ops.convert_to_tensor(
                    drawn, dtype
                ),
                autocast=False,
            )
            self._inside.stacked.append(weight)
            setattr(self, variable.name, weight)

    def call(self, inputs: Any) -> Any:
        variables = self.layer.trainable_variables
        weights = [weight.value for weight in self._inside.stacked]

        def body(x: Any, own: list[Any]) -> Any:
            with keras.StatelessScope(state_mapping=zip(variables, own, strict=True)):
                return ops.cast(self.layer(x), inputs.dtype)

        return _scan(body, inputs, weights, self.depth)

    def compute_output_spec(self, inputs: Any) -> Any:
        return self.layer.compute_output_spec(inputs)


def _scan(body: Any, x: Any, weights: list[Any], depth: int) -> Any:
    """`x = body(x, weights[k])` for all k. TensorFlow: `keras.ops.scan` has no gradient in XLA."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.lax.scan(lambda own, rows: (body(own, rows), None), x, weights)[0]
    if keras.backend.backend() == "torch":
        for rows in zip(*(ops.unstack(weight, depth) for weight in weights), strict=True):
            x = body(x, list(rows))
        return x
    import tensorflow as tf

    # A slice would have a gradient as large as the whole.
    arrays = [tf.TensorArray(w.dtype, depth, element_shape=w.shape[1:]).unstack(w) for w in weights]
    step = lambda k, own: (k + 1, body(own, [array.read(k) for array in arrays]))  # noqa: E731
    start = (tf.constant(0), x)
    return tf.while_loop(lambda k, _: k < depth, step, start, maximum_iterations=depth)[1]


@kernel_layouts.register(ScannedStack)
def _stack(stack: ScannedStack) -> dict[str, KernelLayout | None]:
    kernels = {id(found.variable): found for found in find_kernels(stack.layer, "")}
    pairs = zip(stack.layer.trainable_variables, stack._inside.stacked, strict=False)
    return {
        weight.name: _stacked(kernels[id(variable)].layout, len(variable.shape))
        for variable, weight in pairs
        if id(variable) in kernels
    }


def _stacked(layout: KernelLayout | None, rank: int) -> KernelLayout:
    """The layout of kernels that are stacked along a new first axis."""
    layout = KernelLayout.convolution() if layout is None else layout
    inputs, outputs = (
        tuple(axis % rank + 1 for axis in axes) for axes in (layout.inputs, layout.outputs)
    )
    return dataclasses.replace(layout, inputs=inputs, outputs=outputs, batch=(0,))


@kernel_positions.register(ScannedStack)
def _positions(stack: ScannedStack, inputs: Any, outputs: Any) -> int | None:
    (owner,) = {id(found.owner): found.owner for found in find_kernels(stack.layer, "")}.values()
    return kernel_positions(owner, inputs, outputs)
