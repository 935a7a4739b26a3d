"""`PrunableLayer`: any Keras layer with parametrized weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._keras_internals import (
    DeferredVariables,
    VariableOverrides,
    WrapperBuiltByCalls,
    along_kernel,
    check_given,
    create_along,
    own_variables,
    restored,
    track_variable,
)
from keras_sparse_ortho._values import assign, check_layouts, to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    Selection,
    find_kernels,
    initializer_attribute,
    names_in,
    select,
    walk,
)
from keras_sparse_ortho.layers._wrapped_layer import (
    Recorder,
    ShownLayer,
    call_by_shard,
    recorded_draws,
    refuse_dense_updates,
    refuse_unwrappable,
    variable_dtype,
)
from keras_sparse_ortho.parametrizations import (
    FakeQuantization,
    FixedMask,
    LearntThreshold,
    LowRankSoftThreshold,
    Parametrization,
    checked_quantizer,
    refuse_compact,
)

_SPARSE = "`parametrization`: FixedMask(density), or MagnitudeMask(schedule)"


class _State:
    """A wrapper's record of its weights, hidden from Keras, which would save kernels twice."""

    def __init__(self, template: Any, selection: Selection) -> None:
        self.template = template
        self.selection = selection
        self.from_file = False
        self.parametrized: dict[str, Parametrization] = {}
        self.shared: dict[str, Any] = {}
        self.draws: dict[tuple[int, str | None], Recorder] | None = None
        self.deferred = DeferredVariables()
        self.layer_weights: list[Any] = []
        self.undo: list[Callable[[], None]] = []
        self.names: list[str] = []
        self.quantizer: FakeQuantization | None = None

    def creating(self, layer: Any) -> contextlib.AbstractContextManager[None]:
        """Creates variables without values: a kernel that is not stored is never allocated."""
        given = self.template.values() if isinstance(self.template, dict) else [self.template]
        defers = any(own.compact for own in given) and not layer.built
        return self.deferred.creating() if defers else contextlib.nullcontext()

    def choose(self, found: list[PrunableWeight]) -> list[PrunableWeight]:
        named = isinstance(self.template, dict)
        selection: Selection = list(self.template) if named else self.selection
        if (named or self.from_file) and selection is not None and not callable(selection):
            # Exact names: a file could hold a regular expression that Python never finishes.
            selection = [re.escape(name) for name in names_in(selection) or []]
        return select(found, selection, "parametrization" if named else "weights")

    def detach(self) -> None:
        for parametrization in self.parametrized.values():
            parametrization.release()
        self.parametrized.clear()
        for undo in self.undo:
            undo()
        self.undo.clear()


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class PrunableLayer(WrapperBuiltByCalls):
    """Wraps a layer so that it uses the effective weights of a parametrization.

    While the layer runs, it sees `w_e = parametrization(w)` where it reads `w`. So any layer can be
    wrapped (Dense, convolutions, recurrent layers, Bidirectional, TimeDistributed,
    MultiHeadAttention, blocks of layers), gradients are those of the effective weight, and moving
    averages, seed states and losses work as before.

    Args:
        layer: Layer, built or not. Its weights are kept.
        parametrization: Parametrization, a template for every weight, or dict of them by weight
            name (`"kernel"`, or `"query/kernel"` below the layer). Default: `FixedMask()`, which
            adopts the mask of the layer's initializer.
        weights: Selection of weights, where `parametrization` is no dict: names or regular
            expressions relative to the layer (one or a list), or a predicate of a `PrunableWeight`.
            Default: all kernels and embeddings that
            `keras_sparse_ortho.initializers.kernel_layouts` knows.
        quantizer: FakeQuantization of the effective weights; see `quantize_aware`. Default: none.
        name: str. Default: the name of the layer.
        **kwargs: As for `keras.layers.Layer`.

    Raises NotPrunableError for a layer without kernels, one that is wrapped or quantized already,
    one with LoRA, and SpectralNormalization.

    Limits: the cell of a `keras.layers.RNN` cannot be wrapped by itself; wrap the RNN layer.

    Examples:
        >>> import keras
        >>> from keras_sparse_ortho.initializers import ExactOrthogonal
        >>> dense = keras.layers.Dense(32, kernel_initializer=ExactOrthogonal(0.1, seed=0))
        >>> model = keras.Sequential([keras.Input((64,)), PrunableLayer(dense)])
        >>> model.layers[0].prunable_weights
        [<dense/kernel shape=(64, 32), density=0.100098>]
    """

    transparent_path = True

    @other_keywords(density=_SPARSE, sparsity=_SPARSE)
    def __init__(
        self,
        layer: keras.layers.Layer,
        parametrization: Parametrization | Mapping[str, Parametrization] | None = None,
        *,
        weights: Selection = None,
        quantizer: FakeQuantization | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(layer, keras.layers.Layer):
            raise NotPrunableError(f"PrunableLayer wraps a Keras 3 layer. Received: {layer=}")
        named = isinstance(parametrization, Mapping)
        refuse_unwrappable(layer, around_others=named)
        kwargs.setdefault("dtype", variable_dtype(layer))  # the inner layer casts by itself
        kwargs.setdefault("trainable", layer.trainable)
        super().__init__(layer, name=name or layer.name, **kwargs)
        if parametrization is None:
            parametrization = FixedMask()
        if named and weights is not None:
            raise ValueError(
                "`weights` says for which weights one parametrization is used; a dict of "
                f"parametrizations names them itself. Received: weights={weights!r}"
            )
        self._state = _State(_checked(parametrization), weights)
        self._state.quantizer = None if quantizer is None else checked_quantizer(quantizer)

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Inside, kernels are drawn once, with their masks, and along the axes of the layer."""
        check_layouts()
        with (
            super().building(),
            recorded_draws(self.layer) as draws,
            self._state.creating(self.layer),
        ):
            yield
        self._state.draws = draws if self._state.draws is None else self._state.draws

    def build(self, input_shape: Any = None) -> None:
        with self.building():
            super().build(input_shape)
        template = self._state.template
        refuse_unwrappable(self.layer, around_others=isinstance(template, dict))
        inside = [layer for layer, _ in walk(self.layer, "")]
        if len(inside) == len(self._state.names):
            for layer, name in zip(inside, self._state.names, strict=True):
                layer.name = name
        found = _wrappable_weights(self.layer, unregistered=isinstance(template, dict))
        chosen = self._state.choose(found)
        if not chosen:
            raise NotPrunableError(
                f"The layer '{self.layer.name}' has no kernel that could be wrapped (biases and "
                "normalization weights are not). Register its kernels with "
                "keras_sparse_ortho.initializers.kernel_layouts. "
                f"Received: layer={self.layer.__class__.__name__}"
            )
        draws = self._state.draws
        assert draws is not None
        own = {w.path: template[w.path] if isinstance(template, dict) else template for w in chosen}
        try:
            compact = [weight for weight in chosen if own[weight.path].compact]
            for weight in compact:
                refuse_compact(weight)
            self._state.deferred.initialize(but=[weight.variable for weight in compact])
            self._state.layer_weights = list(self.layer.weights)
            for weight in chosen:
                attribute = initializer_attribute(weight.owner, weight.variable.name)
                if recorder := draws.get((id(weight.owner), attribute)):
                    mask = functools.partial(recorder.masks.__getitem__, weight.shape)
                    weight = dataclasses.replace(weight, drawn_mask=mask)
                self._parametrize(weight, own[weight.path].clone())
            if self._state.quantizer is not None:
                self.set_quantizer(self._state.quantizer)
        except Exception:
            self._state.detach()
            self._state.deferred.initialize(but=[])
            raise
        self._state.draws = None
        if isinstance(template, dict):  # masks that were given are in variables now
            held = self._state.parametrized
            self._state.template = {key: made.clone() for key, made in held.items()}
        owners = {id(weight.owner): weight.owner for weight in chosen}
        self._state.undo += [refuse_dense_updates(owner) for owner in owners.values()]

    def _parametrize(self, weight: PrunableWeight, parametrization: Parametrization) -> None:
        prefix = weight.path.replace("/", "_")

        def add_weight(name: str, shared: bool = False, **kwargs: Any) -> Any:
            if shared and name in self._state.shared:
                return self._state.shared[name]
            name_of_own = name if shared else f"{prefix}_{name}"
            made = create_along(
                lambda: self.add_weight(name=name_of_own, **kwargs),
                along_kernel(kwargs["shape"], weight.variable),
            )
            track_variable(self, made)
            if shared:
                self._state.shared[name] = made
            return made

        full_path = f"{self.layer.name}/{weight.path}"
        parametrization.build(dataclasses.replace(weight, path=full_path), add_weight)
        self._state.parametrized[weight.path] = parametrization

    def set_quantizer(self, quantizer: FakeQuantization) -> None:
        for own in self._state.parametrized.values():
            if isinstance(own, LowRankSoftThreshold):
                raise NotPrunableError(
                    f"The weight '{own.weight.path}' is a product of two factors, whose integers "
                    "would be lost when it is stripped. Leave it out. "
                    f"Received: {type(own).__name__}"
                )
            own.quantizer = quantizer
        self._state.quantizer = quantizer

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return call_by_shard(self, self._call_layer, args, kwargs)

    def _call_layer(self, *args: Any, **kwargs: Any) -> Any:
        with self._effective_weights(after=args):
            return self.layer(*args, **kwargs)

    @contextlib.contextmanager
    def _effective_weights(self, after: Any = None) -> Iterator[None]:
        """Inside, the layer has its effective weights, made when inputs `after` are there."""
        held = self._state.parametrized.values()
        pairs = [(own.layer_variable, own.current(after)) for own in held]
        with VariableOverrides(pairs) as scope:
            yield
        for loss in scope.losses:
            self.add_loss(loss)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the layer inside: `units`, `kernel` (its effective value), methods."""
        inherited = getattr(super(), "__getattr__", None)  # where torch has submodules
        if inherited is not None:
            with contextlib.suppress(AttributeError):
                return inherited(name)
        if name.startswith("_") or name == "layer" or "_state" not in vars(self):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if name in ("mask", "masks") and not hasattr(self.layer, name):
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute '{name}'. "
                "Use: {w.path: w.mask for w in prunable_weights(layer)}"
            )
        held = self._state.parametrized.values()
        effective = {id(own.layer_variable): own.current for own in held}
        return getattr(ShownLayer(self.layer, effective, self._effective_weights), name)

    @property
    def parametrizations(self) -> dict[str, Parametrization]:
        """The parametrizations by weight name; empty before the layer is built."""
        return dict(self._state.parametrized)

    def get_weights(self) -> list[Any]:
        """The values of the layer's weights in its order, then masks and thresholds."""
        return [to_numpy(variable) for variable in self._in_order_of_layer()]

    def set_weights(self, weights: list[Any]) -> None:
        """The reverse of `get_weights`; nothing is set if an array does not fit."""
        known = self._in_order_of_layer()
        check_given(known, weights)
        given = {id(variable): value for variable, value in zip(known, weights, strict=False)}
        more = weights[len(given) :]  # refused by Keras, as too few are
        super().set_weights([*(given[id(v)] for v in self.weights if id(v) in given), *more])

    def _in_order_of_layer(self) -> list[Any]:
        inside = self.layer.weights
        held = {id(variable) for variable in inside}
        return [*inside, *(own for own in self.weights if id(own) not in held)]

    @property
    def layer_weights(self) -> list[Any]:
        """The weights of the layer inside; those in compact storage have no value."""
        return list(self._state.layer_weights)

    @property
    def prunable_weights(self) -> list[PrunableWeight]:
        held = self._state.parametrized.values()
        return [dataclasses.replace(own.weight, storage=own) for own in held]

    def save_own_variables(self, store: Any) -> None:
        """As every layer does; dead entries of the raw weights are zero in the file."""
        for parametrization in self._state.parametrized.values():
            parametrization.clear_dead()
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """As every layer does; files of earlier releases lack the masks of frozen thresholds."""
        thresholds = [
            own for own in self._state.parametrized.values() if isinstance(own, LearntThreshold)
        ]
        masks = {id(own.frozen_mask) for own in thresholds}
        variables = own_variables(self)
        older = [variable for variable in variables if id(variable) not in masks]
        if not masks or len(store.keys()) != len(older):
            super().load_own_variables(store)
            return
        for number, variable in enumerate(older):
            assign(variable, store[str(number)])

    def release(self) -> None:
        """Leaves the layer its effective weights, as variables of its own; the wrapper may go."""
        for parametrization in self._state.parametrized.values():
            parametrization.materialize()
        self._state.detach()

    def storages(self) -> dict[str, Parametrization]:
        return self.parametrizations

    def to_dense_layer(self) -> Any:
        """Releases the layer inside, which then has the effective weights."""
        self.release()
        return self.layer

    def wrapper_config(self) -> dict[str, Any]:
        """The settings, and the names in the layer, which its own configuration may lack."""
        table = self._state.parametrized or self._state.template
        serialize = keras.saving.serialize_keras_object
        config = keras.layers.Layer.get_config(self)
        if isinstance(table, dict):
            config["parametrization"] = {key: serialize(value) for key, value in table.items()}
            config["weights"] = None
        else:
            config["parametrization"] = serialize(table)
            selection = self._state.selection
            config["weights"] = serialize(selection) if callable(selection) else selection
        if self._state.quantizer is not None:
            config["quantizer"] = serialize(self._state.quantizer)
        config["layer_names"] = (
            [inner.name for inner, _ in walk(self.layer, "")] if self.built else self._state.names
        )
        return config

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> PrunableLayer:
        given, names = _restored(config, custom_objects)
        wrapper = cls(**given)
        wrapper._state.names, wrapper._state.from_file = names, True
        return wrapper


