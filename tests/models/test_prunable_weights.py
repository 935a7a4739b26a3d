"""`prunable_weights`: paths that outlive wrapping, and what is a kernel."""

import dataclasses

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from tests.helpers import array
from tests.models.networks import sequential

L = keras.layers
X = np.random.default_rng(1).normal(size=(8, 12)).astype("float32")
pytestmark = pytest.mark.core


def test_biases_and_normalization_are_not_listed():
    names = [weight.path for weight in kso.prunable_weights(sequential())]
    assert [name.split("/")[-1] for name in names] == ["kernel"] * 3


@pytest.mark.parametrize(("live", "flops"), [(1, 3), (2, 7), (3, 10)])
def test_operations_of_live_entries_are_rounded(live, flops):
    """Of 10 operations and 3 entries: 3.33, 6.67 and 10."""
    (weight,) = kso.prunable_weights(
        keras.Sequential([keras.Input((3,)), L.Dense(1)])
    )
    weight.variable.assign([[1.0], [float(live > 1)], [float(live > 2)]])
    assert dataclasses.replace(weight, flops=10).sparse_flops == flops


def test_negative_entries_of_a_plain_layer_are_live():
    (weight,) = kso.prunable_weights(
        keras.Sequential([keras.Input((3,)), L.Dense(1)])
    )
    weight.variable.assign([[-1.0], [0.0], [2.0]])
    np.testing.assert_array_equal(weight.mask.ravel(), [True, False, True])
    assert weight.live == 2


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_weights_that_are_not_finite_are_refused(value):
    model = keras.Sequential([keras.Input((3,)), L.Dense(1, name="head")])
    model.layers[0].kernel.assign([[1.0], [value], [2.0]])
    (weight,) = kso.prunable_weights(model)
    with pytest.raises(
        NotPrunableError, match=r"'head/kernel' is not finite. Received: 1 inf"
    ):
        weight.finite_raw_value()
    with pytest.raises(NotPrunableError, match="'head/kernel' is not finite"):
        kso.prune(model, 0.5)


def test_the_raw_and_the_effective_value():
    model = kso.sparsify(sequential(), 0.3, seed=0)
    weight = kso.prunable_weights(model, flops=True)[0]
    mask = weight.parametrization.mask_value()
    weight.variable.assign(np.ones(weight.shape))
    assert weight.raw_value().all()
    np.testing.assert_array_equal(weight.value, mask.astype("float32"))
    assert weight.live == mask.sum()
    assert weight.sparse_flops == round(weight.flops * mask.mean())
    weight.parametrization.materialize()
    np.testing.assert_array_equal(weight.raw_value(), mask.astype("float32"))


def test_an_unbuilt_model_is_refused():
    with pytest.raises(
        NotPrunableError, match=r"must be built.*Received: a model whose layers"
    ):
        kso.prunable_weights(keras.Sequential([keras.layers.Dense(3)]))


class TiedByVariable(keras.Model):
    """Two layers that hold one variable, and no layer that holds both."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (
            L.Dense(12, name="first"),
            L.Dense(12, name="second"),
        )

    def build(self, input_shape):
        self.first.build(input_shape)
        self.second.build(input_shape)
        self.second._tracker.unlock()
        self.second.borrowed = self.first.kernel

    def call(self, x):
        return self.second(self.first(x)) + keras.ops.matmul(
            x, self.second.borrowed
        )


def test_a_variable_that_layers_share_is_refused():
    model = TiedByVariable()
    expected = array(model(X))
    with pytest.raises(
        NotPrunableError,
        match=r"'first/kernel' is used by several layers.*second",
    ):
        kso.sparsify(model, 0.3, seed=0)
    np.testing.assert_array_equal(array(model(X)), expected)


class WithHeads(keras.Model):
    """Has a head that is not called, and a layer that never has weights."""

    def __init__(self):
        super().__init__()
        self.main, self.other = (
            L.Dense(8, name="main"),
            L.Dense(3, name="other"),
        )
        self.idle = L.Lambda(lambda x: x, name="idle")

    def build(self, input_shape):
        self.main.build(input_shape)

    def call(self, x, other=False):
        return self.other(x) if other else self.main(x)


def test_layers_that_were_never_called_are_no_obstacle():
    model = WithHeads()
    model(np.ones((2, 4), "float32"))
    assert [weight.path for weight in kso.prunable_weights(model)] == [
        "main/kernel"
    ]
    with pytest.warns(
        UserWarning, match=r"never been called.*Received: \['other'\]"
    ):
        sparse = kso.sparsify(model, 0.5, seed=0)
    outputs = array(sparse(np.ones((2, 4), "float32")))
    np.testing.assert_array_equal(
        array(kso.strip(sparse)(np.ones((2, 4)))), outputs
    )
    with pytest.raises(NotPrunableError, match="must be built"):
        kso.sparsify(WithHeads(), 0.5)


class Pair(keras.Model):
    """Two models that a `train_step` would join, as in Keras' autoencoders: there is no `call`."""

    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder


