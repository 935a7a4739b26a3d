"""What a `PrunableLayer` knows of its weights."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import DeferredVariables, is_overridden
from keras_sparse_ortho.kernels import PrunableWeight, Selection, walk
from keras_sparse_ortho.layers._recorded_draws import RecordedDraws
from keras_sparse_ortho.parametrizations import Parametrization, refuse_compact


class WrapperState:
    """Hides references from Keras' tracking, which would save every kernel twice."""

    def __init__(self, template: Any, selection: Selection) -> None:
        self.template = template
        self.selection = selection
        self.parametrized: dict[str, Parametrization] = {}
        self.shared: dict[str, Any] = {}
        self.draws: RecordedDraws | None = None
        self.deferred = DeferredVariables()
        self.layer_weights: list[Any] = []
        self.names: list[str] = []
        self.follow: frozenset[str] = frozenset()
        self._uncover: Callable[[], Any] = dict

    def creating(self, layer: Any) -> AbstractContextManager[None]:
        """Inside, a layer creates its variables without values, if some are to get none, or others.

        A kernel that is not stored, or set later, is not to be allocated, drawn or filled before.
        """
        given = self.template.values() if isinstance(self.template, dict) else [self.template]
        defers = self.follow or any(parametrization.compact for parametrization in given)
        return self.deferred.creating() if defers and not layer.built else nullcontext()

    def initialize(
        self, weights: list[PrunableWeight], parametrizations: Mapping[str, Parametrization]
    ) -> None:
        """Gives the variables of the layer values, but for weights that get none here.

        Raises:
            NotPrunableError: A weight that cannot be stored compactly.
        """
        compact = [weight for weight in weights if parametrizations[weight.path].compact]
        for weight in compact:
            refuse_compact(weight)
        following = [weight.variable for weight in weights if weight.path in self.follow]
        self.deferred.leave_empty(following)
        self.deferred.initialize(but=[*following, *(weight.variable for weight in compact)])

    def forget_given(self) -> None:
        """Lets go of arrays in the templates: masks that were given are in variables now."""
        if isinstance(self.template, dict):
            self.template = {key: own.without_given() for key, own in self.template.items()}

    def cover(self, layer: Any, scope: Callable[[], AbstractContextManager[None]]) -> None:
        """Lets a layer compute with effective weights also where it is not called by its wrapper.

        Something that Keras does not see, such as a function, may hold it as well.
        """
        call = layer.call

        @functools.wraps(call)
        def covered(*args: Any, **kwargs: Any) -> Any:
            held = [own.layer_variable for own in self.parametrized.values()]
            if not held or is_overridden(held[0]):
                return call(*args, **kwargs)
            with scope():
                return call(*args, **kwargs)

        # Not by setattr, with which Keras and its backends look at what is set.
        vars(layer)["call"] = covered
        self._uncover = functools.partial(vars(layer).pop, "call", None)

    def clear_dead(self) -> None:
        """Sets dead entries of raw weights to zero, wherever an optimizer has moved them."""
        for parametrization in self.parametrized.values():
            parametrization.clear_dead()

    def let_go(self) -> None:
        """Takes the parametrizations from their weights."""
        self._uncover()
        for parametrization in self.parametrized.values():
            parametrization.release()
        self.parametrized.clear()

    def rename(self, layer: Any) -> None:
        """Gives a layer and those inside it their known names, once all of them are there."""
        layers = [inner for inner, _ in walk(layer, "")]
        if len(layers) == len(self.names):
            for inner, name in zip(layers, self.names, strict=True):
                inner.name = name


def names_in(layer: Any) -> list[str]:
    """The names of a layer and of those inside it, in the order of `walk`."""
    return [inner.name for inner, _ in walk(layer, "")]


def restored(
    config: dict[str, Any], custom_objects: dict[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """The arguments of a wrapper from its configuration, and the names in its layer.

    Raises:
        ValueError: Not the configuration of a wrapper.
    """

    def restore(value: Any) -> Any:
        return keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)

    given = dict(config)
    names = given.pop("layer_names", [])
    found = given.get("parametrization")
    named = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if "layer" not in given or not isinstance(found, dict) or not named:
        raise ValueError(
            "The configuration of a PrunableLayer holds its `layer`, its `parametrization`, which "
            "is a dict, and perhaps `weights` and a list of `layer_names`: the file was written by "
            f"something else, or is damaged. Received: { {k: type(v) for k, v in config.items()} }"
        )
    single = "class_name" in found
    given["parametrization"] = restore(found) if single else {k: restore(found[k]) for k in found}
    for key in ("layer", "weights"):
        if isinstance(given.get(key), dict):
            given[key] = restore(given[key])
    return given, names


def checked(parametrization: Any) -> Any:
    """A parametrization or dict of them, as given to a wrapper."""
    if isinstance(parametrization, Mapping):
        if parametrization and all(
            isinstance(value, Parametrization) for value in parametrization.values()
        ):
            return dict(parametrization)
    elif isinstance(parametrization, Parametrization):
        return parametrization
    raise ValueError(
        "`parametrization` must be a Parametrization, or a dict from weight name to one. "
        f"Received: parametrization={parametrization!r}"
    )