def _restored(
    config: dict[str, Any], custom_objects: dict[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    restore = functools.partial(restored, custom_objects=custom_objects)
    given = dict(config)
    names = given.pop("layer_names", [])
    found = given.get("parametrization")
    weights = given.get("weights")
    if (
        "layer" not in given
        or not isinstance(found, dict)
        or not _are_names(names)
        or not (weights is None or isinstance(weights, str | dict) or _are_names(weights))
    ):
        raise ValueError(
            "The configuration of a PrunableLayer holds its `layer`, its `parametrization`, which "
            "is a dict, and perhaps names of `weights` and `layer_names`: the file was written by "
            f"something else, or is damaged. Received: { {k: type(v) for k, v in config.items()} }"
        )
    single = "class_name" in found
    given["parametrization"] = restore(found) if single else {k: restore(found[k]) for k in found}
    for key in ("layer", "weights"):
        if isinstance(given.get(key), dict):
            given[key] = restore(given[key])
    return given, names


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def _checked(parametrization: Any) -> Any:
    named = isinstance(parametrization, Mapping)
    values = list(parametrization.values()) if named else [parametrization]
    if not values or not all(isinstance(value, Parametrization) for value in values):
        raise ValueError(
            "`parametrization` must be a Parametrization, or a dict from weight name to one. "
            f"Received: parametrization={parametrization!r}"
        )
    return dict(parametrization) if named else parametrization


def _wrappable_weights(layer: Any, *, unregistered: bool) -> list[PrunableWeight]:
    """The kernels (and, if `unregistered`, matrices) in a layer that no wrapper inside it holds."""
    held = {
        id(weight.variable)
        for wrapper, _ in walk(layer, "")
        if hasattr(wrapper, "transparent_path")
        for weight in wrapper.prunable_weights
    }
    found = find_kernels(layer, "", unregistered=unregistered)
    return [weight for weight in found if id(weight.variable) not in held]
