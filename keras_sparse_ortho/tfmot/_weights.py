"""The kernels of a tf_keras model, described as in Keras 3, and copies with wrapped layers."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_sparse_ortho import kernels
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import (
    ExactOrthogonal,
    KernelLayout,
    RandomSparse,
)
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    Selection,
    choose,
    kernel_layouts,
)
from keras_sparse_ortho.tfmot._tf_keras_internals import (
    PruneLowMagnitude,
    is_graph,
    rename,
    serializing_other_initializers,
    sublayers,
    tf_keras,
)

L = tf_keras.layers
Layouts = dict[str, KernelLayout | None]


def register_initializers() -> Any:
    """Registers the initializers with tf_keras, to load models with them; returns `tf_keras`.

    Importing `keras_sparse_ortho.tfmot` does this, and registers the wrappers.
    """
    for initializer in (ExactOrthogonal, RandomSparse):
        tf_keras.saving.register_keras_serializable(
            package="keras_sparse_ortho"
        )(initializer)
        tf_keras.saving.get_custom_objects()[initializer.__name__] = (
            initializer  # for .h5 files
        )
    return tf_keras


def register_layouts() -> None:
    """Registers tf_keras' kernels, most as those of Keras' layers of one name."""
    names = [
        "Dense",
        "Embedding",
        "EinsumDense",
        "SeparableConv1D",
        "SeparableConv2D",
    ]
    names += [
        f"Conv{n}D{suffix}" for n in (1, 2, 3) for suffix in ("", "Transpose")
    ]
    for name in [*names, "SimpleRNNCell", "GRUCell", "LSTMCell"]:
        layouts = kernel_layouts.dispatch(getattr(keras.layers, name))
        kernel_layouts.register(getattr(L, name), layouts)
    for kind in (L.DepthwiseConv1D, L.DepthwiseConv2D):
        kernel_layouts.register(
            kind, lambda _: {"depthwise_kernel": KernelLayout.depthwise()}
        )


def layouts_of(layer: Any) -> Layouts:
    """The attributes of a tf_keras layer that hold kernels, each with its layout."""
    kernel_layouts_of = kernel_layouts.dispatch(type(layer))
    if kernel_layouts_of is not kernel_layouts.dispatch(object):
        return kernel_layouts_of(layer)
    return {
        name: None
        for name, value in vars(layer).items()
        if (name in ("kernel", "embeddings") or name.endswith("_kernel"))
        and isinstance(value, tf.Variable)
        and value.trainable  # as it was created; freezing a layer changes nothing
        and len(value.shape) >= 2
    }


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class TfKerasWeight(PrunableWeight):
    attribute: str = ""  # of the owner, which holds the variable
    state: Any = None  # of a wrapped weight, with `mask()` and `effective()`
    wrapped: bool = False

    @property
    def mask(self) -> np.ndarray:
        if self.state is None:
            return self.value != 0
        live: np.ndarray = self.state.mask()
        return live

    @property
    def live(self) -> int:
        return int(np.count_nonzero(self.mask))

    @property
    def initializer(self) -> keras.initializers.Initializer:
        """The initializer of the layer, which no longer counts once a wrapper has a mask."""
        if self.wrapped:
            return None
        return _of_keras(self.of_owner("initializer"))

    def of_owner(self, what: str) -> Any:
        short = f"{self.attribute.removesuffix('_kernel')}_{what}"
        return getattr(
            self.owner,
            f"{self.attribute}_{what}",
            getattr(self.owner, short, None),
        )

    def raw_value(self, *, copy: bool = True) -> np.ndarray:
        return as_numpy(self.variable if self.state is None else self.state.raw)

    @property
    def value(self) -> np.ndarray:
        return (
            self.raw_value()
            if self.state is None
            else as_numpy(self.state.effective())
        )


def _of_keras(
    initializer: keras.initializers.Initializer,
) -> keras.initializers.Initializer:
    """The initializer of Keras 3 with the name and settings of one of tf_keras, if there is one."""
    name = type(initializer).__name__
    kind = getattr(keras.initializers, name, None)
    if kind is None or type(initializer) is not getattr(
        tf_keras.initializers, name, None
    ):
        return initializer
    return kind.from_config(initializer.get_config())


def as_numpy(value: Any) -> np.ndarray:
    """A TensorFlow tensor or variable as a NumPy array, bfloat16 as float32."""
    array = np.asarray(tf_keras.backend.get_value(value))
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def find_kernels(layer: Any, path: str) -> list[TfKerasWeight]:
    """All kernels of a built tf_keras layer or model and its sublayers, each once."""
    weights: dict[int, TfKerasWeight] = {}
    for inner, inner_path in walk(layer, path):
        kernels = (
            _wrapped if isinstance(inner, PruneLowMagnitude) else _own_kernels
        )
        for weight in kernels(inner, inner_path):
            weights.setdefault(id(weight.variable), weight)
    return list(weights.values())


def prunable_weights(model: Any) -> list[PrunableWeight]:
    """Lists the kernels and embeddings of a tf_keras model, plain or pruned, with their densities.

    `keras_sparse_ortho.budgets` accept the list in place of a model. Paths are those of the same
    model in Keras 3, without pruning wrappers.

    Args:
        model: tf_keras Model or Layer, built; NotPrunableError for others, e.g. of Keras 3.

    Examples:
        >>> import keras_sparse_ortho as kso
        >>> tf_keras = kso.tfmot.register_initializers()
        >>> layer = tf_keras.layers.Dense(10, name="a")
        >>> model = tf_keras.Sequential([tf_keras.Input((20,)), layer])
        >>> kso.tfmot.prunable_weights(model)
        [<a/kernel shape=(20, 10), density=1>]
    """
    if not isinstance(model, tf_keras.layers.Layer):
        raise NotPrunableError(
            "keras_sparse_ortho.tfmot is for tf_keras models; for Keras 3 use keras_sparse_ortho."
            f"sparsify. Received: {model=} of type {type(model).__module__}.{type(model).__name__}"
        )
    if not isinstance(model, tf_keras.Model):
        return [*find_kernels(model, model.name)]
    _check_built(model, model.name)
    return [*find_kernels(model, "")]


def walk(layer: Any, path: str) -> Iterator[tuple[Any, str]]:
    """A layer and all its sublayers, each once, with their paths; not those inside wrappers."""
    return kernels.walk(layer, path, _children)


def _children(layer: Any) -> Iterator[tuple[Any, str]]:
    for child in (
        () if isinstance(layer, PruneLowMagnitude) else sublayers(layer)
    ):
        named_layer = (
            child.layer if isinstance(child, PruneLowMagnitude) else child
        )
        yield child, str(named_layer.name)


def _own_kernels(layer: Any, path: str) -> list[TfKerasWeight]:
    # The method of the class: TFMOT's wrapper sets one on every layer instance that it wraps.
    prunable_variables = getattr(type(layer), "get_prunable_weights", None)
    if prunable_variables is not None:
        return [
            _held(layer, path, variable)
            for variable in prunable_variables(layer)
        ]
    layouts = layouts_of(layer)
    variables = {name: vars(layer).get(name) for name in layouts}
    # A subclass of a layer of tf_keras may hold a constant in the place of its kernel.
    is_registered = type(layer) in kernel_layouts.registry
    return [
        TfKerasWeight(
            f"{path}/{name}", variable, layer, layouts[name], attribute=name
        )
        for name, variable in variables.items()
        if isinstance(variable, tf.Variable)
        and (variable.trainable or is_registered)
    ]


def _held(layer: Any, path: str, variable: Any) -> TfKerasWeight:
    for inner, inner_path in walk(layer, path):
        for name, value in vars(inner).items():
            if value is variable:
                layout: KernelLayout | None = None
                if not hasattr(type(inner), "get_prunable_weights"):
                    layout = layouts_of(inner).get(name)
                return TfKerasWeight(
                    f"{inner_path}/{name}",
                    variable,
                    inner,
                    layout,
                    attribute=name,
                )
    raise NotPrunableError(
        f"The layer {path!r} returns a weight from get_prunable_weights that is not an attribute "
        "of it or of a sublayer (it may be in a list). "
        f"Received: {getattr(variable, 'name', variable)}"
    )


@dataclasses.dataclass(eq=False, repr=False)
class Masked:
    """The state of a masked weight: effective is `w` where the mask is not 0, else exactly 0."""

    weight: TfKerasWeight
    raw: Any
    variable: Any  # of the mask

    def effective(self) -> Any:
        # Unlike in a product, 0 even for infinite or NaN weights; faster than `tf.where`.
        raw = tf.convert_to_tensor(self.raw)
        return tf.math.multiply_no_nan(raw, tf.cast(self.variable, raw.dtype))

    def mask(self) -> np.ndarray:
        return as_numpy(self.variable) != 0

    def settle(self) -> None:
        self.raw.assign(self.effective())

    adopt_effective = settle  # after the variable was set

    def assign(self, mask: np.ndarray) -> None:
        self.variable.assign(mask.astype(self.variable.dtype.as_numpy_dtype))
        self.settle()


def _wrapped(wrapper: Any, path: str) -> list[TfKerasWeight]:
    weights = {
        id(weight.variable): weight
        for weight in find_kernels(wrapper.layer, path)
    }
    masked_variables = [
        (weights.get(id(raw)), raw, mask)
        for raw, mask, _ in wrapper.pruning_vars
    ]
    states: dict[int, Any] = {
        id(raw): Masked(w, raw, mask) for w, raw, mask in masked_variables if w
    }
    states |= {
        id(state.weight.variable): state
        for state in getattr(wrapper, "states", ())
    }
    return [
        dataclasses.replace(weight, state=states.get(key), wrapped=True)
        for key, weight in weights.items()
    ]


def select_weights(
    model: Any,
    include: Selection,
    exclude: Selection,
    *,
    rewritten: bool = True,
) -> list[PrunableWeight]:
    """The weights to prune; raises for models, layers and weights that cannot be pruned.

    Args:
        model: tf_keras Model.
        include: Selection of kernels, `None` for all.
        exclude: Selection of kernels to leave out.
        rewritten: bool. Whether wrappers will be put into a copy, so that a subclassed model is
            refused.
    """
    candidates = prunable_weights(model)
    if not isinstance(model, tf_keras.Model):
        raise NotPrunableError(
            "`model` must be a whole model; wrap a single layer with keras_sparse_ortho.tfmot."
            f"PruneWithMask. Received: model={type(model).__name__}"
        )
    if rewritten:
        _check_graph(model, model.name)
    weights = choose(candidates, include, exclude)
    if not weights:
        raise NotPrunableError(
            "Nothing in the model would be pruned: it has no kernels, or none is selected. "
            f"Received: model={model.name!r}"
        )
    if wrapped := [
        weight.path for weight in weights if getattr(weight, "wrapped", False)
    ]:
        raise NotPrunableError(
            "These weights have a pruning wrapper already: call TFMOT's strip_pruning first, or "
            f"`exclude` them. Received: {wrapped}"
        )
    for weight in weights:
        weight.finite_raw_value()
    return weights


# `(copied layer, indices of its selected kernels, these) -> wrapper`; `Wrapped` lists results.
Wrap = Callable[[Any, list[int], list[PrunableWeight]], Any]
Wrapped = list[tuple[Any, list[int], list[PrunableWeight]]]


def rewrite(
    model: Any, weights: Sequence[PrunableWeight], wrap: Wrap
) -> tuple[Any, Wrapped]:
    """A copy of a model with every layer that holds some of `weights` wrapped."""
    selected_by_id = {id(weight.variable): weight for weight in weights}
    wrapped: Wrapped = []
    pairs: list[tuple[Any, Any]] = []

    def replace(layer: Any) -> Any:
        if isinstance(layer, tf_keras.Model):
            return clone(layer)
        with serializing_other_initializers():
            copy = type(layer).from_config(layer.get_config())
        rename(copy, layer.name)  # the configuration may have no name
        pairs.append((layer, copy))
        if isinstance(layer, PruneLowMagnitude):
            return copy
        weights_inside = [
            selected_by_id.get(id(w.variable))
            for w in find_kernels(layer, layer.name)
        ]
        indices = [
            k for k, weight in enumerate(weights_inside) if weight is not None
        ]
        if not indices:
            return copy
        selected = [weight for weight in weights_inside if weight is not None]
        wrapped.append((wrap(copy, indices, selected), indices, selected))
        return wrapped[-1][0]

    def clone(part: Any) -> Any:
        return tf_keras.models.clone_model(part, clone_function=replace)

    result = clone(model)
    for layer, copy in pairs:
        for source, target in zip(layer.weights, copy.weights, strict=True):
            target.assign(source)
    return result, wrapped


def _check_built(model: Any, path: str) -> None:
    if not model.built:
        raise NotPrunableError(
            f"The model {path!r} is not built: give it an Input or call it once. "
            f"Received: model={type(model).__name__}"
        )


def _check_graph(model: Any, path: str) -> None:
    """Raises for a subclassed model, and for a model inside that is one or is not built."""
    if not isinstance(model, tf_keras.Sequential) and not is_graph(model):
        raise NotPrunableError(
            f"The model {path!r} is a subclassed model, into which TFMOT's wrappers cannot be put. "
            "Wrap its layers where they are created, with keras_sparse_ortho.tfmot.PruneWithMask; "
            "exact_orthogonal_initializers there has an initializer for each of them. "
            f"Received: model={type(model).__name__}"
        )
    for layer in model.layers:
        if isinstance(layer, tf_keras.Model):
            inner_path = f"{path}/{layer.name}"
            _check_built(layer, inner_path)
            _check_graph(layer, inner_path)
