"""`PrunableLayer`: any Keras layer with parametrized weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._foreign_names import unknown_attribute
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
from keras_sparse_ortho._types import Config, Nested
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho._workers import check_layouts
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import (
    LayerWrapper,
    PrunableWeight,
    Selection,
    SparseLayer,
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

Template = Parametrization | dict[str, Parametrization]
"""A parametrization for all weights of a layer, or one for each by name."""

Quantizers = FakeQuantization | dict[str, FakeQuantization]
"""A quantizer for all weights of a layer, or one for each by name."""

Draws = dict[tuple[int, str | None], Recorder]
"""The draws of sparse initializers, by `id` of the layer and attribute."""


class _State:
    """A wrapper's record of its weights, hidden from Keras, which would save kernels twice.

    Args:
        template: Template that the wrapper was made with.
        selection: Selection of weights for a template of all.
        quantizer: Quantizers, or `None`.
    """

    def __init__(
        self,
        template: Template,
        selection: Selection,
        quantizer: Quantizers | None,
    ) -> None:
        self.template = template
        self.selection = selection
        self.quantizer = quantizer
        self.is_from_file = False
        self.layer_names: list[str] = []
        self.parametrizations: dict[str, Parametrization] = {}
        self.shared_variables: dict[str, keras.Variable] = {}
        self.draws: Draws | None = None
        self.deferred = DeferredVariables()
        self.layer_weights: list[keras.Variable] = []
        self.undo_functions: list[Callable[[], None]] = []

    @property
    def names_weights(self) -> bool:
        """Whether the template has a parametrization for each weight by name."""
        return isinstance(self.template, dict)

    def template_for(self, weight: PrunableWeight) -> Parametrization:
        if isinstance(self.template, dict):
            return self.template[weight.path]
        return self.template

    def creating(
        self, layer: keras.layers.Layer
    ) -> contextlib.AbstractContextManager[None]:
        """Creates variables without values: a kernel that is not stored is never allocated."""
        templates = (
            list(self.template.values())
            if isinstance(self.template, dict)
            else [self.template]
        )
        if not layer.built and any(template.compact for template in templates):
            return self.deferred.creating()
        return contextlib.nullcontext()

    def choose(self, weights: list[PrunableWeight]) -> list[PrunableWeight]:
        """The weights that the template is for."""
        if isinstance(self.template, dict):
            exact_names = [re.escape(name) for name in self.template]
            return select(weights, exact_names, "parametrization")
        selection = self.selection
        if (
            self.is_from_file
            and selection is not None
            and not callable(selection)
        ):
            # Exact names: a file could hold a regular expression that Python never finishes.
            selection = [
                re.escape(str(name)) for name in names_in(selection) or []
            ]
        return select(weights, selection, "weights")

    def detach(self) -> None:
        """Removes all parametrizations and gives the layer its methods back."""
        for parametrization in self.parametrizations.values():
            parametrization.release()
        self.parametrizations.clear()
        for undo in self.undo_functions:
            undo()
        self.undo_functions.clear()


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class PrunableLayer(SparseLayer, LayerWrapper, WrapperBuiltByCalls):
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
        quantizer: FakeQuantization of the effective weights, or a dict of them by weight name; see
            `quantize_aware`. Default: none.
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

    @other_keywords
    def __init__(
        self,
        layer: keras.layers.Layer,
        parametrization: Parametrization
        | Mapping[str, Parametrization]
        | None = None,
        *,
        weights: Selection = None,
        quantizer: FakeQuantization
        | Mapping[str, FakeQuantization]
        | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(layer, keras.layers.Layer):
            raise NotPrunableError(
                f"PrunableLayer wraps a Keras 3 layer. Received: {layer=}"
            )
        is_named = isinstance(parametrization, Mapping)
        refuse_unwrappable(layer, around_others=is_named)
        # The inner layer casts by itself.
        kwargs.setdefault("dtype", variable_dtype(layer))
        kwargs.setdefault("trainable", layer.trainable)
        super().__init__(layer, name=name or layer.name, **kwargs)
        if parametrization is None:
            parametrization = FixedMask()
        if is_named and weights is not None:
            raise ValueError(
                "`weights` says for which weights one parametrization is used; a dict of "
                f"parametrizations names them itself. Received: weights={weights!r}"
            )
        quantizers = (
            None if quantizer is None else _checked_quantizers(quantizer)
        )
        self._state = _State(_checked(parametrization), weights, quantizers)

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
        if self._state.draws is None:
            self._state.draws = draws

    def build(self, input_shape: Any = None) -> None:
        """Builds the inner layer and the parametrization of each chosen kernel."""
        with self.building():
            super().build(input_shape)
        state = self._state
        refuse_unwrappable(self.layer, around_others=state.names_weights)
        self._restore_names()
        wrappable = _wrappable_weights(
            self.layer, unregistered=state.names_weights
        )
        weights = state.choose(wrappable)
        if not weights:
            raise NotPrunableError(
                f"The layer {self.layer.name!r} has no kernel that could be wrapped (biases and "
                "normalization weights are not). Register its kernels with "
                "keras_sparse_ortho.initializers.kernel_layouts. "
                f"Received: layer={self.layer.__class__.__name__}"
            )
        try:
            self._parametrize_all(weights)
        except Exception:
            state.detach()
            state.deferred.initialize(self.layer, but=[])
            raise
        state.draws = None
        if state.names_weights:  # masks that were given are in variables now
            state.template = {
                name: parametrization.clone()
                for name, parametrization in state.parametrizations.items()
            }
        owners = {id(weight.owner): weight.owner for weight in weights}
        state.undo_functions += [
            refuse_dense_updates(owner) for owner in owners.values()
        ]

    def _restore_names(self) -> None:
        """Gives the layers inside the names that the configuration has for them."""
        layers = [layer for layer, _ in walk(self.layer, "")]
        if len(layers) == len(self._state.layer_names):
            for layer, name in zip(
                layers, self._state.layer_names, strict=True
            ):
                layer.name = name

    def _parametrize_all(self, weights: list[PrunableWeight]) -> None:
        state = self._state
        compact_weights = [
            weight for weight in weights if state.template_for(weight).compact
        ]
        for weight in compact_weights:
            refuse_compact(weight)
        unstored = [weight.variable for weight in compact_weights]
        state.deferred.initialize(self.layer, but=unstored)
        state.layer_weights = list(self.layer.weights)
        for weight in weights:
            self._parametrize(
                self._with_drawn_mask(weight),
                state.template_for(weight).clone(),
            )
        if state.quantizer is not None:
            self.set_quantizer(state.quantizer)

    def _with_drawn_mask(self, weight: PrunableWeight) -> PrunableWeight:
        """The weight with the mask that its initializer drew while the layer was built."""
        attribute = initializer_attribute(weight.owner, weight.variable.name)
        draws = self._state.draws or {}
        recorder = draws.get((id(weight.owner), attribute))
        if recorder is None:
            return weight
        drawn_mask = functools.partial(recorder.masks.__getitem__, weight.shape)
        return dataclasses.replace(weight, drawn_mask=drawn_mask)

    def _parametrize(
        self, weight: PrunableWeight, parametrization: Parametrization
    ) -> None:
        """Builds a parametrization, whose variables become the wrapper's."""
        prefix = weight.path.replace("/", "_")
        shared_variables = self._state.shared_variables

        def add_weight(
            name: str, shared: bool = False, **kwargs: Any
        ) -> keras.Variable:
            if shared and name in shared_variables:
                return shared_variables[name]
            full_name = name if shared else f"{prefix}_{name}"
            variable = create_along(
                lambda: self.add_weight(name=full_name, **kwargs),
                along_kernel(kwargs["shape"], weight.variable),
            )
            track_variable(self, variable)
            if shared:
                shared_variables[name] = variable
            return variable

        full_path = f"{self.layer.name}/{weight.path}"
        parametrization.build(
            dataclasses.replace(weight, path=full_path), add_weight
        )
        self._state.parametrizations[weight.path] = parametrization

    @property
    def trainable(self) -> bool:
        return bool(self._trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        keras.layers.Layer.trainable.fset(self, value)
        for parametrization in self._state.parametrizations.values():
            parametrization.keep_untrained()

    def set_quantizer(
        self, quantizer: FakeQuantization | Mapping[str, FakeQuantization]
    ) -> None:
        """Rounds the effective weights: all of them alike, or only the names of a dict."""
        by_name = self._quantizers_by_name(quantizer)
        for name, weight_quantizer in by_name.items():
            parametrization = self._state.parametrizations[name]
            if isinstance(parametrization, LowRankSoftThreshold):
                raise NotPrunableError(
                    f"The weight {parametrization.weight.path!r} is a product of two factors, "
                    "whose integers would be lost when it is stripped. Leave it out. "
                    f"Received: {type(parametrization).__name__}"
                )
            parametrization.quantizer = weight_quantizer
        if isinstance(quantizer, FakeQuantization):
            self._state.quantizer = quantizer
        else:
            self._state.quantizer = by_name

    def _quantizers_by_name(
        self, quantizer: FakeQuantization | Mapping[str, FakeQuantization]
    ) -> dict[str, FakeQuantization]:
        names = list(self._state.parametrizations)
        if isinstance(quantizer, FakeQuantization):
            return dict.fromkeys(names, quantizer)
        unknown = sorted(quantizer.keys() - set(names))
        if unknown:
            raise NotPrunableError(
                f"`quantizer` must name parametrized weights of the layer {self.layer.name!r}, "
                f"which are {names}. Received: {unknown}"
            )
        return dict(quantizer)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        return call_by_shard(self, self._call_layer, args, kwargs)

    def _call_layer(self, *args: Any, **kwargs: Any) -> Any:
        with self._effective_weights(after=args):
            return self.layer(*args, **kwargs)

    @contextlib.contextmanager
    def _effective_weights(self, after: Nested = None) -> Iterator[None]:
        """Inside, the layer has its effective weights, made when inputs `after` are there."""
        pairs = [
            (parametrization.layer_variable, parametrization.current(after))
            for parametrization in self._state.parametrizations.values()
        ]
        with VariableOverrides(pairs) as scope:
            yield
        for loss in scope.losses:
            self.add_loss(loss)

    def __getattr__(self, name: str) -> Any:
        """Attributes of the layer inside: `units`, `kernel` (its effective value), methods."""
        # Where torch has submodules.
        inherited = getattr(super(), "__getattr__", None)
        if inherited is not None:
            with contextlib.suppress(AttributeError):
                return inherited(name)
        if (
            name.startswith("_")
            or name == "layer"
            or "_state" not in vars(self)
        ):
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute {name!r}"
            )
        if not hasattr(self.layer, name):
            raise unknown_attribute(self, name)
        effective_values = {
            id(parametrization.layer_variable): parametrization.current
            for parametrization in self._state.parametrizations.values()
        }
        return getattr(
            ShownLayer(self.layer, effective_values, self._effective_weights),
            name,
        )

    @property
    def parametrizations(self) -> dict[str, Parametrization]:
        """The parametrizations by weight name; empty before the layer is built."""
        return dict(self._state.parametrizations)

    def get_weights(self) -> list[np.ndarray]:
        """The values of the layer's weights in its order, then masks and thresholds."""
        return [to_numpy(variable) for variable in self._in_order_of_layer()]

    def set_weights(self, weights: list[np.ndarray]) -> None:
        """The reverse of `get_weights`; nothing is set if an array does not fit."""
        variables = self._in_order_of_layer()
        check_given(variables, weights)
        values = {
            id(variable): value
            for variable, value in zip(variables, weights, strict=False)
        }
        ordered = [
            values[id(variable)]
            for variable in self.weights
            if id(variable) in values
        ]
        surplus = weights[len(values) :]  # refused by Keras, as too few are
        super().set_weights([*ordered, *surplus])

    def _in_order_of_layer(self) -> list[keras.Variable]:
        layer_variables = self.layer.weights
        layer_ids = {id(variable) for variable in layer_variables}
        others = [
            variable
            for variable in self.weights
            if id(variable) not in layer_ids
        ]
        return [*layer_variables, *others]

    @property
    def layer_weights(self) -> list[keras.Variable]:
        """The weights of the layer inside; those in compact storage have no value."""
        return list(self._state.layer_weights)

    @property
    def prunable_weights(self) -> list[PrunableWeight]:
        return [
            dataclasses.replace(parametrization.weight, storage=parametrization)
            for parametrization in self._state.parametrizations.values()
        ]

    def save_own_variables(self, store: Any) -> None:
        """As every layer does; dead entries of the raw weights are zero in the file."""
        for parametrization in self._state.parametrizations.values():
            parametrization.clear_dead()
        super().save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """As every layer does; files of earlier releases lack the masks of frozen thresholds."""
        frozen_masks = {
            id(parametrization.frozen_mask)
            for parametrization in self._state.parametrizations.values()
            if isinstance(parametrization, LearntThreshold)
        }
        older_variables = [
            variable
            for variable in own_variables(self)
            if id(variable) not in frozen_masks
        ]
        if not frozen_masks or len(store.keys()) != len(older_variables):
            super().load_own_variables(store)
            return
        for number, variable in enumerate(older_variables):
            assign(variable, store[str(number)])

    def release(self) -> None:
        """Leaves the layer its effective weights, as variables of its own; the wrapper may go."""
        for parametrization in self._state.parametrizations.values():
            parametrization.materialize()
        self._state.detach()

    def storages(self) -> dict[str, Parametrization]:
        return self.parametrizations

    def to_dense_layer(self) -> keras.layers.Layer:
        """Releases the layer inside, which then has the effective weights."""
        self.release()
        return self.layer

    def wrapper_config(self) -> Config:
        """The settings, and the names in the layer, which its own configuration may lack."""
        state = self._state
        serialize = keras.saving.serialize_keras_object
        config = keras.layers.Layer.get_config(self)
        table = state.parametrizations or state.template
        if isinstance(table, dict):
            config["parametrization"] = {
                name: serialize(value) for name, value in table.items()
            }
            config["weights"] = None
        else:
            config["parametrization"] = serialize(table)
            selection = state.selection
            config["weights"] = (
                serialize(selection) if callable(selection) else selection
            )
        if isinstance(state.quantizer, dict):
            config["quantizer"] = {
                name: serialize(quantizer)
                for name, quantizer in state.quantizer.items()
            }
        elif state.quantizer is not None:
            config["quantizer"] = serialize(state.quantizer)
        config["layer_names"] = state.layer_names
        if self.built:
            config["layer_names"] = [
                inner.name for inner, _ in walk(self.layer, "")
            ]
        return config

    @classmethod
    def from_config(
        cls, config: Config, custom_objects: dict[str, Any] | None = None
    ) -> PrunableLayer:
        arguments, layer_names = _restored(config, custom_objects)
        wrapper = cls(**arguments)
        wrapper._state.layer_names = layer_names
        wrapper._state.is_from_file = True
        return wrapper


