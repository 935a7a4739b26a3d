"""What is particular to the wrapper itself."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import PrunableLayer
from keras_sparse_ortho.analysis import orthogonality_error
from keras_sparse_ortho.errors import UnknownWeightError
from keras_sparse_ortho.initializers import ExactOrthogonal, kernel_layouts
from keras_sparse_ortho.parametrizations import FixedMask, SoftThreshold
from tests.helpers import Chain, array, slow_on_jax

L = keras.layers
pytestmark = pytest.mark.core


@slow_on_jax
def test_it_has_the_name_and_call_arguments_of_its_layer():
    wrapper = PrunableLayer(L.Dense(4, name="hidden"), FixedMask(0.5))
    assert wrapper.name == "hidden"
    attention = PrunableLayer(L.MultiHeadAttention(2, 4), FixedMask(0.5))
    x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype("float32")
    outputs, scores = attention(
        x, x, return_attention_scores=True, use_causal_mask=True
    )
    assert outputs.shape == (2, 3, 8)
    # The first query sees the first key only: the causal mask was passed on.
    np.testing.assert_allclose(
        array(scores)[0, 0, 0], [1.0, 0.0, 0.0], atol=1e-6
    )


def test_the_layer_inside_is_built_by_its_own_build():
    """Keras puts a `build` into each layer that notes there what it was built for."""

    class Twice(L.Layer):
        def build(self, input_shape):
            if not hasattr(self, "kernel"):
                self.kernel = self.add_weight(
                    shape=(input_shape[-1], 4), name="kernel"
                )

        def call(self, x):
            return keras.ops.matmul(x, self.kernel)

    model = kso.sparsify(
        keras.Sequential([keras.Input((6,)), Twice(name="a")]), 0.5, seed=0
    )
    wrapper = model.get_layer("a")
    inner = wrapper.layer
    inner.built = False
    inner.build((5, 6))
    assert inner.built
    assert inner.get_build_config() == {"input_shape": (5, 6)}


def test_weights_can_be_chosen():
    recurrent = PrunableLayer(
        L.LSTM(4), FixedMask(0.5), weights=".*recurrent_kernel"
    )
    recurrent.build((None, 5, 3))
    assert list(recurrent.parametrizations) == ["lstm_cell/recurrent_kernel"]
    table = {"query/kernel": FixedMask(0.5), "value/kernel": FixedMask(0.25)}
    attention = PrunableLayer(L.MultiHeadAttention(2, 4), table)
    x = keras.Input((3, 8))
    attention(x, x)
    densities = {w.path: w.density for w in attention.prunable_weights}
    name = attention.name
    assert densities == {
        f"{name}/query/kernel": 0.5,
        f"{name}/value/kernel": 0.25,
    }
    big = PrunableLayer(
        L.LSTM(4), FixedMask(0.5), weights=lambda weight: weight.size > 50
    )
    big.build((None, 5, 3))
    assert list(big.parametrizations) == ["lstm_cell/recurrent_kernel"]


def restored(layer, weights):
    config = PrunableLayer(
        layer, FixedMask(0.5), weights=".*kernel"
    ).get_config()
    return PrunableLayer.from_config({**config, "weights": weights})


@pytest.mark.parametrize(
    "weights", ["lstm_cell", ["lstm_cell/kernel", "lstm_cell"]]
)
def test_names_of_a_configuration(weights):
    layer = restored(L.LSTM(4), weights)
    # As long as it is not built.
    assert layer.get_config()["weights"] == weights
    layer.build((None, 5, 3))
    assert list(layer.parametrizations) == [
        "lstm_cell/kernel",
        "lstm_cell/recurrent_kernel",
    ]
    config = layer.get_config()
    assert config["weights"] is None
    assert set(config["parametrization"]) == set(layer.parametrizations)


@pytest.mark.parametrize("weights", ["a+/kernel", "(a+)+!", [".*kernel"]])
def test_a_configuration_runs_no_regular_expression(weights):
    # Python's engine takes 2 ** n steps for the second, where n is the length of the name.
    hostile = restored(L.TimeDistributed(L.Dense(4, name="a" * 22)), weights)
    with pytest.raises(UnknownWeightError, match=r"There are: .*Received: "):
        hostile.build((None, 3, 4))


def test_a_kernel_drawn_along_the_wrong_axes_is_drawn_again():
    layer = L.MultiHeadAttention(
        4, 8, kernel_initializer=ExactOrthogonal(0.2, seed=1)
    )
    wrapper = PrunableLayer(layer)
    x = keras.Input((5, 32))
    wrapper(x, x)
    for weight in wrapper.prunable_weights:
        matrix = weight.value.astype("float64").reshape(32, 32)
        assert np.abs(matrix.T @ matrix - np.eye(32)).max() < 1e-6


@pytest.mark.parametrize("lazily", [False, True], ids=["built", "traced first"])
def test_a_layer_that_is_built_late_draws_once(monkeypatch, lazily):
    drawn = []
    sample = ExactOrthogonal.sample

    def counted(self, shape, dtype=None, layout=None):
        drawn.append(tuple(shape))
        return sample(self, shape, dtype, layout)

    monkeypatch.setattr(ExactOrthogonal, "sample", counted)

    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            eoi = ExactOrthogonal(0.5, seed=1)
            self.dense = PrunableLayer(L.Dense(8, kernel_initializer=eoi))
            self.depthwise = PrunableLayer(
                L.DepthwiseConv1D(3, depthwise_initializer=eoi)
            )
            self.lstm = PrunableLayer(
                L.LSTM(
                    4,
                    kernel_initializer=eoi,
                    recurrent_initializer=ExactOrthogonal(0.5),
                )
            )

        def call(self, x):
            return self.lstm(self.depthwise(self.dense(x)))

    block = Block()
    if lazily:
        # Builds in a scope that only traces.
        keras.Sequential([keras.Input((6, 8)), block])
    else:
        block.dense.build((None, 6, 8))
        block.depthwise.build((None, 6, 8))
        block.lstm.build((None, 4, 8))
    assert sorted(drawn) == [(3, 8, 1), (4, 16), (8, 8), (8, 16)]
    for wrapper in (block.dense, block.depthwise, block.lstm):
        assert isinstance(
            next(iter(wrapper.parametrizations.values())), FixedMask
        )
        for weight in wrapper.prunable_weights:
            assert not weight.raw_value()[
                ~weight.parametrization.mask_value()
            ].any()
            # As before it was built.
            assert isinstance(weight.initializer, ExactOrthogonal)
            if weight.path != "depthwise_conv1d/kernel":
                assert orthogonality_error(weight.value, weight.layout) < 1e-6


def test_a_custom_layer_by_registration_and_by_duck_type():
    class Bilinear(keras.layers.Layer):
        def build(self, input_shape):
            self.form = self.add_weight(
                shape=(input_shape[-1], 4, 4), name="form"
            )

        def call(self, inputs):
            return keras.ops.einsum("bi,ijk->bjk", inputs, self.form)

    class Ducked(Bilinear):
        def get_prunable_weights(self):
            return [self.form]

    kernel_layouts.register(Bilinear, lambda layer: {"form": None})
    for layer in (Bilinear(), Ducked()):
        wrapper = PrunableLayer(layer, FixedMask(0.25))
        x = np.ones((2, 6), dtype="float32")
        outputs = array(wrapper(x))
        [weight] = wrapper.prunable_weights
        assert weight.live == 24
        np.testing.assert_allclose(outputs[0], weight.value.sum(0), atol=1e-6)


def test_built_inside_a_scope_that_only_traces():
    inner = PrunableLayer(L.Dense(4), FixedMask(0.25))
    keras.Sequential([keras.Input((8,)), Chain(inner)])
    [weight] = inner.prunable_weights
    mask = weight.parametrization.mask_value()
    assert mask.sum() == 8
    assert not weight.raw_value()[~mask].any()
    assert weight.raw_value()[mask].all()


def test_infinite_gradients_stay_off_the_mask():
    layer = PrunableLayer(L.Dense(4), FixedMask(0.25))
    layer.build((None, 8))
    mask = layer.parametrizations["kernel"]
    values = array(mask.effective(keras.ops.full((8, 4), np.inf)))
    assert np.isinf(values[mask.mask_value()]).all()
    assert not values[~mask.mask_value()].any()


def test_trainable_and_frozen():
    layer = PrunableLayer(L.Dense(4), FixedMask(0.25))
    layer.build((None, 8))
    assert [v.name for v in layer.trainable_variables] == ["kernel", "bias"]
    assert [v.name for v in layer.non_trainable_variables] == ["kernel_mask"]
    layer.trainable = False
    assert layer.trainable_variables == []
    assert not PrunableLayer(
        L.Dense(4, trainable=False), FixedMask(0.5)
    ).trainable


def masked(dense):
    return kso.sparsify(dense, 0.5, seed=0)


def learnt(dense):
    return kso.parametrize(dense, kso.SoftThreshold("channel"))


@pytest.mark.parametrize("verb", [masked, learnt])
def test_get_weights_begins_with_the_weights_of_the_layer(verb):
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    model = verb(
        keras.Sequential([keras.Input((8,)), L.Dense(16, name="hidden")])
    )
    layer = model.layers[0]
    kernel, bias, *more = layer.get_weights()
    assert kernel.shape == (8, 16)
    assert kernel.dtype == np.float32
    assert bias.shape == (16,)
    assert len(more) == len(layer.weights) - 2 > 0
    expected = array(model(x))
    layer.set_weights([np.zeros_like(kernel), bias + 1.0, *more])
    np.testing.assert_array_equal(array(model(x)), np.ones((4, 16)))
    layer.set_weights([kernel, bias, *more])
    np.testing.assert_array_equal(array(model(x)), expected)
    for wrong in ([kernel], [kernel, bias, *more, bias]):
        with pytest.raises(ValueError, match="weights"):
            layer.set_weights(wrong)


IDS = np.zeros((8, 4), "int32")


class Tied(keras.Model):
    """Projects by the embedding that it begins with."""

    def __init__(self):
        super().__init__()
        self.embedding = L.Embedding(50, 16)
        self.hidden = L.Dense(16)

    def call(self, ids):
        hidden = self.hidden(self.embedding(ids))
        return keras.ops.matmul(
            hidden, keras.ops.transpose(self.embedding.embeddings)
        )


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_a_weight_that_is_read_is_the_effective_one(storage):
    model = Tied()
    model(IDS)
    sparse = kso.sparsify(model, 0.2, seed=0, storage=storage)
    weight = kso.prunable_weights(sparse)[0]
    sparse.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=False)
    sparse.train_on_batch(IDS, np.ones((8, 4, 50)))
    mask = weight.parametrization.mask_value()
    np.testing.assert_array_equal(array(sparse.embedding.embeddings) != 0, mask)
    assert not weight.raw_value()[~mask].any()
    expected = array(sparse(IDS))
    np.testing.assert_allclose(
        array(kso.strip(sparse)(IDS)), expected, atol=1e-6
    )


def test_attributes_and_methods_show_through():
    recurrent = kso.PrunableLayer(L.LSTM(6, stateful=True), FixedMask(0.5))
    recurrent(np.ones((2, 3, 4), "float32"))
    assert recurrent.units == 6
    assert array(recurrent.states[0]).any()
    recurrent.reset_states()
    assert not array(recurrent.states[0]).any()
    with pytest.raises(AttributeError, match="no attribute 'unit'"):
        recurrent.unit  # noqa: B018
    assert not hasattr(recurrent, "_private")


class Scorer(L.Layer):
    """Has a method and layers that compute with its kernels."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parts = [
            L.Dense(4, use_bias=False, name="a"),
            L.Dense(4, use_bias=False, name="b"),
        ]

    def build(self, input_shape):
        for part in self.parts:
            part.build(input_shape)

    def call(self, x):
        return self.parts[0](x)

    def score(self, x):
        return keras.ops.sum(self.parts[0](x))


def test_methods_and_layers_inside_compute_with_effective_weights():
    wrapped = kso.PrunableLayer(Scorer(), SoftThreshold(s_init=-1.0))
    x = np.eye(4, dtype="float32")
    outputs = array(wrapped(x))
    raw = wrapped.layer.parts[0].get_weights()[0]
    assert (outputs != raw).any()
    assert float(array(wrapped.score(x))) == pytest.approx(
        outputs.sum(), rel=1e-6
    )
    np.testing.assert_array_equal(array(wrapped.parts[0](x)), outputs)
    np.testing.assert_array_equal(array(wrapped.parts[0].kernel), outputs)
    assert wrapped.parts[1].units == 4