def pair_of(*layers):
    return Pair(
        *(keras.Sequential([keras.Input((8,)), layer]) for layer in layers)
    )


def test_a_class_without_call_is_made_sparse_though_it_is_never_built():
    model = pair_of(L.Dense(8), L.Dense(8))
    assert not model.built
    sparse = kso.sparsify(model, 0.5, seed=0)
    report = kso.report(sparse)
    assert report.density == 0.5
    assert report.params == 2 * (64 + 8 + 64)  # kernel, bias, mask
    x = np.ones((2, 8), "float32")
    outputs = array(sparse.decoder(sparse.encoder(x)))
    plain = kso.strip(sparse)
    np.testing.assert_array_equal(
        array(plain.decoder(plain.encoder(x))), outputs
    )
    assert type(plain.encoder.layers[0]) is L.Dense
    with pytest.raises(NotPrunableError, match="must be built"):
        kso.sparsify(
            Pair(
                keras.Sequential([L.Dense(8)]), keras.Sequential([L.Dense(8)])
            ),
            0.5,
        )


# --- constants that look like kernels -------------------------------------------------------------


class Frontend(L.Layer):
    """Filters that are computed once, under names that kernels have, and a projection."""

    def build(self, input_shape):
        size = input_shape[-1]
        self.mel_kernel = self.add_weight(
            shape=(size, 5), trainable=False, name="mel_kernel"
        )
        self.kernel = keras.Variable(np.eye(5), trainable=False, name="kernel")
        self.out_kernel = self.add_weight(shape=(5, 8), name="out_kernel")

    def call(self, x):
        x = keras.ops.matmul(keras.ops.matmul(x, self.mel_kernel), self.kernel)
        return keras.ops.matmul(x, self.out_kernel)


class Blur(L.DepthwiseConv2D):
    """A low-pass filter in the place of the kernel of one of Keras' layers."""

    def build(self, input_shape):
        shape = (*self.kernel_size, input_shape[-1], 1)
        self.kernel = self.add_weight(
            shape=shape,
            initializer=keras.initializers.Constant(1 / 9),
            trainable=False,
            name="kernel",
        )
        self.bias = None
        self.built = True


class OwnSpectrogram(L.STFTSpectrogram):
    pass


def sound():
    fourier = keras.initializers.STFT("real", "hann")
    waves = keras.Input((256, 1))
    x = OwnSpectrogram(
        mode="log", frame_length=32, frame_step=16, fft_length=32, name="stft"
    )(waves)
    filters = L.Conv1D(
        9, 16, 16, kernel_initializer=fourier, use_bias=False, name="filters"
    )
    y = L.Dense(6, name="beside")(L.Flatten()(filters(waves)))
    x = Frontend(name="front")(x)
    x = L.Reshape((*x.shape[1:], 1))(x)
    x = Blur(3, use_bias=False, name="blur")(L.Conv2D(8, 3, name="conv")(x))
    x = L.Dense(6, name="head")(L.Flatten()(x))
    return keras.Model(waves, L.Add()([x, y]))


TRAINED = ["front/out_kernel", "conv/kernel", "head/kernel", "beside/kernel"]
CONSTANTS = ["stft", "front/mel_kernel", "front/kernel", "blur", "filters"]


def constants(model):
    layers = {layer.name: layer for layer in model.layers}
    front = layers["front"]
    values = [*layers["stft"].weights, front.mel_kernel, front.kernel]
    return [
        array(v)
        for v in (*values, layers["blur"].kernel, layers["filters"].kernel)
    ]