def _restored(
    config: Config, custom_objects: dict[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    """The arguments in a configuration, and the names of the layers inside."""
    restore = functools.partial(restored, custom_objects=custom_objects)
    arguments = dict(config)
    layer_names = arguments.pop("layer_names", [])
    _check_config(arguments, layer_names, config)
    for name in ("parametrization", "quantizer"):
        value = arguments.get(name)
        if isinstance(value, dict):
            is_single = "class_name" in value
            arguments[name] = (
                restore(value)
                if is_single
                else {key: restore(part) for key, part in value.items()}
            )
    for name in ("layer", "weights"):
        if isinstance(arguments.get(name), dict):
            arguments[name] = restore(arguments[name])
    return arguments, layer_names


def _check_config(
    arguments: dict[str, Any], layer_names: Any, config: Config
) -> None:
    """Refuses the configuration of something else, or a damaged one."""
    weights = arguments.get("weights")
    has_selection = (
        weights is None
        or isinstance(weights, str | dict)
        or _are_names(weights)
    )
    has_parametrization = isinstance(arguments.get("parametrization"), dict)
    if (
        "layer" in arguments
        and has_parametrization
        and _are_names(layer_names)
        and has_selection
    ):
        return
    raise ValueError(
        "The configuration of a PrunableLayer holds its `layer`, its `parametrization`, which "
        "is a dict, and perhaps names of `weights` and `layer_names`: the file was written by "
        f"something else, or is damaged. Received: { {k: type(v) for k, v in config.items()} }"
    )


def _are_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(name, str) for name in value
    )


def _checked(
    parametrization: Parametrization | Mapping[str, Parametrization],
) -> Template:
    """The template as it is stored; ValueError for anything else."""
    values: list[object] = [parametrization]
    if isinstance(parametrization, Mapping):
        values = list(parametrization.values())
    if not values or not all(
        isinstance(value, Parametrization) for value in values
    ):
        raise ValueError(
            "`parametrization` must be a Parametrization, or a dict from weight name to one. "
            f"Received: parametrization={parametrization!r}"
        )
    if isinstance(parametrization, Mapping):
        return dict(parametrization)
    return parametrization


def _checked_quantizers(
    quantizer: FakeQuantization | Mapping[str, FakeQuantization],
) -> Quantizers:
    """Quantizers as they are stored; ValueError for anything else."""
    if isinstance(quantizer, Mapping) and "class_name" not in quantizer:
        return {
            name: checked_quantizer(value) for name, value in quantizer.items()
        }
    return checked_quantizer(quantizer)


def _wrappable_weights(
    layer: keras.layers.Layer, *, unregistered: bool
) -> list[PrunableWeight]:
    """The kernels (and, if `unregistered`, matrices) in a layer that no wrapper inside it holds."""
    wrapped_ids = {
        id(weight.variable)
        for wrapper, _ in walk(layer, "")
        if isinstance(wrapper, LayerWrapper)
        for weight in wrapper.prunable_weights
    }
    weights = find_kernels(layer, "", unregistered=unregistered)
    return [
        weight for weight in weights if id(weight.variable) not in wrapped_ids
    ]
