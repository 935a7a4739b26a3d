"""Rows times a kernel are what its layer computes; moments are sums over all of them."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.calibration import _moments, stop_of
from keras_sparse_ortho.kernels import as_matrices
from tests.helpers import array

L = keras.layers

LAYERS = {
    "dense": (L.Dense(7), (5, 6)),
    "even taps": (
        L.Conv2D(4, (4, 2), strides=(3, 1), padding="same"),
        (9, 8, 3),
    ),
    "same dilation": (
        L.Conv2D(4, 3, dilation_rate=(2, 1), padding="same"),
        (9, 8, 3),
    ),
    "causal": (L.Conv1D(4, 3, padding="causal", dilation_rate=2), (9, 3)),
    "groups": (L.Conv1D(4, 4, strides=3, padding="same", groups=2), (11, 6)),
    "three axes": (
        L.Conv3D(4, (2, 3, 1), strides=(1, 2, 1), padding="same"),
        (4, 5, 3, 2),
    ),
    "depthwise": (
        L.DepthwiseConv2D(3, depth_multiplier=2, padding="same"),
        (6, 5, 3),
    ),
    "depthwise strides": (L.DepthwiseConv1D(3, strides=2), (7, 3)),
    "heads": (L.EinsumDense("abc,cde->abde", (None, 2, 4)), (5, 6)),
    "from heads": (L.EinsumDense("abcd,cde->abe", (None, 6)), (5, 2, 4)),
    "ellipsis": (L.EinsumDense("...x,xy->...y", 5), (2, 6)),
    "many matrices": (L.EinsumDense("abc,bcd->abd", (5, 6)), (5, 4)),
    "summed": (L.EinsumDense("abc,cd->ad", (6,)), (5, 4)),
    "transposed": (L.Conv1DTranspose(4, 3, strides=2, padding="same"), (7, 3)),
    "transposed, two axes": (
        L.Conv2DTranspose(2, (3, 4), strides=(2, 3)),
        (5, 4, 3),
    ),
    "pointwise": (
        L.SeparableConv2D(4, 3, strides=2, depth_multiplier=2),
        (9, 8, 3),
    ),
}


def last_kernel(layer, shape):
    model = keras.Sequential([keras.Input(shape), layer])
    return model, kso.prunable_weights(model)[-1]


def moments(stop, *inputs, **options):
    """Sums over all rows of calls with the same inputs, four samples or more."""
    found = []
    stop._solve = lambda *parts: found.extend(parts)
    stop.add(*(keras.ops.convert_to_tensor(x) for x in inputs), **options)
    stop.finish()
    assert found[1].rows
    return found[0] + found[1]


def stop_at(model, weight):
    return stop_of(model, weight, None)


def rows_at(model, weight):
    return stop_at(model, weight)._rows


@pytest.mark.core
@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_matrices_are_the_layers_call(name):
    layer, shape = LAYERS[name]
    model, weight = last_kernel(layer, shape)
    x = np.random.default_rng(0).normal(size=(5, *shape)).astype("float32")
    stop = stop_at(model, weight)
    matrices = as_matrices(weight.raw_value(), weight.layout)
    rows = stop._rows(x.astype("float64"))
    # Each matrix gives some of the outputs at every position.
    found = np.moveaxis(rows @ matrices, 0, 1)
    expected = array(layer(x))
    np.testing.assert_allclose(
        found.reshape(expected.shape), expected, atol=1e-5
    )
    sums = moments(stop, x)
    np.testing.assert_allclose(
        sums.gram, np.swapaxes(rows, 1, 2) @ rows, atol=1e-9
    )
    assert sums.rows == rows.shape[1]


@pytest.mark.jax_only  # TensorFlow has no such convolution on the CPU
def test_channels_first():
    layer = L.Conv2D(
        4, 3, strides=2, padding="same", data_format="channels_first"
    )
    model, weight = last_kernel(layer, (3, 9, 8))
    x = np.random.default_rng(0).normal(size=(2, 3, 9, 8)).astype("float32")
    found = rows_at(model, weight)(x) @ as_matrices(
        weight.raw_value(), weight.layout
    )
    expected = np.moveaxis(array(layer(x)), 1, -1)
    np.testing.assert_allclose(
        found.reshape(expected.shape), expected, atol=1e-5
    )


def test_large_inputs_are_summed_in_pieces(monkeypatch):
    monkeypatch.setattr(_moments, "_CHUNK", 1000)
    x = np.random.default_rng(0).normal(size=(9, 9, 8, 3)).astype("float32")
    given = x + np.random.default_rng(1).normal(size=x.shape).astype("float32")
    for layer in (L.Conv2D(4, 3), L.Dense(2)):
        stop = stop_at(*last_kernel(layer, (9, 8, 3)))
        rows, wanted = (
            stop._rows(inputs.astype("float64")) for inputs in (x, given)
        )
        sums, turned = moments(stop, x, given), np.swapaxes(rows, 1, 2)
        np.testing.assert_allclose(sums.gram, turned @ rows, rtol=1e-12)
        np.testing.assert_allclose(
            sums.across, turned @ (wanted - rows), atol=1e-9
        )


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
def test_sums_in_float32_are_closer_than_rows_could_tell(scale):
    """Off by 1e-6 of the norms of two columns; rows put an entry off by a hundredth of them."""
    layer = L.Conv2D(4, 3, padding="same")
    stop = stop_at(*last_kernel(layer, (16, 16, 8)))
    rng = np.random.default_rng(0)
    x, given = scale * (3 + rng.normal(size=(2, 64, 16, 16, 8)))
    x, given = x.astype("float32"), given.astype("float32")
    assert x.size > _moments._FEW_ENTRIES
    rows, given_rows = (
        stop._rows(inputs.astype("float64")) for inputs in (x, given)
    )
    assert rows.shape[1] > _moments._PRODUCT_ROWS
    sums = moments(stop, x, given)
    columns = np.swapaxes(rows, 1, 2)
    norms = np.sqrt(np.sum(rows**2, axis=1))[0]
    bound = 1e-6 * np.outer(norms, norms)
    assert sums.gram.dtype == np.float64
    assert np.all(np.abs(sums.gram - columns @ rows) < bound)
    expected = columns @ (given_rows - rows)
    assert np.all(np.abs(sums.across - expected) < bound)


@pytest.mark.core
@pytest.mark.parametrize(
    "layer",
    [
        L.Conv2D(4, 3, strides=2, padding="same"),
        L.DepthwiseConv2D(3),
        L.SeparableConv2D(4, 3),
        L.Conv2DTranspose(2, 3),
    ],
)
def test_positions_of_convolutions_are_drawn_where_they_are_many(
    layer, monkeypatch
):
    """Each sample gives as many rows; all positions take part, the same in both models."""
    monkeypatch.setattr(_moments, "_ROWS_AN_INPUT", 2)
    model, weight = last_kernel(layer, (9, 8, 3))
    rng = np.random.default_rng(0)
    x, given = rng.normal(size=(2, 12, 9, 8, 3)).astype("float32")
    every = stop_at(model, weight)._rows
    count = every.positions(x)
    wanted = -(-2 * every(x[:1].astype("float64")).shape[-1] // 12)
    assert wanted < count
    stop = stop_of(model, weight, None, samples=12, least_rows=1)
    sums = moments(stop, x, given)
    assert sums.rows == 12 * wanted
    # A sample's rows are some of all its rows.
    chosen = stop_of(
        model, weight, None, samples=12, least_rows=1
    )._draw_positions(x)
    assert chosen.shape == (12, wanted)
    assert np.bincount(chosen.ravel(), minlength=count).max() <= -(
        -12 * wanted // count
    )
    rows = every(x.astype("float64"))
    matrices, _, inputs = rows.shape
    by_sample = rows.reshape(matrices, 12, count, inputs)
    some = by_sample[:, np.arange(12)[:, None], chosen].reshape(
        matrices, -1, inputs
    )
    np.testing.assert_allclose(
        sums.gram, np.swapaxes(some, 1, 2) @ some, rtol=1e-5, atol=1e-5
    )
    # Batches change nothing, and there is no `across` where both models are the same.
    small, same = [], stop_of(model, weight, None, samples=12, least_rows=1)
    same._solve = lambda *parts: small.append(parts[0] + parts[1])
    for start in (0, 8):
        same.add(x[start : start + 8], x[start : start + 8])
    same.finish()
    np.testing.assert_allclose(small[0].gram, sums.gram, rtol=1e-9)
    assert not small[0].across.any()


@pytest.mark.core
@pytest.mark.parametrize("kind", [L.SimpleRNN, L.GRU, L.LSTM])
@pytest.mark.parametrize("backwards", [False, True])
def test_kernels_of_cells_multiply_inputs_and_the_states_before_them(
    kind, backwards
):
    """Their moments are those of a loop over the steps, without those that are masked."""
    layer = kind(3, go_backwards=backwards, name="rnn")
    model = keras.Sequential([keras.Input((6, 4)), L.Masking(), layer])
    x = np.random.default_rng(0).normal(size=(5, 6, 4)).astype("float32")
    mask = np.arange(6) < np.array([6, 4, 2, 5, 3])[:, None]
    weights = {
        w.path.rpartition("/")[2]: w for w in kso.prunable_weights(model)
    }
    order = slice(None, None, -1) if backwards else slice(None)
    states, grams = (
        layer.cell.get_initial_state(batch_size=5),
        np.zeros((2, 4, 4)),
    )
    for step in range(6):
        live = mask[:, order][:, step]
        now, before = x[:, order][:, step], array(states[0])
        grams[0] += now[live].T @ now[live]
        grams[1, :3, :3] += before[live].T @ before[live]
        _, after = layer.cell(now, states)
        states = [
            keras.ops.where(live[:, None], a, b)
            for a, b in zip(after, states, strict=True)
        ]
    tensor = keras.ops.convert_to_tensor(mask)
    inputs = moments(stop_at(model, weights["kernel"]), x, mask=tensor)
    np.testing.assert_allclose(inputs.gram[0], grams[0], atol=1e-4)
    recurrent = moments(
        stop_at(model, weights["recurrent_kernel"]), x, mask=tensor
    )
    np.testing.assert_allclose(recurrent.gram[0], grams[1, :3, :3], atol=1e-4)
    assert layer.return_sequences is False


def test_tokens_are_counted():
    model = keras.Sequential(
        [keras.Input((6,), dtype="int32"), L.Embedding(7, 3)]
    )
    tokens = np.random.default_rng(0).integers(0, 6, (8, 6))
    sums = moments(stop_at(model, kso.prunable_weights(model)[0]), tokens)
    np.testing.assert_array_equal(
        sums.gram, np.bincount(tokens.ravel(), minlength=7)[None]
    )


class Doubled(L.Dense):
    def call(self, inputs):
        return super().call(2.0 * inputs)


class Named(L.Dense):
    pass


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Doubled(3), (4,)),
        (L.GRU(3, reset_after=False), (5, 4)),
        (L.RNN([L.LSTMCell(3), L.LSTMCell(2)]), (5, 4)),
        (L.ConvLSTM1D(3, 2), (5, 7, 2)),
    ],
    ids=["own call", "reset before", "stacked cells", "convolutional cell"],
)
def test_kernels_whose_rows_are_not_known(layer, shape):
    assert stop_at(*last_kernel(layer, shape)) is None


def test_kernels_that_are_summed_alone_have_no_rows():
    model, weight = last_kernel(L.EinsumDense("ab,bc->ac", (3,)), (4,))
    assert stop_at(model, weight) is not None
    weight.owner.equation = "ab,bcd->ac"  # Keras builds no such kernel
    assert stop_at(model, weight) is None
    assert stop_at(*last_kernel(Named(3), (4,))) is not None
