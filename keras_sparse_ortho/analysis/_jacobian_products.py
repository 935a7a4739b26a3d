"""Products of a model's input-output Jacobian with vectors, for many samples at once."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import VariableOverrides
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import check_built

# Numbers in one batch of products: enough to fill the cores, and about 64 MiB in float32.
_LARGEST_BATCH = 2**24


class JacobianProducts:
    """`J u` and `J^T v` with `J = d output / d input` of every sample, both flattened.

    Samples do not see each other in inference, so one pass gives the product for each of them.

    Args:
        model: A built model or layer of one input and one output.
        x: Inputs of shape `(samples, ...)`, of a float type.
    """

    def __init__(self, model: Any, x: Any) -> None:
        check_built(model)
        if len(keras.tree.flatten(x)) != 1:
            raise NotPrunableError(
                "The Jacobian is that of a model of one input. "
                f"Received: {len(keras.tree.flatten(x))} inputs"
            )
        (x, *_) = keras.tree.flatten(x)
        x = x if isinstance(x, np.ndarray) else to_numpy(x)  # the backend may narrow its type
        if x.ndim < 1 or len(x) == 0 or not np.issubdtype(x.dtype, np.floating):
            raise ValueError(
                "`x` must hold float inputs, at least one sample; integers have no derivative "
                "(give the part of the model after the embedding). "
                f"Received: x of shape {x.shape} and dtype {x.dtype}"
            )
        self._model = model
        self._x = x.astype(keras.config.floatx())
        self._states = [v for v in model.variables if keras.backend.is_float_dtype(v.dtype)]
        self._apply, self._vjp, self._jvp = _compiled(self._forward)
        outputs = self._run(self._apply, self._x[:1])
        self.samples = len(x)
        self.inputs = int(np.prod(x.shape[1:], dtype=np.int64))
        self.outputs = int(np.prod(outputs.shape[1:], dtype=np.int64))
        self._output_shape = outputs.shape[1:]

    def forward(self, vectors: np.ndarray) -> np.ndarray:
        """`J u` for vectors `(samples, count, inputs)`, as `(samples, count, outputs)`."""
        return self._products(self._jvp, vectors, self._x.shape[1:])

    def backward(self, vectors: np.ndarray) -> np.ndarray:
        """`J^T v` for vectors `(samples, count, outputs)`, as `(samples, count, inputs)`."""
        return self._products(self._vjp, vectors, self._output_shape)

    def _products(self, step: Any, vectors: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        samples, count, _ = vectors.shape
        # In chunks of one size, so that what is compiled is compiled once or twice.
        at_once = max(1, _LARGEST_BATCH // (samples * max(self.inputs, self.outputs)))
        parts = []
        for start in range(0, count, at_once):
            chunk = vectors[:, start : start + at_once]
            x = np.repeat(self._x, chunk.shape[1], axis=0)
            u = chunk.reshape(-1, *shape).astype(self._x.dtype)
            parts.append(self._run(step, x, u).reshape(samples, chunk.shape[1], -1))
        return np.concatenate(parts, axis=1).astype("float64")

    def _run(self, step: Any, *arrays: np.ndarray) -> np.ndarray:
        tensors = [keras.ops.convert_to_tensor(array) for array in arrays]
        states = [variable.value for variable in self._states]
        return to_numpy(step(states, *tensors))

    def _forward(self, states: list[Any], x: Any) -> Any:
        pairs = zip(self._states, states, strict=True)
        # The outer scope takes updates, of seed states for instance, and forgets them.
        with keras.StatelessScope(), VariableOverrides(pairs):
            found = keras.tree.flatten(self._model(x, training=False))
        if len(found) != 1:
            raise NotPrunableError(
                f"The Jacobian is that of a model of one output. Received: {len(found)} outputs"
            )
        return keras.ops.cast(found[0], x.dtype)


def _compiled(forward: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """The function, its products with cotangents, and those with tangents."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        def pull(states: Any, x: Any, v: Any) -> Any:
            return jax.vjp(lambda inputs: forward(states, inputs), x)[1](v)[0]

        def push(states: Any, x: Any, u: Any) -> Any:
            # J^T v is linear in v: its own pull-back is J u. Works for every function that can be
            # trained, where forward mode asks for a rule that some do not have (live blocks).
            outputs, pulled = jax.vjp(lambda inputs: forward(states, inputs), x)
            return jax.vjp(lambda v: pulled(v)[0], jax.numpy.zeros_like(outputs))[1](u)[0]

        return jax.jit(forward), jax.jit(pull), jax.jit(push)
    if backend == "tensorflow":
        import tensorflow as tf

        def pull(states: Any, x: Any, v: Any) -> Any:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(x)
                outputs = forward(states, x)
            zero = tf.UnconnectedGradients.ZERO
            found = tape.gradient(outputs, x, output_gradients=v, unconnected_gradients=zero)
            return tf.convert_to_tensor(found)

        def push(states: Any, x: Any, u: Any) -> Any:
            # As on JAX.
            v = tf.zeros_like(forward(states, x))
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(v)
                pulled = pull(states, x, v)
            zero = tf.UnconnectedGradients.ZERO
            return tape.gradient(pulled, v, output_gradients=u, unconnected_gradients=zero)

        return tuple(tf.function(f, autograph=False) for f in (forward, pull, push))
    if backend == "torch":
        import torch

        def apply(states: Any, x: Any) -> Any:
            with torch.no_grad():
                return forward(states, x)

        def pull_back(states: Any, x: Any, v: Any, create_graph: bool = False) -> Any:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                outputs = forward([state.detach() for state in states], x)
                if not outputs.requires_grad:
                    return torch.zeros_like(x)
                graph = {"create_graph": create_graph, "allow_unused": True}
                (found,) = torch.autograd.grad(outputs, x, v, **graph)
            return torch.zeros_like(x) if found is None else found

        def push(states: Any, x: Any, u: Any) -> Any:
            with torch.enable_grad():
                v = torch.zeros_like(apply(states, x)).requires_grad_()
                pulled = pull_back(states, x, v, create_graph=True)
                if not pulled.requires_grad:
                    return torch.zeros_like(v)
                (found,) = torch.autograd.grad(pulled, v, u, allow_unused=True)
            return torch.zeros_like(v) if found is None else found

        return apply, pull_back, push
    raise NotImplementedError(
        f"Jacobians need TensorFlow, JAX or torch. Received: Keras backend {backend!r}"
    )
