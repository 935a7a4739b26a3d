"""`remove_channels`: smaller layers, equal outputs, on every backend."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.parametrizations import ChannelSoftThreshold
from tests.helpers import array, jit_if_quicker, reloaded, slow_on_jax
from tests.models.networks import Late, Mixing, Tower, WithStep

L = keras.layers


def unsettle(model, dead=0.4, seed=0):
    """Random weights, with some dead columns and rows of kernels; statistics as after training."""
    rng = np.random.default_rng(seed)
    for layer in model.layers:
        values = []
        for variable in layer.weights:
            value = rng.normal(size=variable.shape)
            if "variance" in variable.name:
                value = rng.uniform(0.5, 1.5, variable.shape)
            elif len(variable.shape) > 1 and layer.name != "head":
                value *= 1.5 / np.sqrt(np.prod(value.shape[:-1]))
                outputs = -2 if "depthwise" in layer.name else -1
                gone = rng.random(value.shape[outputs]) < dead
                gone[0] = False
                value = np.moveaxis(value, outputs, -1)
                value[..., gone] = 0
                value = np.moveaxis(value, -1, outputs)
            elif variable.name == "gamma":
                value = rng.uniform(0.5, 1.5, value.shape) * (
                    rng.random(value.shape) > 0.1
                )
            elif layer.name != "head":
                value *= 0.5
            values.append(value)
        layer.set_weights(values)
    return model


def samples(model, seed=1):
    rng = np.random.default_rng(seed)
    made = [
        rng.normal(size=(6, *t.shape[1:])).astype("float32")
        for t in model.inputs
    ]
    return made[0] if len(made) == 1 else made


def outputs(model, x):
    # Compiled on JAX, where it is faster to compile one function than every operation.
    call = (
        model
        if keras.backend.backend() != "jax"
        else lambda x: model.predict(x, verbose=0)
    )
    return np.concatenate(
        [array(y).reshape(6, -1) for y in keras.tree.flatten(call(x))], axis=1
    )


def assert_equal(small, model):
    x = samples(model)
    np.testing.assert_allclose(
        outputs(small, x), outputs(model, x), atol=1e-5, rtol=1e-5
    )


def assert_smaller_and_equal(model):
    small = kso.remove_channels(model)
    assert_equal(small, model)
    # It says something.
    assert np.median(outputs(model, samples(model)).std(axis=0)) > 1e-3
    assert names(small) == names(model)
    assert all(
        type(layer).__module__.startswith("keras.") for layer in small.layers
    )
    assert small.count_params() < model.count_params()
    again = kso.remove_channels(small)
    assert again.count_params() == small.count_params()
    return small


def names(model):
    # Keras itself names the inputs of a clone anew.
    return [
        layer.name
        for layer in model.layers
        if not isinstance(layer, L.InputLayer)
    ]


def sizes(model):
    return {layer.name: layer.output.shape[-1] for layer in model.layers}


def chain(padding="valid", after=False):
    """Convolutions with normalization before or after the activation, pooling, Flatten, Dense."""
    layers = [keras.Input((12, 12, 3))]
    for k, width in enumerate((8, 10)):
        norm, relu = L.BatchNormalization(), L.Activation("gelu")
        layers += [L.Conv2D(width, 3, padding=padding, name=f"conv_{k}")]
        layers += [relu, norm] if after else [norm, relu]
        layers += [L.MaxPooling2D(2), L.Dropout(0.5)]
    layers += [
        L.Flatten(),
        L.Dense(16, activation="relu", name="hidden"),
        L.Dense(4, name="head"),
    ]
    return keras.Sequential(layers)


def residual():
    inputs = keras.Input((8, 8, 3))
    x = L.ReLU()(
        L.BatchNormalization()(
            L.Conv2D(12, 3, padding="same", name="stem")(inputs)
        )
    )
    for k, width in enumerate((12, 16)):
        y = L.Conv2D(width, 3, padding="same", use_bias=False, name=f"a_{k}")(x)
        y = L.ReLU()(L.BatchNormalization()(y))
        y = L.Conv2D(width, 1, use_bias=False, name=f"b_{k}")(y)
        y = L.BatchNormalization()(y)
        if width != x.shape[-1]:
            x = L.Conv2D(width, 1, name=f"project_{k}")(x)
        x = L.ReLU()(L.Add()([x, y]))
    x = L.GlobalAveragePooling2D(keepdims=True)(x)
    x = L.Reshape((-1,))(x)
    return keras.Model(inputs, L.Dense(4, name="head")(x))


def mobile():
    inputs = keras.Input((9, 9, 3))
    x = L.Conv2D(8, 3, strides=2, padding="same", use_bias=False, name="stem")(
        inputs
    )
    x = L.ReLU(6.0)(L.BatchNormalization()(x))
    for k, padding in enumerate(("valid", "same")):
        y = L.Conv2D(24, 1, use_bias=False, name=f"expand_{k}")(x)
        y = L.ReLU(6.0)(L.BatchNormalization()(y))
        y = L.DepthwiseConv2D(
            3, padding=padding, use_bias=False, name=f"depthwise_{k}"
        )(y)
        y = L.ReLU(6.0)(L.BatchNormalization()(y))
        x = L.BatchNormalization()(
            L.Conv2D(12, 1, use_bias=False, name=f"project_{k}")(y)
        )
    x = L.SeparableConv2D(
        10, 2, depth_multiplier=2, activation="relu", name="separable"
    )(x)
    return keras.Model(
        inputs, L.Dense(4, name="head")(L.GlobalMaxPooling2D()(x))
    )


def branches():
    """Two inputs and outputs, 1-D and 3-D, concatenation, products, padding and upsampling."""
    first, second = keras.Input((10, 3)), keras.Input((6, 6, 6, 2))
    x = L.Conv1D(8, 3, padding="causal", activation="tanh", name="causal")(
        first
    )
    x = L.Concatenate()(
        [
            x,
            L.Conv1D(6, 3, padding="same", activation="relu", name="same")(
                first
            ),
        ]
    )
    x = L.AveragePooling1D(2, padding="same")(L.UpSampling1D(2)(x))
    x = L.Conv1D(9, 2, activation="sigmoid", name="joint")(L.Cropping1D(1)(x))
    y = L.Conv3D(5, 3, activation="elu", name="volume")(
        L.ZeroPadding3D(1)(second)
    )
    y = L.Conv3D(9, 2, activation=None, name="second_volume")(L.LeakyReLU()(y))
    x, y = L.GlobalAveragePooling1D()(x), L.GlobalAveragePooling3D()(y)
    z = L.Multiply()([x, y])
    merged = [
        L.Maximum()([x, y]),
        L.Minimum()([x, z]),
        L.Average()([x, y, z]),
        L.Subtract()([x, z]),
    ]
    w = L.Dense(7, activation="softmax", name="mixing")(L.Concatenate()(merged))
    w = L.Dense(7, activation="selu", name="last")(w)
    return keras.Model([first, second], [L.Dense(4, name="head")(w), z])


def dense_chain():
    layers = [
        L.Dense(20, activation=a, name=f"d{a}")
        for a in ("relu", "silu", "softplus")
    ]
    return keras.Sequential(
        [keras.Input((6,)), *layers, L.Dense(4, name="head")]
    )


NETWORKS = {
    "chain": chain,
    "chain_same": lambda: chain("same"),
    "chain_normalized_after": lambda: chain(after=True),
    "residual": residual,
    "mobile": mobile,
    "branches": branches,
    "dense": dense_chain,
}


# JAX compiles every operation for every shape: minutes for all of them.
HERE = [
    pytest.param(
        name,
        marks=()
        if name in ("chain", "branches")
        else pytest.mark.slow_on("jax"),
    )
    for name in NETWORKS
]


@pytest.mark.core
@pytest.mark.parametrize("name", HERE)
def test_outputs_are_equal(name):
    assert_smaller_and_equal(unsettle(NETWORKS[name]()))


@pytest.mark.tensorflow_only
@pytest.mark.parametrize(
    "seed",
    [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))],
)
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_equal_for_other_patterns(name, seed):
    model = unsettle(
        NETWORKS[name](), dead=(0.2, 0.8)[seed % 2], seed=seed + 10
    )
    assert_equal(kso.remove_channels(model), model)


def zero_columns(layer, dead, bias=None):
    """Makes outputs of a layer constant: 0, or the bias given."""
    values = layer.get_weights()
    values[0][..., list(dead)] = 0
    if bias is not None:
        values[-1][list(dead)] = np.linspace(bias / 20, bias, len(dead))
    layer.set_weights(values)


def convolutions(padding, bias, *between):
    x = inputs = keras.Input((6, 6, 2))
    for step in (
        L.Conv2D(8, 3, name="first"),
        *between,
        L.Conv2D(5, 3, padding=padding, name="second"),
        L.Flatten(),
        L.Dense(3, name="head"),
    ):
        x = step(x)
    model = keras.Model(inputs, x)
    zero_columns(model.get_layer("first"), (1, 4, 6), bias)
    return model


@pytest.mark.tensorflow_only
@pytest.mark.parametrize(
    ("padding", "bias", "between", "left"),
    [
        ("valid", 0.7, [], 5),  # the constant 0.7 goes into the bias
        ("same", 0.0, [], 5),  # 0 is 0 at the border as well
        ("same", 0.7, [], 6),  # 0.7 is not: one channel carries the three
        ("same", -0.7, [L.ReLU()], 5),  # relu(-0.7) is 0
        ("same", 0.7, [L.Activation("relu")], 6),
        ("same", 0.0, [keras.ops.gelu], 5),
        ("same", 0.7, [keras.ops.tanh], 6),
        ("valid", 0.7, [L.ZeroPadding2D(1)], 8),  # "same" in two layers
        ("valid", 0.0, [L.ZeroPadding2D(1)], 5),
        ("valid", 0.7, [L.Softmax()], 8),  # which is no constant behind softmax
        ("valid", 0.7, [L.Activation("softmax")], 8),
        ("valid", 0.7, [L.LayerNormalization()], 8),
        (
            "valid",
            0.7,
            [L.Conv2DTranspose(4, 3, strides=2)],
            6,
        ),  # at the border, too
        (
            "valid",
            0.7,
            [L.GroupNormalization(-1)],
            5,
        ),  # each channel by itself: 0
        (
            "valid",
            0.7,
            [L.AveragePooling2D(2, padding="same"), L.UpSampling2D(2)],
            5,
        ),
    ],
)
def test_constants_go_where_they_can(padding, bias, between, left):
    between = [
        type(one).from_config(one.get_config())
        if isinstance(one, L.Layer)
        else one
        for one in between
    ]
    model = convolutions(padding, bias, *between)
    unknown = left == 8 and not isinstance(between[0], L.ZeroPadding2D)
    told = (
        pytest.warns(UserWarning, match="Received: 3 of 'first'")
        if unknown
        else nullcontext()
    )
    with told:
        small = kso.remove_channels(model)
    assert small.get_layer("first").filters == left
    assert small.get_layer("second").filters == 5
    assert_equal(small, model)


@pytest.mark.core
def test_on_request_layer_normalization_goes_on_with_fewer_channels():
    layers = [
        L.Dense(9, activation="relu", name="hidden"),
        L.LayerNormalization(name="norm"),
    ]
    model = keras.Sequential(
        [keras.Input((6,)), *layers, L.Dense(3, name="head")]
    )
    unsettle(model, dead=0)
    kernel, bias = model.get_layer("head").get_weights()
    kernel[[1, 4, 5]] = 0
    model.get_layer("head").set_weights([kernel, bias])
    with pytest.warns(UserWarning, match="3 of 'norm'"):
        assert kso.remove_channels(model).get_layer("hidden").units == 9
    with pytest.warns(
        UserWarning, match=r"outputs change.*Received: \['norm'\]"
    ):
        small = kso.remove_channels(model, exact=False)
    assert [len(layer.get_weights()[-1]) for layer in small.layers] == [6, 6, 3]
    x = np.random.default_rng(2).normal(size=(8, 6)).astype("float32")
    read = np.delete(array(model.layers[0](x)), [1, 4, 5], axis=1)
    gamma, beta = (
        np.delete(v, [1, 4, 5]) for v in model.get_layer("norm").get_weights()
    )
    spread = np.sqrt(read.var(axis=1, keepdims=True) + 1e-3)
    normalized = (
        gamma * (read - read.mean(axis=1, keepdims=True)) / spread + beta
    )
    expected = normalized @ np.delete(kernel, [1, 4, 5], axis=0) + bias
    np.testing.assert_allclose(array(small(x)), expected, atol=1e-4)


@pytest.mark.core
def test_a_bias_is_made_where_there_was_none():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            L.Dense(5, activation="sigmoid", name="hidden"),
            L.Dense(3, use_bias=False, name="head"),
        ]
    )
    zero_columns(model.get_layer("hidden"), (0, 2))
    small = kso.remove_channels(model)
    head = small.get_layer("head")
    # Sigmoid(0).
    folded = 0.5 * model.get_layer("head").get_weights()[0][[0, 2]].sum(0)
    np.testing.assert_allclose(array(head.bias), folded, atol=1e-6)
    assert_equal(small, model)


@pytest.mark.tensorflow_only
def test_a_sum_keeps_the_union_of_what_lives():
    inputs = keras.Input((6, 6, 3))
    x = L.Conv2D(8, 1, use_bias=False, name="a")(inputs)
    y = L.Conv2D(8, 3, padding="same", use_bias=False, name="b")(inputs)
    z = L.GlobalMaxPooling2D()(L.Add(name="sum")([x, y]))
    model = keras.Model(inputs, L.Dense(2, name="head")(z))
    zero_columns(model.get_layer("a"), (0, 1, 2, 3))
    zero_columns(model.get_layer("b"), (2, 3, 4, 5))
    small = kso.remove_channels(model)
    assert {name: sizes(small)[name] for name in ("a", "b", "sum")} == {
        "a": 6,
        "b": 6,
        "sum": 6,
    }
    assert_equal(small, model)


@pytest.mark.tensorflow_only
def test_what_nothing_reads_goes_and_so_does_what_feeds_it():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            *[L.Dense(6, "tanh", name=f"d{k}") for k in range(3)],
            L.Dense(2),
        ]
    )
    kernel, bias = model.get_layer("d2").get_weights()
    kernel[:4] = (
        0  # d1 has four channels that are not read, and two that read d0 at 0 and 1 only
    )
    model.get_layer("d2").set_weights([kernel, bias])
    kernel, bias = model.get_layer("d1").get_weights()
    kernel[2:, 4:] = 0
    model.get_layer("d1").set_weights([kernel, bias])
    small = kso.remove_channels(model)
    assert [layer.units for layer in small.layers] == [2, 2, 6, 2]
    assert_equal(small, model)


@pytest.mark.tensorflow_only
def test_inputs_outputs_and_one_channel_of_each_layer_stay():
    inputs = keras.Input((5,))
    x = L.Dense(4, name="first")(inputs)
    y = L.Dense(3, activation="relu", name="second")(x)
    z = L.Dense(2, name="third")(y)
    model = keras.Model(inputs, [x, z])
    for name in ("first", "second", "third"):
        zero_columns(
            model.get_layer(name), range(model.get_layer(name).units), 0.5
        )
    small = kso.remove_channels(model)
    assert small.input_shape == (None, 5)
    assert [layer.units for layer in small.layers[1:]] == [4, 1, 2]
    assert_equal(small, model)


class Doubled(L.Dense):
    """A subclass, of which nothing is known."""

    def call(self, inputs):
        return super().call(inputs) + keras.ops.sum(
            inputs, axis=-1, keepdims=True
        )


def normalized_in_training(x):
    return L.BatchNormalization()(x, training=True)


@pytest.mark.tensorflow_only
@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda x: keras.ops.cumsum(x, axis=-1), id="operation"),
        pytest.param(normalized_in_training, id="training"),
        pytest.param(
            lambda x: L.Lambda(lambda x: x * x, output_shape=(3, 8))(x),
            id="lambda",
        ),
        pytest.param(lambda x: Doubled(8)(x), id="subclass"),
        pytest.param(
            lambda x: keras.Sequential([L.Dense(8)], name="inner")(x),
            id="nested",
        ),
        pytest.param(lambda x: x[..., ::2], id="every second"),
        pytest.param(lambda x: x * keras.ops.softmax(x, axis=-1), id="softmax"),
        pytest.param(
            lambda x: L.Conv1D(8, 1, groups=2, activation="softmax")(x),
            id="groups",
        ),
        pytest.param(
            lambda x: L.LSTM(8, return_sequences=True)(x, training=True),
            id="recurrent",
        ),
        pytest.param(
            lambda x: L.MultiHeadAttention(1, 4)(x, x, training=True),
            id="attention",
        ),
    ],
)
def test_what_is_not_understood_keeps_its_channels(between):
    inputs = keras.Input((3, 4))
    shared = L.Dense(8, activation="relu", name="shared")
    x = between(L.Dense(8, name="first")(inputs))
    x = shared(shared(L.Dense(8, name="second")(x)))
    model = keras.Model(inputs, L.Dense(2, name="head")(x))
    for name in ("first", "second", "shared"):
        zero_columns(model.get_layer(name), (0, 3, 5), 0.4)
    with pytest.warns(
        UserWarning,
        match=r"Received: 3 of 'first', which '.* of class .* reads; ",
    ):
        small = kso.remove_channels(model)
    assert [
        small.get_layer(name).units for name in ("first", "second", "shared")
    ] == [8, 8, 8]
    assert_equal(small, model)


def test_models_of_which_the_graph_is_not_known_are_refused():
    written, tower = Late(), Tower()
    written(np.ones((1, 16), "float32"))
    tower(np.ones((1, 6), "float32"))  # has a `call` of its own
    for model in (written, tower):
        with pytest.raises(
            NotPrunableError, match=r"onal models.*without a `call`.*Received: "
        ):
            kso.remove_channels(model)
    with pytest.raises(NotPrunableError, match=r"must be built.*Received"):
        kso.remove_channels(keras.Sequential([L.Dense(2)]))


def test_dead_channels_that_stay_are_told():
    inputs = keras.Input((5, 4))
    x = L.ReLU(name="relu")(L.Dense(6, name="before")(inputs))
    # Written as a class: which of its layers reads which?
    x = Mixing(6, name="block")(x)
    model = keras.Model(
        inputs, L.Dense(3, name="head")(L.Dense(8, name="after")(x))
    )
    for layer, dead in (("before", 2), ("after", 3)):
        zero_columns(model.get_layer(layer), range(dead))
    zero_columns(model.get_layer("block").inner[0], range(5))
    text = r"Received: 2 of 'before', which 'block' of class Mixing reads; "
    text += r"5 of 'block/inner/kernel' in 'block' of class Mixing$"
    with pytest.warns(UserWarning, match=text):
        small = kso.remove_channels(model)
    assert small.get_layer("before").units == 6
    assert small.get_layer("after").units == 5
    assert_equal(small, model)


@pytest.mark.core
@slow_on_jax
def test_channels_that_died_in_training(tmp_path):
    inputs = keras.Input((8, 8, 2))
    x = L.Conv2D(12, 3, use_bias=False, name="conv")(inputs)
    x = L.ReLU()(L.BatchNormalization()(x))
    x = L.DepthwiseConv2D(3, use_bias=False, name="depthwise")(x)
    x = L.Dense(16, activation="relu", name="hidden")(L.Flatten()(x))
    model = keras.Model(inputs, L.Dense(3, name="head")(x))
    kernel = model.get_layer("conv").kernel
    kernel.assign(array(kernel) * np.linspace(0.05, 1.5, 12, dtype="float32"))
    model = kso.parametrize(
        model, ChannelSoftThreshold(s_init=-3.0), exclude="head"
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        keras.optimizers.SGD(0.05), loss, jit_compile=jit_if_quicker()
    )
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(48, 8, 8, 2)).astype("float32"),
        rng.integers(0, 3, 48),
    )
    steering = kso.callbacks.TargetDensity(0.4, frequency=2)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[steering])
    live = {
        w.path.split("/")[0]: w.parametrization.live_channels()
        for w in kso.prunable_weights(model)
        if w.parametrization is not None
    }
    both = live["conv"] & live["depthwise"]
    assert both.sum() < 12
    small = kso.remove_channels(model)
    assert small.get_layer("hidden").units == live["hidden"].sum()
    assert small.get_layer("conv").filters == both.sum()
    expected = model.predict(x, verbose=0)
    loaded = reloaded(small, tmp_path)
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), expected, atol=1e-5
    )


@keras.saving.register_keras_serializable(package="tests.remove_channels")
class OfItsLayers(keras.Model):
    """A functional class whose constructor makes the layers."""

    def __init__(self, width=8, **kwargs):
        inputs = keras.Input((5,))
        hidden = L.Dense(width, activation="relu", name="hidden")
        super().__init__(
            inputs, L.Dense(3, name="head")(hidden(inputs)), **kwargs
        )
        self.hidden, self.width = hidden, width

    def get_config(self):
        return {"name": self.name, "width": self.width}


class Stacked(keras.Sequential):
    """A Sequential class whose constructor makes the layers."""

    def __init__(self, width=8, name=None):
        hidden = L.Dense(width, activation="relu", name="hidden")
        super().__init__(
            [keras.Input((5,)), hidden, L.Dense(3, name="head")], name=name
        )

    @classmethod
    def from_config(cls, config):
        return cls(name=config["name"])


def of_any_layers():
    made = OfItsLayers()
    return WithStep(made.inputs[0], made.outputs[0])


@pytest.mark.core
@pytest.mark.parametrize("make", [of_any_layers, OfItsLayers, Stacked])
def test_classes_derived_from_graphs(make, tmp_path):
    model = make()
    hidden = model.get_layer("hidden")
    zero_columns(hidden, range(3, 8))
    small = kso.remove_channels(model)
    assert small.get_layer("hidden").units == 3
    assert hidden.units == 8
    if make is of_any_layers:
        assert type(small) is WithStep
    else:  # its constructor would make layers of the full size
        assert type(small).__module__.startswith("keras.")
    small.save(tmp_path / "small.keras")
    assert_equal(keras.saving.load_model(tmp_path / "small.keras"), model)