def test_what_a_layer_computes_is_no_kernel():
    found = kso.prunable_weights(sound(), unregistered=True)
    assert sorted(weight.path for weight in found) == sorted(TRAINED)


WAVES = np.random.default_rng(2).normal(size=(32, 256, 1)).astype("float32")
CHANGES = {
    "prune": lambda model: kso.prune(model, 0.4),
    "uniform": lambda model: kso.prune(model, 0.4, budget="uniform"),
    "obs": lambda model: kso.prune(
        model, 0.4, score="obs", data=WAVES, include=TRAINED[1:]
    ),
    "sparsify": lambda model: kso.sparsify(model, 0.4, seed=0),
    "random": lambda model: kso.sparsify(
        model, 0.4, initializer="random_sparse", seed=0
    ),
    "threshold": lambda model: kso.parametrize(
        model, kso.SoftThreshold(s_init=-2.0)
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_layer_computes_stays_and_takes_no_density(change):
    model = sound()
    before = constants(model)
    changed = CHANGES[change](model)
    report = kso.report(changed)
    assert {row.path for row in report.rows} == {*TRAINED}
    if change not in ("obs", "threshold"):
        assert report.live == round(0.4 * sum(row.size for row in report.rows))
    plain = kso.strip(changed)
    for value, other in zip(before, constants(plain), strict=True):
        np.testing.assert_array_equal(value, other)


@pytest.mark.parametrize("path", CONSTANTS)
def test_a_constant_cannot_be_named(path):
    with pytest.raises(
        kso.errors.UnknownWeightError, match=f"include='{path}'"
    ):
        kso.prune(sound(), 0.4, include=path)


def frozen_when_built():
    return L.Dense(12, trainable=False, name="base")


def test_frozen_layers_stay_prunable(tmp_path):
    model = keras.Sequential(
        [keras.Input((12,)), frozen_when_built(), L.Dense(4, name="head")]
    )
    model.layers[1].kernel.trainable = False
    both = ["base/kernel", "head/kernel"]
    model.save(tmp_path / "frozen.keras")
    loaded = keras.saving.load_model(tmp_path / "frozen.keras")
    for network in (model, loaded, keras.models.clone_model(model)):
        network.trainable = False
        assert [weight.path for weight in kso.prunable_weights(network)] == both
        pruned = kso.prune(network, 0.5)
        assert [
            weight.path for weight in kso.prunable_weights(kso.strip(pruned))
        ] == both


def test_a_layer_that_keras_quantized_still_has_a_kernel():
    model = keras.Sequential([keras.Input((12,)), L.Dense(8, name="a")])
    model.layers[0].quantize("int8")
    assert [weight.path for weight in kso.prunable_weights(model)] == [
        "a/kernel"
    ]
    with pytest.raises(NotPrunableError, match="is quantized"):
        kso.prune(model, 0.5)


class Declared(Frontend):
    pass


def test_a_registered_layer_says_itself_what_its_kernels_are():
    layouts = kso.initializers.kernel_layouts
    layouts.register(Declared, lambda layer: {"mel_kernel": None})
    model = keras.Sequential([keras.Input((12,)), Declared(name="front")])
    assert [weight.path for weight in kso.prunable_weights(model)] == [
        "front/mel_kernel"
    ]


class Trained(L.Layer):
    def build(self, input_shape):
        self.mel_kernel = self.add_weight(
            shape=(input_shape[-1], 4), name="mel_kernel"
        )
        self.filters = self.add_weight(shape=(4, 4), name="filters")

    def call(self, x):
        return keras.ops.matmul(
            keras.ops.matmul(x, self.mel_kernel), self.filters
        )


def test_converters_of_keras_hub_have_no_kernels():
    base = type(
        "PreprocessingLayer", (Trained,), {"__module__": "keras_hub.src.layers"}
    )
    converter = type("AudioConverter", (base,), {})(name="converter")
    model = keras.Sequential(
        [keras.Input((12,)), converter, L.Dense(8, name="a")]
    )
    found = kso.prunable_weights(model, unregistered=True)
    assert [weight.path for weight in found] == ["a/kernel"]
