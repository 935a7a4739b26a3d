"""Training without noise: a teacher answers without it, and a student could not learn the rest."""

import contextlib
import inspect
from collections.abc import Callable, Iterator

import keras

from keras_sparse_ortho._interception import intercepted
from keras_sparse_ortho._types import Nested
from keras_sparse_ortho.kernels import has_dropout_rates, walk

_RATES = ("dropout", "recurrent_dropout")


@contextlib.contextmanager
def without_noise(model: keras.Model) -> Iterator[None]:
    """Inside, layers without weights act as in inference, and recurrent cells drop nothing.

    Layers without weights that know whether they are trained are those of dropout, noise and
    augmentation, and stochastic depth.

    Args:
        model: Model whose layers these are.
    """
    with contextlib.ExitStack() as settings:
        for layer, _ in walk(model, ""):
            if has_dropout_rates(layer):
                settings.enter_context(_without_dropout(layer))
            elif _is_noise(layer):
                settings.enter_context(
                    intercepted(layer, "call", _as_in_inference)
                )
        yield


@contextlib.contextmanager
def with_fixed_statistics(model: keras.Model) -> Iterator[None]:
    """Inside, batch normalization acts as in inference, and its statistics stay.

    Args:
        model: Model whose layers these are.
    """
    with contextlib.ExitStack() as settings:
        for layer, _ in walk(model, ""):
            if isinstance(layer, keras.layers.BatchNormalization):
                settings.enter_context(
                    intercepted(layer, "call", _as_in_inference)
                )
        yield


def _is_noise(layer: keras.Layer) -> bool:
    if layer.weights:
        return False
    return "training" in inspect.signature(layer.call).parameters


def _as_in_inference(
    call: Callable[..., Nested], *arguments: Nested, **options: Nested
) -> Nested:
    bound = inspect.signature(call).bind(*arguments, **options)
    bound.arguments["training"] = False
    return call(*bound.args, **bound.kwargs)


@contextlib.contextmanager
def _without_dropout(cell: keras.Layer) -> Iterator[None]:
    """Inside, a cell has rates of 0: the layer around it reads them, too."""
    rates = {name: getattr(cell, name) for name in _RATES}
    for name in rates:
        setattr(cell, name, 0.0)
    try:
        yield
    finally:
        for name, rate in rates.items():
            setattr(cell, name, rate)
