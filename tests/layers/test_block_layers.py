"""Layers of live blocks: equal to masked ones, usable as their namesakes, saved and stripped."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.layers import (
    BlockSparseConv2D,
    BlockSparseDense,
    BlockSparseEinsumDense,
)
from tests.helpers import (
    array,
    classifier_loss,
    compiled,
    data,
    jit_if_quicker,
    slow_on_jax,
)

L = keras.layers
ops = keras.ops
SHAPE = (4, 4, 16)
BIAS = {"bias_initializer": keras.initializers.RandomNormal(stddev=0.3, seed=1)}
HALF = {"density": 0.5, "kernel_initializer": "he_normal"}
UP = {"bias_axes": "de", "activation": "gelu"}
WIDE = {"density": 0.25, "bias_regularizer": "l2", "activity_regularizer": "l2"}
LAST = {"density": 0.25, "kernel_regularizer": keras.regularizers.L1L2(1e-3)}

# By name: the kind, its first arguments, and its options.
LAYERS = {
    "image": (
        "Conv2D",
        (32, 3, 2, "same"),
        {"activation": "relu", "block": (4, 8)} | HALF,
    ),
    "sequence": (
        "Conv1D",
        (16, 3, 1, "causal"),
        {"dilation_rate": 2, "block": 8} | HALF,
    ),
    "volume": ("Conv3D", (8, 2), {"activation": "tanh", "block": 4} | HALF),
    "up": (
        "EinsumDense",
        ("abc,cde->abde", (16, 2, 16)),
        {"block": 8} | UP | HALF,
    ),
    "down": (
        "EinsumDense",
        ("abde,dec->abc", (16, 16), None, "c"),
        {"block": (8, 4)} | HALF,
    ),
    "each": ("Dense", (8, "softmax"), {"block": 4} | HALF),
    "wide": ("Dense", (64, "gelu"), {"block": 16} | WIDE),
    "last": ("Dense", (32,), {"block": (16, 8)} | LAST),
}


def block_network():
    """A classifier of branches, with each of the layers."""
    layers = {
        name: getattr(kso.layers, f"BlockSparse{kind}")(
            *first, name=name, seed=k, **options, **BIAS
        )
        for k, (name, (kind, first, options)) in enumerate(LAYERS.items(), 1)
    }
    inputs = keras.Input(SHAPE)
    sequence = L.Reshape((16, 16))(inputs)
    branches = [
        layers["image"](inputs),
        layers["sequence"](sequence),
        layers["volume"](L.Reshape((4, 2, 2, 16))(inputs)),
        layers["down"](layers["up"](sequence)),
        L.TimeDistributed(layers["each"])(sequence),
        layers["last"](layers["wide"](L.Flatten()(inputs))),
    ]
    heads = [
        L.Dense(3, name=f"head_{k}")(L.Flatten()(x))
        for k, x in enumerate(branches)
    ]
    return keras.Model(inputs, L.Add()(heads))


@slow_on_jax
@pytest.mark.core
def test_outputs_and_steps_equal_those_of_masked_layers():
    model = block_network()
    twin = kso.convert(model, "masked")
    x, y = data(model, 3, count=8)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), twin.predict(x, verbose=0), atol=1e-5
    )
    weights = [
        weight
        for weight in kso.prunable_weights(model)
        if weight.storage is not None
    ]
    assert len(weights) == len(LAYERS)
    masked = {weight.path: weight for weight in kso.prunable_weights(twin)}
    assert all(
        type(masked[w.path].parametrization) is kso.FixedMask for w in weights
    )
    before = {weight.path: weight.value for weight in weights}
    for trained in (model, twin):
        trained.compile(
            keras.optimizers.SGD(1.0),
            classifier_loss(),
            jit_compile=jit_if_quicker(),
        )
        trained.train_on_batch(x, y)
    for path, value in before.items():
        assert np.abs(masked[path].value - value).max() > 1e-4
    for weight in weights:
        expected = masked[weight.path].value
        np.testing.assert_allclose(
            weight.value, expected, atol=1e-5, err_msg=weight.path
        )
    biases = [
        [v for v in m.trainable_variables if v.name == "bias"]
        for m in (model, twin)
    ]
    for ours, theirs in zip(*biases, strict=True):
        np.testing.assert_allclose(
            array(ours), array(theirs), atol=1e-5, err_msg=ours.path
        )


@pytest.mark.core
def test_saved_loaded_cloned_and_stripped(tmp_path):
    model = block_network()
    x, _ = data(model, 3, count=8)
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again.predict(x, verbose=0), expected)
    for ours, theirs in zip(model.weights, again.weights, strict=True):
        np.testing.assert_array_equal(array(ours), array(theirs))
    copy = keras.models.clone_model(model)
    copy.load_weights(tmp_path / "model.keras")
    np.testing.assert_array_equal(copy.predict(x, verbose=0), expected)
    copy.set_weights(model.get_weights())
    np.testing.assert_array_equal(copy.predict(x, verbose=0), expected)

    plain = kso.strip(model)
    assert not any(
        "sparse_ortho" in type(layer).__module__ for layer in plain.layers
    )
    np.testing.assert_allclose(plain.predict(x, verbose=0), expected, atol=1e-5)
    assert [w.path for w in kso.prunable_weights(plain)] == [
        w.path for w in kso.prunable_weights(model)
    ]


def test_prunable_weights_and_report():
    model = block_network()
    weights = {w.path: w for w in kso.prunable_weights(model, flops=True)}
    plain = {
        w.path: w for w in kso.prunable_weights(kso.strip(model), flops=True)
    }
    assert weights.keys() == plain.keys()
    for path, weight in weights.items():
        assert weight.shape == plain[path].shape
        assert weight.flops == plain[path].flops, path
        np.testing.assert_array_equal(weight.value, plain[path].value)
        if weight.storage is not None:
            assert weight.live == weight.storage.mask_value().sum()
            assert weight.density in (0.25, 0.5)
            assert weight.layout == plain[path].layout
    summary = kso.report(model)
    assert summary.live == sum(w.live for w in weights.values())
    assert summary.sparse_flops < 0.6 * summary.flops
    model.summary(print_fn=lambda text, line_break=False: None)
    # A budget of what there is.
    assert kso.Budget.from_model(model).live == summary.live


@pytest.mark.parametrize(
    ("asked", "made"), [(0.23, 0.25), (0.27, 0.25), (0.36, 0.375)]
)
def test_the_nearest_possible_density_is_taken(asked, made):
    layer = BlockSparseDense(64, density=asked, block=8, seed=0)
    layer.build((None, 64))
    assert layer.density == made


@pytest.mark.core
def test_report_shows_the_orthogonality_of_blocks_as_long_as_they_are_as_drawn(
    tmp_path,
):
    structure = kso.Block(8, 8, regular=True)
    dense = keras.Sequential(
        [keras.Input((32,)), L.Dense(64, name="a"), L.Dense(32, name="b")]
    )
    model = kso.convert(
        kso.sparsify(dense, 0.25, "uniform", structure=structure, seed=0),
        "blocks",
    )
    own = BlockSparseDense(
        32, density=0.25, block=8, gain=2.0, seed=1, name="c"
    )
    other = BlockSparseDense(
        32,
        density=0.25,
        block=8,
        kernel_initializer="he_normal",
        seed=1,
        name="d",
    )
    model = keras.Sequential([keras.Input((32,)), *model.layers, own, other])

    def errors(model):
        return [row.orthogonality_error for row in kso.report(model).rows]

    model.save(tmp_path / "drawn.keras")
    for found in (model, keras.models.load_model(tmp_path / "drawn.keras")):
        *drawn, last = errors(found)
        assert max(drawn) < 1e-6
        assert last is None
    own.blocks.assign(array(own.blocks) * 1.5)
    assert [error is None for error in errors(model)] == [
        False,
        False,
        True,
        True,
    ]
    assert (
        kso.report(model, orthogonality="all").rows[2].orthogonality_error
        < 1e-6
    )
    model.save(tmp_path / "changed.keras")
    loaded = keras.models.load_model(tmp_path / "changed.keras")
    assert [error is None for error in errors(loaded)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.core
def test_default_kernel_is_exactly_orthogonal_and_reproducible():
    for layer, shape in (
        (
            BlockSparseDense(128, density=0.25, block=8, gain=1.5, seed=3),
            (None, 64),
        ),
        (
            BlockSparseConv2D(32, 3, density=0.5, block=8, gain=1.5, seed=3),
            (None, 5, 5, 32),
        ),
    ):
        layer.build(shape)
        kernel = layer.kernel_value().astype("float64")
        matrix = kernel if kernel.ndim == 2 else kernel[1, 1]
        inputs = len(matrix)
        assert np.abs(matrix @ matrix.T - 2.25 * np.eye(inputs)).max() < 2e-6
        assert np.count_nonzero(kernel) == np.count_nonzero(matrix)
        again = type(layer).from_config(layer.get_config())
        again.build(shape)
        np.testing.assert_array_equal(
            again.kernel_value(), layer.kernel_value()
        )
        mask = layer.mask_value()
        assert mask.mean() == layer.density
        assert not layer.kernel_value()[~mask].any()


def test_initializers_of_keras_see_the_live_fans():
    fans = {"lecun_normal": 64, "glorot_normal": (64 + 32) / 2}
    for name, fan in fans.items():
        layer = BlockSparseDense(
            256, density=0.125, block=16, kernel_initializer=name, seed=0
        )
        layer.build((None, 512))
        assert layer.blocks.shape == (16, 4, 16, 16)
        np.testing.assert_allclose(
            array(layer.blocks).std(), fan**-0.5, rtol=0.02
        )


@pytest.mark.core
def test_channels_first_and_pointwise_convolutions():
    x = np.random.default_rng(0).normal(size=(2, 16, 6, 6)).astype("float32")
    for options in (
        {"data_format": "channels_first"},
        {"data_format": "channels_last"},
    ):
        inputs = (
            x
            if options["data_format"] == "channels_first"
            else x.transpose(0, 2, 3, 1)
        )
        for size, strides in ((3, 1), (1, 1), (1, 2)):
            layer = BlockSparseConv2D(
                32,
                size,
                strides,
                "same",
                density=0.5,
                block=8,
                activation="relu",
                **options,
            )
            layer.build(inputs.shape)
            plain = layer.to_dense_layer()
            # Without XLA TensorFlow has no convolution with channels first on processors.
            outputs, expected = (
                array(
                    compiled(lambda v, used=used: used(v), xla=True)(
                        ops.convert_to_tensor(inputs)
                    )
                )
                for used in (layer, plain)
            )
            assert outputs.shape == layer.compute_output_shape(inputs.shape)
            np.testing.assert_allclose(outputs, expected, atol=1e-5)


@pytest.mark.core
def test_bias_where_all_sizes_are_equal():
    # Keras' own EinsumDense adds the bias along the wrong axis here on TensorFlow.
    x = np.random.default_rng(0).normal(size=(8, 8, 8, 8)).astype("float32")
    options = {"density": 0.5, "block": 2, "bias_initializer": "random_normal"}
    for layer, inputs, equation, bias in (
        (BlockSparseDense(8, **options), x[0, 0], "ab,bc->ac", (8,)),
        (
            BlockSparseEinsumDense(
                "abc,cd->adb", (8, 8), bias_axes="d", **options
            ),
            x[0],
            "abc,cd->adb",
            (8, 1),
        ),
        (
            BlockSparseConv2D(8, 1, data_format="channels_first", **options),
            x,
            "achw,xyco->aohw",
            (8, 1, 1),
        ),
    ):
        layer.build(inputs.shape)
        outputs = compiled(layer, xla=True)(ops.convert_to_tensor(inputs))
        expected = np.einsum(equation, inputs, layer.kernel_value())
        expected += array(layer.bias).reshape(bias)
        np.testing.assert_allclose(
            array(outputs), expected, atol=1e-5, err_msg=layer.name
        )


@pytest.mark.jax_only
def test_the_gradient_of_a_convolution_adds_no_padded_parts():
    """That of a slice for each line of blocks does, and took as long as the dense layer."""
    import jax

    layer = BlockSparseConv2D(
        32, 3, density=0.5, block=8, padding="same", seed=0
    )
    layer.build((None, 5, 5, 32))

    def total(x):
        return jax.numpy.sum(layer(x))

    program = str(
        jax.make_jaxpr(jax.grad(total))(np.ones((2, 5, 5, 32), "float32"))
    )
    assert "conv_general_dilated" in program
    assert " pad[" not in program
