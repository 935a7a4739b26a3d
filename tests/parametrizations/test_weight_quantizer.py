"""Quantized weights in every storage: the grid, zeros, gradients, files, strip, XLA."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.parametrizations import (
    FakeQuantization,
    FixedMask,
    LearntScale,
    Palette,
    SoftThreshold,
)
from tests.helpers import array, jit, slow_case_on_jax

pytestmark = pytest.mark.core

STORAGES = ("masked", "compact", "blocks", "soft")
DTYPES = {"int8": 127, "int4": 7, "ternary": 1}


def network(storage, quantizer):
    """A network with kernels in a storage, all of them quantized."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Conv2D(16, 3, strides=2, name="conv", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(32, activation="relu", name="hidden"),
        keras.layers.Dense(4, name="head", dtype="float32"),
    ]
    dense = keras.Sequential([keras.Input((9, 9, 8)), *layers])
    if storage == "soft":
        model = kso.parametrize(dense, SoftThreshold(s_init=-4.0))
    elif storage == "blocks":
        options = {"structure": kso.Block(4, 4), "storage": "blocks", "exclude": "head"}
        model = kso.sparsify(dense, 0.5, "uniform", seed=0, **options)
    else:
        model = kso.sparsify(dense, 0.2, storage=storage, seed=0)
    for layer in model.layers:
        if hasattr(layer, "set_quantizer"):
            layer.set_quantizer(quantizer)
    return model


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(64, 9, 9, 8)).astype("float32"), rng.integers(0, 4, 64)


def fitted(model, epochs=2, **settings):
    x, y = data()
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit(),
    )
    model.fit(x, y, batch_size=32, epochs=epochs, shuffle=False, verbose=0, **settings)
    return model


