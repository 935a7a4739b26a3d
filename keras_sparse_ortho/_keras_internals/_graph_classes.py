"""Functional and Sequential models of a class of their own, such as keras-hub's backbones."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras
from keras.src.models.functional import Functional as Functional

# What says how a layer computes and is saved, and may be set after its constructor.
_SETTINGS = ("_auto_config", "_dtype_policy", "_trainable")
_SET_BY_TRAINING = frozenset(
    {
        *("history", "stop_training", "_eval_epoch_iterator"),
        # By `_fit.py`.
        *("_get_metrics_result_or_logs", "_flatten_metrics_in_order", "_entries_of_logs"),
        "save_own_variables",
    }
)


def tensors_in_attributes(model: keras.Model) -> list[Any]:
    """The symbolic tensors of its graph that a model keeps in attributes of its own."""
    found: dict[int, Any] = {}

    def note(value: Any) -> Any:
        if isinstance(value, keras.KerasTensor):
            found[id(value)] = value
        return value

    for value in _own_attributes(model).values():
        _mapped(value, note)
    return list(found.values())


def layers_in_attributes(model: keras.Model) -> list[keras.layers.Layer]:
    """The layers that a model keeps in attributes of its own, in the graph or not."""
    found: dict[int, keras.layers.Layer] = {}

    def note(value: Any) -> Any:
        if isinstance(value, keras.layers.Layer):
            found[id(value)] = value
        return value

    for value in _own_attributes(model).values():
        _mapped(value, note)
    return list(found.values())


def instance_like(
    model: keras.Model,
    kind: Any,
    inputs: Any,
    outputs: Any,
    partner: Callable[[Any], Any],
) -> keras.Model:
    """A model of some class on another graph, with the attributes that an instance of it has.

    Its constructor is not called: that would make layers of its own.

    Args:
        model: The instance, a functional or Sequential model.
        kind: Its class, or one of its parents.
        inputs: The inputs of the new model.
        outputs: The outputs of the new model; not for Sequential ones, whose layers make them.
        partner: Gives what stands for a layer or a symbolic tensor of the instance.
    """
    new = kind.__new__(kind)
    if isinstance(model, keras.Sequential):
        keras.Sequential.__init__(new, [inputs, *map(partner, model.layers)], name=model.name)
    else:
        # Not `Model.__init__`, which would make a functional model of the class once more.
        Functional.__init__(new, inputs, outputs, name=model.name)
    for name in _SETTINGS:
        if name in vars(model):
            vars(new)[name] = vars(model)[name]
    for name, value in _own_attributes(model).items():
        if name in vars(new):
            continue
        if inspect.ismethod(value) and value.__self__ is model:
            value = getattr(new, value.__name__)
        elif name.endswith("_function") and callable(value):
            value = None  # made by the model from its layers, as `train_function`
        setattr(new, name, _mapped(value, partner))
    if not isinstance(model, keras.Sequential):
        order = {id(partner(layer)): place for place, layer in enumerate(model._layers)}
        new._layers.sort(key=lambda layer: order.get(id(layer), len(order)))
    return new


def _own_attributes(model: keras.Model) -> dict[str, Any]:
    """The attributes that the class of a model has set, and not Keras."""
    attributes = {**vars(model), **vars(model).get("_modules", {})}
    return {
        name: value
        for name, value in attributes.items()
        if name not in _names_of_keras() and not name.startswith("_self_")
    }


class _Compiled(keras.Model):
    """A model in which there are no attributes but those of Keras."""


@functools.cache
def _names_of_keras() -> frozenset[str]:
    inputs = keras.Input((1,), name="input")
    plain = _Compiled(inputs=inputs, outputs=inputs, name="plain")
    plain.compile(optimizer=keras.optimizers.SGD(name="sgd"))
    return frozenset(vars(plain)) | {"_functional"} | _SET_BY_TRAINING


def _mapped(value: Any, partner: Callable[[Any], Any]) -> Any:
    if isinstance(value, keras.layers.Layer | keras.KerasTensor):
        return partner(value)
    if isinstance(value, list):
        return [_mapped(item, partner) for item in value]
    if isinstance(value, tuple):
        items = [_mapped(item, partner) for item in value]
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, dict):
        return {key: _mapped(item, partner) for key, item in value.items()}
    return value
