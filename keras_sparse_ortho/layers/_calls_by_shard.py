"""Data parallel on JAX: all-reduce the gradients of live values, not those of dense kernels."""

from collections.abc import Callable, Iterable
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import VariableOverrides, value_in_scope
from keras_sparse_ortho.parametrizations import Parametrization

L = keras.layers
# Stateless layers that map sample by sample, with samples first.
_BY_SAMPLE = (
    *(L.Dense, L.Embedding, L.DepthwiseConv1D, L.DepthwiseConv2D),
    *(L.Conv1D, L.Conv2D, L.Conv3D, L.SeparableConv1D, L.SeparableConv2D),
    *(L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose),
)


def call_by_shard(
    wrapper: Any,
    parametrizations: Iterable[Parametrization],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`call(*args, **kwargs)`, under data parallelism on JAX by `shard_map` over the samples.

    XLA all-reduces the gradient of a kernel as soon as it is computed, at its dense size, although
    only live values take part of it. Inside `shard_map` it all-reduces the gradients of the call's
    inputs instead, which are those of live values.

    Only in compiled functions, for layers of Keras that map sample by sample and whose kernels are
    all in compact storage, under `keras.distribution.DataParallel`.
    """
    distribution = keras.distribution.distribution()
    if not isinstance(distribution, keras.distribution.DataParallel) or not _can_be_split(
        wrapper.layer, parametrizations, args, kwargs, distribution
    ):
        return call(*args, **kwargs)
    import jax

    axis = distribution.batch_dim_name
    variables = wrapper.variables

    def on_one(x: Any, *values: Any) -> Any:
        # Not the same on all from here on, so that what is the same is what they came from.
        own = [jax.lax.pcast(value, axis, to="varying") for value in values]
        with VariableOverrides(zip(variables, own, strict=True)):
            return call(x, **kwargs)

    split, whole = jax.sharding.PartitionSpec(axis), jax.sharding.PartitionSpec()
    on_all = jax.shard_map(
        on_one,
        mesh=distribution.device_mesh.backend_mesh,
        in_specs=(split, *(whole for _ in variables)),
        out_specs=split,
    )
    return on_all(args[0], *(variable.value for variable in variables))


def _can_be_split(
    layer: Any,
    parametrizations: Iterable[Parametrization],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    distribution: Any,
) -> bool:
    import jax

    if not hasattr(jax.lax, "pcast"):  # before 0.8
        return False
    devices = distribution.device_mesh.backend_mesh.devices.size
    own = list(parametrizations)
    return (
        devices > 1
        and type(layer) in _BY_SAMPLE
        and layer.activity_regularizer is None
        and len(args) == 1
        and isinstance(args[0], jax.core.Tracer)
        and args[0].shape[0] % devices == 0
        and not any(keras.ops.is_tensor(argument) for argument in kwargs.values())
        and all(p.compact and value_in_scope(p.layer_variable) is None for p in own)
    )