def check_grid(model, dtype):
    quantized = [weight for weight in kso.prunable_weights(model) if weight.storage is not None]
    assert len(quantized) >= 2
    for weight in quantized:
        value, levels = weight.value, DTYPES[dtype]
        matrix = value.reshape(-1, value.shape[-1])
        scale = np.abs(matrix).max(0)
        steps = matrix[:, scale > 0] * (levels / scale[scale > 0])
        np.testing.assert_allclose(steps, np.rint(steps), atol=2e-5 * levels)
        assert not value[~weight.mask].any()
        assert (weight.raw_value() != value).any()
        integers, scales = weight.storage.quantizer.integers(value, weight.outputs_shape)
        assert integers.shape == weight.shape
        assert np.abs(integers).max() == levels
        np.testing.assert_allclose(integers * scales, value, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", STORAGES)
def test_effective_weights_are_on_the_grid_after_training(storage, dtype):
    model = fitted(network(storage, FakeQuantization(dtype)))
    check_grid(model, dtype)
    live = {weight.path: weight.live for weight in kso.prunable_weights(model)}
    x, _ = data()
    before = array(model(x))
    plain = kso.strip(model)
    assert all(type(layer).__module__.startswith("keras.") for layer in plain.layers)
    np.testing.assert_allclose(array(plain(x)), before, atol=1e-5)
    for weight in kso.prunable_weights(plain):
        assert weight.live <= live[weight.path]


@pytest.mark.parametrize("storage", STORAGES)
def test_resumed_training_equals_training_in_one_go(storage, tmp_path):
    whole = fitted(network(storage, FakeQuantization("int4")))
    half = fitted(network(storage, FakeQuantization("int4")), epochs=1)
    half.save(tmp_path / "half.keras")
    resumed = keras.models.load_model(tmp_path / "half.keras")
    x, y = data()
    np.testing.assert_array_equal(array(resumed(x)), array(half(x)))
    resumed.fit(x, y, batch_size=32, shuffle=False, verbose=0)
    for one, other in zip(whole.get_weights(), resumed.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    check_grid(resumed, "int4")


@pytest.mark.parametrize("storage", STORAGES)
def test_a_palette_is_learnt_and_saved(storage, tmp_path):
    model = network(storage, Palette(5, "int8"))
    x, _ = data()
    before = {w.path: w.storage.quantizer for w in kso.prunable_weights(model) if w.storage}
    before = {path: array(own.palette) for path, own in before.items()}
    fitted(model, epochs=1).save(tmp_path / "palette.keras")
    copy = keras.models.load_model(tmp_path / "palette.keras")
    np.testing.assert_array_equal(array(copy(x)), array(model(x)))
    plain = kso.strip(copy)
    np.testing.assert_allclose(array(plain(x)), array(model(x)), atol=1e-5)
    for weight in kso.prunable_weights(model):
        if weight.storage is None:
            continue
        value, quantizer = weight.value, weight.storage.quantizer
        assert not np.array_equal(array(quantizer.palette), before[weight.path])
        assert not value[~weight.mask].any()
        assert 3 <= len(np.unique(value)) <= 5
        integers, scale = quantizer.integers(value, weight.outputs_shape)
        np.testing.assert_allclose(integers * scale, value, rtol=1e-5)


@pytest.mark.parametrize("compiled", [False, True])
def test_values_of_a_palette_of_many_rows_get_the_same_sums(compiled):
    """2,550 entries: two rows and a part of one, where XLA adds up by row."""
    rng = np.random.default_rng(0)
    dense = keras.layers.Dense(50, use_bias=False)
    layer = kso.PrunableLayer(dense, FixedMask(0.5), quantizer=Palette(7))
    model = keras.Sequential([keras.Input((51,)), layer])
    quantizer = layer.parametrizations["kernel"].quantizer
    before, value = array(quantizer.palette), layer.prunable_weights[0].value
    x, y = rng.normal(size=(4, 51)), rng.normal(size=(4, 50))
    gradient = 2 * x.T @ (x @ value - y) / y.size
    want = [gradient[value == one].sum() for one in before]
    xla = compiled and keras.backend.backend() != "torch"
    model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=xla, run_eagerly=not compiled)
    model.train_on_batch(x, y)
    np.testing.assert_allclose(before - array(quantizer.palette), want, rtol=1e-4, atol=1e-5)


def test_values_of_an_int8_palette_are_the_nearest_integers():
    dense = keras.layers.Dense(4, use_bias=False)
    mask = FixedMask(mask=np.ones((1, 4), bool))
    layer = kso.PrunableLayer(dense, mask, quantizer=Palette(4, "int8"))
    layer.build((None, 1))
    layer.parametrizations["kernel"].quantizer.palette.assign([1.0, 0.305, -0.71])
    layer.layer.kernel.assign([[0.9, 0.3, -0.7, 0.01]])
    (weight,) = layer.prunable_weights
    np.testing.assert_allclose(weight.value * 127, [[127, 39, -90, 0]], atol=1e-4)  # 38.7, -90.2


def test_values_of_a_palette_get_the_sum_of_their_gradients():
    dense = keras.layers.Dense(1, use_bias=False)
    mask = np.array([[True], [True], [True], [False], [True]])
    layer = kso.PrunableLayer(dense, FixedMask(mask=mask), quantizer=Palette(3))
    model = keras.Sequential([keras.Input((5,)), layer])
    dense.kernel.assign([[0.9], [1.2], [-2.0], [0.0], [0.2]])
    layer.parametrizations["kernel"].quantizer.palette.assign([1.0, -1.5])
    value = layer.prunable_weights[0].value.ravel()
    np.testing.assert_array_equal(value, [1.0, 1.0, -1.5, 0.0, 0.0])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.train_on_batch(np.array([[1.0, 2.0, 4.0, 8.0, 1.0]]), np.array([[0.0]]))
    # y = -3, dL/dq = 2 y x
    palette = array(layer.parametrizations["kernel"].quantizer.palette)
    np.testing.assert_allclose(palette, [1 + 6 * 3, -1.5 + 6 * 4])
    want = [0.9 + 6, 1.2 + 12, -2 + 24, 0, 0.2 + 6]
    np.testing.assert_allclose(array(dense.kernel).ravel(), want, rtol=1e-6)


@pytest.mark.parametrize(
    "storage", ["compact", "blocks", *map(slow_case_on_jax, ["masked", "soft"])]
)
def test_scales_are_learnt_and_saved(storage, tmp_path):
    model = network(storage, LearntScale("int4"))
    x, _ = data()
    held = {w.path: w.storage.quantizer for w in kso.prunable_weights(model) if w.storage}
    before = {path: array(own.log_scale) for path, own in held.items()}
    fitted(model, epochs=1).save(tmp_path / "scales.keras")
    copy = keras.models.load_model(tmp_path / "scales.keras")
    np.testing.assert_array_equal(array(copy(x)), array(model(x)))
    plain = kso.strip(copy)
    np.testing.assert_allclose(array(plain(x)), array(model(x)), atol=1e-5)
    for weight in kso.prunable_weights(copy):
        if weight.storage is None:
            continue
        value, quantizer = weight.value, weight.storage.quantizer
        changed = array(quantizer.log_scale) != before[weight.path]
        assert changed.mean() > 0.7
        assert not value[~weight.mask].any()
        integers, scale = quantizer.integers(value, weight.outputs_shape)
        assert np.abs(integers).max() == 7
        np.testing.assert_allclose(integers * scale, value, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["int4", "ternary"])
def test_learnt_scales_start_where_rounding_changes_least(dtype):
    layer = kso.PrunableLayer(
        keras.layers.Dense(8, kernel_initializer=keras.initializers.RandomNormal(seed=0)),
        FixedMask(0.5),
        quantizer=LearntScale(dtype),
    )
    layer.build((None, 200))
    (weight,) = layer.prunable_weights
    raw, most = weight.raw_value(), DTYPES[dtype]
    found = np.square(weight.value - raw).sum(0)
    errors = []
    for scale in np.linspace(0.02, 1, 400)[:, None] * np.abs(raw).max(0) / most:
        rounded = np.clip(np.rint(raw / scale), -most, most) * scale
        errors.append(np.square(rounded - raw).sum(0))
    assert (found <= 1.1 * np.min(errors, 0)).all()


def test_gradients_of_a_learnt_scale():
    dense = keras.layers.Dense(1, use_bias=False)
    mask = np.array([[True], [True], [True], [False], [True]])
    layer = kso.PrunableLayer(dense, FixedMask(mask=mask), quantizer=LearntScale("int4"))
    model = keras.Sequential([keras.Input((5,)), layer])
    quantizer = layer.parametrizations["kernel"].quantizer
    dense.kernel.assign([[0.9], [1.2], [-4.0], [0.0], [0.2]])
    quantizer.log_scale.assign([[np.log(0.5)]])
    value = layer.prunable_weights[0].value.ravel()
    np.testing.assert_allclose(value, [1.0, 1.0, -3.5, 0.0, 0.0], rtol=1e-6)
    model.compile(keras.optimizers.SGD(1e-2), "mse")
    model.train_on_batch(np.array([[1.0, 2.0, 4.0, 8.0, 1.0]]), np.array([[0.0]]))
    # y = -11, dL/dq = 2 y x; w / s = 1.8, 2.4, -8, 0, 0.4
    of_scale = -22 * (1 * (2 - 1.8) + 2 * (2 - 2.4) + 4 * -7 + 1 * (0 - 0.4)) * 0.5 / np.sqrt(28)
    found = array(quantizer.log_scale)[0, 0] - np.log(0.5)
    np.testing.assert_allclose(found, -1e-2 * of_scale, rtol=1e-4)
    want = [0.9 + 0.22, 1.2 + 0.44, -4.0, 0, 0.2 + 0.22]  # the clipped one stays
    np.testing.assert_allclose(array(dense.kernel).ravel(), want, rtol=1e-5)


def test_in_compact_storage_a_palette_is_given_live_values_alone(monkeypatch):
    sizes, call = [], Palette.__call__

    def counted(self, value):
        sizes.append(int(np.prod(value.shape)))
        return call(self, value)

    masked, compact = (network(storage, Palette(8, "int8")) for storage in ("masked", "compact"))
    fitted(masked)
    monkeypatch.setattr(Palette, "__call__", counted)
    fitted(compact)
    assert set(sizes) <= {weight.live for weight in kso.prunable_weights(compact)}
    for one, other in zip(masked.trainable_variables, compact.trainable_variables, strict=True):
        if one.path.endswith("palette"):
            np.testing.assert_allclose(array(one), array(other), rtol=1e-4, atol=1e-6)
    x, _ = data()
    np.testing.assert_allclose(array(masked(x)), array(compact(x)), atol=1e-3)


def test_mixed_precision_trains_quantized_weights():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = fitted(network("masked", FakeQuantization("int8")))
    finally:
        keras.config.set_dtype_policy("float32")
    check_grid(model, "int8")


def test_scales_are_those_of_each_output():
    dense = keras.layers.Dense(2, use_bias=False)
    layer = kso.PrunableLayer(dense, FixedMask(1.0), quantizer=FakeQuantization("int4"))
    layer.build((None, 3))
    dense.kernel.assign([[0.0, 70.0], [0.9, 14.0], [-1.75, 26.0]])
    want = [[0.0, 70.0], [1.0, 10.0], [-1.75, 30.0]]
    np.testing.assert_array_equal(layer.prunable_weights[0].value, want)
    integers, scale = layer.parametrizations["kernel"].quantizer.integers(np.array(want), (1, 3))
    np.testing.assert_array_equal(integers, [[0, 7], [4, 1], [-7, 3]])
    np.testing.assert_array_equal(scale, [[0.25, 10.0]])


def test_ternary_weights_have_the_mean_of_what_is_above_the_threshold():
    dense = keras.layers.Dense(1, use_bias=False)
    mask = np.array([[True], [True], [True], [False]])
    layer = kso.PrunableLayer(dense, FixedMask(mask=mask), quantizer=FakeQuantization("ternary"))
    layer.build((None, 4))
    dense.kernel.assign([[3.0], [-5.0], [1.0], [0.0]])  # mean 3, threshold 2.1
    np.testing.assert_array_equal(layer.prunable_weights[0].value.ravel(), [4, -4, 0, 0])


def test_the_gradient_goes_straight_through_to_live_weights():
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    mask = np.array([[True], [False], [True]])
    layer = kso.PrunableLayer(dense, FixedMask(mask=mask), quantizer=FakeQuantization("int4"))
    model = keras.Sequential([keras.Input((3,)), layer])
    dense.kernel.assign([[0.9], [0.0], [-1.75]])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    x = np.array([[1.0, 5.0, 2.0]])
    model.train_on_batch(x, np.array([[0.0]]))  # y = 1 - 3.5, dL/dq = 2 y x
    np.testing.assert_allclose(array(dense.kernel).ravel(), [0.9 + 5, 0.0, -1.75 + 10], rtol=1e-6)


def test_another_storage_is_refused():
    model = network("masked", FakeQuantization("int8"))
    before = model.get_weights()
    with pytest.raises(NotPrunableError, match="convert it before"):
        kso.convert(model, "compact")
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="`dtype` must be one of"):
        FakeQuantization("int2")
    with pytest.raises(ValueError, match="`size` must be 3 or more"):
        Palette(2)
    with pytest.raises(ValueError, match="`dtype` must be 'int8' or None"):
        Palette(16, "int4")
    with pytest.raises(ValueError, match=r"at most 256. Received: size=257"):
        Palette(257)
    with pytest.raises(ValueError, match="must be a WeightQuantizer"):
        kso.PrunableLayer(keras.layers.Dense(2), FixedMask(0.5), quantizer="int8")
    low_rank = kso.PrunableLayer(keras.layers.Dense(8), kso.LowRankSoftThreshold(rank=2))
    low_rank.build((None, 8))
    with pytest.raises(NotPrunableError, match="product of two factors"):
        low_rank.set_quantizer(FakeQuantization())
    layer = kso.PrunableLayer(keras.layers.Dense(8), FixedMask(0.5), quantizer=FakeQuantization())
    layer.build((None, 8))
    with pytest.raises(NotPrunableError, match="not quantized yet"):
        layer.set_quantizer(FakeQuantization())
