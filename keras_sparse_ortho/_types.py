"""Names for values of Keras and its backends that have no public type."""

from collections.abc import Callable
from typing import Any, TypeAlias

Tensor: TypeAlias = Any
"""A tensor of the backend (`tf.Tensor`, `jax.Array`, `torch.Tensor`), or a symbolic one."""

TensorLike: TypeAlias = Any
"""An argument of `keras.ops.convert_to_tensor`: a tensor, variable, array or number."""

AnyLayer: TypeAlias = Any
"""A layer, model or operation of Keras 3 or of tf_keras, which has no types."""

Nested: TypeAlias = Any
"""A tensor, or a structure of tensors (`keras.tree`), as models take and return."""

Config: TypeAlias = dict[str, Any]
"""JSON values, as `get_config` returns them."""

Optimizer: TypeAlias = Any
"""An optimizer of Keras or of `torch.optim`."""

AddWeight: TypeAlias = Callable[..., Any]
"""`Layer.add_weight`, or a function with its arguments: it creates a variable."""
