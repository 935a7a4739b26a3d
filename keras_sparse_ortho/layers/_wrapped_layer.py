"""The layer inside a wrapper: which are refused, what is drawn, shown, and called."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import (
    VariableOverrides,
    in_stateless_scope,
    value_in_scope,
)
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import KernelLayout, SparseInitializer
from keras_sparse_ortho.kernels import (
    initializer_attribute,
    is_sparse_layer,
    is_wrapper,
    kernel_layouts,
    walk,
)

L = keras.layers
_BY_SAMPLE: set[type] = set()


def register_by_sample(kind: type) -> None:
    """Notes that a class of layers, not those derived from it, maps sample by sample.

    Its layers are stateless, and samples come first. Under data parallelism on JAX, those in
    compact storage are called on each device by itself.
    """
    _BY_SAMPLE.add(kind)


def refuse_unwrappable(
    layer: keras.layers.Layer, *, around_others: bool = False
) -> None:
    """Raises for a layer whose weights cannot be replaced in a call, `around_others` that are."""
    for inner, path in walk(layer, layer.name):
        reason = None
        if is_wrapper(inner):
            if around_others and inner is not layer:
                continue
            reason = "it is wrapped already"
        elif is_sparse_layer(inner):
            reason = "it holds its live blocks only. Strip it first, then wrap the plain layer"
        elif isinstance(inner, keras.layers.SpectralNormalization):
            reason = "SpectralNormalization assigns its kernel in every call"
        elif getattr(inner, "lora_enabled", False):
            reason = "LoRA is enabled. Prune first, strip, and enable LoRA on the plain model"
        elif getattr(inner, "quantization_mode", None) is not None:
            reason = "it is quantized. Prune first, strip, then quantize"
        if reason:
            raise NotPrunableError(
                f"The layer {path!r} cannot be wrapped: {reason}. "
                f"Received: layer={inner.__class__.__name__}"
            )


def refuse_dense_updates(layer: keras.layers.Layer) -> Callable[[], None]:
    """Lets a layer with a parametrized weight refuse `quantize` and `enable_lora`; undoes it."""
    names = ("quantize", "enable_lora")
    # Keras wraps them.
    methods = {name: vars(layer)[name] for name in names if name in vars(layer)}

    def refusing(name: str) -> Callable[..., None]:
        def refused(*args: Any, **kwargs: Any) -> None:
            raise no_dense_update(layer, name, "while it is wrapped")

        return refused

    # Bypass `__setattr__`: Keras would track the value.
    vars(layer).update({name: refusing(name) for name in names})

    def undo() -> None:
        for name in names:
            vars(layer).pop(name, None)
        vars(layer).update(methods)

    return undo


def no_dense_update(
    layer: keras.layers.Layer, name: str, why: str = "without a dense kernel"
) -> Exception:
    """The error of `quantize` and `enable_lora` for a layer without a plain dense kernel."""
    # Keras' own type: `Model.quantize` warns of such layers, and leaves them as they are.
    kind: type[Exception] = NotImplementedError
    what = f"The layer {layer.name!r} cannot be quantized"
    if name != "quantize":
        kind, what = (
            NotPrunableError,
            f"LoRA cannot be enabled on {layer.name!r}",
        )
    return kind(
        f"{what} {why}. Strip the model first (keras_sparse_ortho.strip). "
        f"Received: {name} of {type(layer).__name__}"
    )


def plain_layer(layer: keras.layers.Layer) -> Any:
    """The plain layer, built, for one with kernels in storages; `None` for a plain one."""
    return layer.to_dense_layer() if is_sparse_layer(layer) else None


def variable_dtype(layer: keras.layers.Layer) -> str:
    policy = getattr(layer, "dtype_policy", None)
    if not isinstance(policy, keras.dtype_policies.DTypePolicy):
        raise ValueError(
            f"The layer {layer.name!r} must have a dtype policy of Keras. Received: dtype={policy}"
        )
    return str(layer.variable_dtype)


class Recorder:
    """Draws as a sparse initializer does, along the axes of the layer, and keeps the mask."""

    def __init__(
        self, initializer: SparseInitializer, layout: KernelLayout | None
    ) -> None:
        self.initializer = initializer
        self.layout = layout if initializer.layout is None else None
        # By shape: an initializer of several weights gives the same values for a shape.
        self.masks: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        # In a scope that only traces, Keras asks for a placeholder each time the value is read.
        if in_stateless_scope():
            return keras.ops.zeros(shape, dtype=dtype)
        kernel, mask = self.initializer.sample(shape, dtype, self.layout)
        self.masks[tuple(shape)] = mask
        return keras.ops.convert_to_tensor(kernel)


@contextlib.contextmanager
def recorded_draws(
    layer: keras.layers.Layer,
) -> Iterator[dict[tuple[int, str | None], Recorder]]:
    """Records, by layer and attribute, what sparse initializers of an unbuilt layer draw."""
    # Variables that are initialized later (Keras only traces shapes) keep the recorders until then.
    draws: dict[tuple[int, str | None], Recorder] = {}
    with contextlib.ExitStack() as stack:
        for inner, _ in walk(layer, ""):
            if inner.built:
                continue
            layouts = {
                initializer_attribute(inner, name): layout
                for name, layout in kernel_layouts(inner).items()
            }
            for attribute, value in list(vars(inner).items()):
                # Private ones are patterns, of which layers such as MultiHeadAttention make copies.
                is_own = attribute.endswith(
                    "_initializer"
                ) and not attribute.startswith("_")
                if is_own and isinstance(value, SparseInitializer):
                    recorder = Recorder(value, layouts.get(attribute))
                    draws[id(inner), attribute] = recorder
                    stack.callback(setattr, inner, attribute, value)
                    setattr(inner, attribute, recorder)
        yield draws


class ShownLayer:
    """A wrapped layer, or one inside it, as it is read through the wrapper."""

    # It shows the `effective` tensors by `id` of the variable. Methods, and layers inside, also in
    # lists, tuples and dicts, compute in a `scope` with them.

    def __init__(
        self,
        layer: keras.layers.Layer,
        effective: Mapping[int, Callable[[], Any]],
        scope: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._shown = layer, effective, scope

    def __getattr__(self, name: str) -> Any:
        return self._show(getattr(self._shown[0], name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, _, scope = self._shown
        with scope():
            return layer(*args, **kwargs)

    def _show(self, value: Any) -> Any:
        """A value of the inner layer, with effective weights in the place of raw ones."""
        layer, effective, scope = self._shown
        if isinstance(value, keras.Variable):
            return effective[id(value)]() if id(value) in effective else value
        if isinstance(value, keras.layers.Layer):
            masked = any(
                id(variable) in effective for variable in value.variables
            )
            return ShownLayer(value, effective, scope) if masked else value
        if inspect.ismethod(value) and value.__self__ is layer:

            @functools.wraps(value)
            def method(*args: Any, **kwargs: Any) -> Any:
                with scope():
                    return value(*args, **kwargs)

            return method
        if isinstance(value, dict):
            table = {key: self._show(item) for key, item in value.items()}
            return (
                table
                if any(table[key] is not item for key, item in value.items())
                else value
            )
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            items = [self._show(item) for item in value]
            if any(
                item is not original
                for item, original in zip(items, value, strict=True)
            ):
                return tuple(items) if isinstance(value, tuple) else items
        return value


def call_by_shard(
    wrapper: Any,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`call(*args, **kwargs)`, under data parallelism on JAX by `shard_map` over the samples."""
    # Outside of `shard_map` XLA all-reduces dense gradients, inside those of live values. Only in
    # compiled functions, for layers of Keras that map sample by sample with all kernels in compact
    # storage, under `keras.distribution.DataParallel`.
    distribution = keras.distribution.distribution()
    if not isinstance(distribution, keras.distribution.DataParallel):
        return call(*args, **kwargs)
    import jax

    mesh = distribution.device_mesh.backend_mesh
    if not _can_be_split(wrapper, args, kwargs, mesh.devices.size):
        return call(*args, **kwargs)
    axis, variables = distribution.batch_dim_name, wrapper.variables

    def on_one(x: Tensor, *values: Any) -> Any:
        # Values may differ between devices from here on; those they came from do not.
        own_values = [
            jax.lax.pcast(value, axis, to="varying") for value in values
        ]
        with VariableOverrides(zip(variables, own_values, strict=True)):
            return call(x, **kwargs)

    split, replicated = (
        jax.sharding.PartitionSpec(axis),
        jax.sharding.PartitionSpec(),
    )
    specs = (split, *(replicated for _ in variables))
    on_all = jax.shard_map(on_one, mesh=mesh, in_specs=specs, out_specs=split)
    return on_all(args[0], *(variable.value for variable in variables))


def _can_be_split(
    wrapper: Any, args: Any, kwargs: dict[str, Any], devices: int
) -> bool:
    """Whether a call can be divided among devices by samples."""
    import jax

    layer, storages = wrapper.layer, wrapper.storages().values()
    return (
        hasattr(jax.lax, "pcast")  # since 0.8
        and devices > 1
        and type(layer) in _BY_SAMPLE
        and layer.activity_regularizer is None
        and len(args) == 1
        and isinstance(args[0], jax.core.Tracer)
        and args[0].shape[0] % devices == 0
        and not any(
            keras.ops.is_tensor(argument) for argument in kwargs.values()
        )
        and all(
            p.compact and value_in_scope(p.layer_variable) is None
            for p in storages
        )
    )
