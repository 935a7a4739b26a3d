"""Wrapping the layers that hold given weights, in a whole model."""

from collections.abc import Callable, Container, Mapping
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.layers import PrunableLayer
from keras_sparse_ortho.models import Replacement, rewrite
from keras_sparse_ortho.parametrizations import Parametrization


def wrap(
    model: Any,
    weights: list[PrunableWeight],
    table: Mapping[str, Parametrization],
    kernels: Mapping[str, np.ndarray] | None = None,
    drawn: Container[str] = (),
) -> Any:
    """Wraps every outermost layer that holds some of the weights.

    Args:
        model: The model.
        weights: Its weights that get a parametrization.
        table: The parametrization, not built, for each path.
        kernels: Values to set by path; the other weights keep theirs.
        drawn: Paths whose parametrization sets the weight itself when it is built.
    """
    kernels = kernels or {}

    def replace(layer: Any, path: str, copy: Callable[[Any], Any]) -> Replacement | None:
        inside = [w.path for w in weights if w.path.startswith(f"{path}/")]
        if not inside:
            return None
        inner = copy(layer)
        keys = {full.removeprefix(f"{path}/"): full for full in inside}
        wrapper = PrunableLayer(inner, {key: table[full] for key, full in keys.items()})

        def finish() -> None:
            if not wrapper.built:
                wrapper.build()  # around a layer of a class-written model, which is built
            made = wrapper.parametrizations
            own = {id(p.weight.variable) for key, p in made.items() if keys[key] in drawn}
            for old, new in zip(layer.weights, inner.weights, strict=True):
                if old is not new and id(new) not in own:
                    # A copy: on JAX `fit` frees the arrays of its model, which may not be shared.
                    new.assign(keras.ops.copy(old))
            for key, parametrization in made.items():
                if keys[key] in kernels:
                    parametrization.weight.variable.assign(kernels[keys[key]])
                parametrization.settle()

        return Replacement(wrapper, finish)

    return rewrite(model, replace)
