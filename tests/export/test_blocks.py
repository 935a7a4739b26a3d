"""Routes `+blocks`: whole blocks that zeros leave, gathered for one grouped convolution."""

import functools

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import ExportRouteError
from keras_sparse_ortho.export import (
    ConvAsConvolution,
    DenseAsConvolution,
    as_convolutions,
    export_litert,
    load_litert,
    plan_of,
    zero_blocks,
)
from keras_sparse_ortho.kernels import kernel_layouts, walk
from keras_sparse_ortho.orthogonal import from_blocks, to_blocks
from tests.export.models import exported as export
from tests.export.models import interpreter_of, resized, rms
from tests.helpers import array

L = keras.layers
ROUTES = [
    "float32+blocks",
    "float16+blocks",
    "dynamic_int8+blocks",
    "int8+blocks",
]


def in_blocks(model, width=16, live=2, seed=0, uneven=False):
    """Zeros in every kernel but for `live` blocks of each output block; biases that are not 0.

    Where it is `uneven`, every third output block has one block less.
    """
    rng = np.random.default_rng(seed)
    for layer, _ in walk(model, ""):
        kernel = getattr(layer, "kernel", None)
        if not isinstance(kernel, keras.Variable):
            continue
        layout = kernel_layouts(layer)["kernel"]
        value = np.array(keras.ops.convert_to_numpy(kernel.value))
        ones = layout.to_canonical(np.ones_like(value))
        if min(ones.shape[-2:]) < 4 * width:
            continue
        table = to_blocks(np.zeros(ones.shape[-2:]), width, width)
        for j in range(table.shape[2]):
            table[
                rng.permutation(len(table))[: live - (uneven and j % 3 == 1)],
                :,
                j,
            ] = 1
        mask = from_blocks(table, *ones.shape[-2:])
        mask = layout.from_canonical(
            np.broadcast_to(mask, ones.shape), value.shape
        )
        kernel.assign(value * mask * np.sqrt(len(table) / live))
        if getattr(layer, "bias", None) is not None:
            layer.bias.assign(0.1 * rng.normal(size=layer.bias.shape))
    return model


KINDS = {
    "dense": (
        (64,),
        lambda: [
            L.Dense(64, activation="relu"),
            L.Dense(127, activation="gelu"),
            L.Dense(64, activation="softmax"),
        ],
    ),
    "sequence": (
        (8, 64),
        lambda: [
            L.Dense(127, activation="relu"),
            L.Conv1D(
                64, 3, padding="causal", dilation_rate=2, activation="relu"
            ),
            L.Conv1D(127, 3, strides=2, padding="same"),
            L.Conv1D(64, 2),
        ],
    ),
    "image": (
        (9, 9, 64),
        lambda: [
            L.Conv2D(127, 3, padding="same", activation="relu"),
            L.Conv2D(64, (3, 2), strides=2, activation="silu"),
            L.Conv2D(64, 1, activation="relu"),
            L.Conv2D(64, 3, dilation_rate=2, padding="same", use_bias=False),
        ],
    ),
    "einsum": (
        (6, 64),
        lambda: [
            L.EinsumDense(
                "...c,cd->...d", 64, bias_axes="d", activation="relu"
            ),
            L.EinsumDense(
                "abc,cde->abde", (6, 4, 16), bias_axes="de", activation="relu"
            ),
            L.EinsumDense("abde,dec->abc", (6, 64), bias_axes="c"),
            L.EinsumDense(
                "abc,cde->adbe", (4, 6, 16), bias_axes="db", activation="relu"
            ),
            L.EinsumDense("adbe,edc->abc", (6, 64), activation="softmax"),
        ],
    ),
}


def network(kind):
    shape, made = KINDS[kind]
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(shape, name="x"), *made()], name=kind)
    return in_blocks(model, uneven=kind in ("dense", "image"))


class Attending(keras.Model):
    def __init__(self):
        super().__init__(name="attending")
        self.first = L.Dense(64, activation="relu")
        self.attention = L.MultiHeadAttention(4, 16)
        self.inner = keras.Sequential([L.Dense(64), L.Dense(10)])

    def call(self, x):
        return self.inner(self.attention(self.first(x), x))


def attending():
    keras.utils.set_random_seed(0)
    model = Attending()
    x = np.random.default_rng(0).normal(size=(3, 6, 64)).astype("float32")
    model(x)
    return in_blocks(model), x


@pytest.mark.parametrize("rows_apart", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_in_keras_are_equal(kind, rows_apart):
    model = network(kind)
    x = (
        np.random.default_rng(1)
        .normal(size=(3, *KINDS[kind][0]))
        .astype("float32")
    )
    other = as_convolutions(model, rows_apart)
    new = [
        layer for layer in other.layers if isinstance(layer, keras.layers.Layer)
    ]
    kinds = {DenseAsConvolution, ConvAsConvolution}
    assert {type(layer) for layer in new} <= kinds
    assert len(new) == len(model.layers) == len(plan_of(model).found)
    assert other.count_params() < 0.65 * model.count_params()
    want = array(model(x))
    np.testing.assert_allclose(
        array(other(x)), want, atol=5e-6 * np.abs(want).max()
    )


def test_a_subclassed_model_is_copied_with_its_inner_layers():
    model, x = attending()
    other = as_convolutions(model, False)
    want = array(model(x))
    np.testing.assert_allclose(array(other(x)), want, atol=5e-6)
    assert type(model.first) is L.Dense
    found = [
        layer.name
        for layer, _ in walk(other, "")
        if isinstance(layer, DenseAsConvolution)
    ]
    assert len(found) == 6
    assert {"query", "key", "value", "attention_output"} < {*found}


def test_gates_on_blocks_stay_in_their_loop():
    keras.utils.set_random_seed(0)
    layers = [L.LSTM(64, name="rnn"), L.Dense(64, name="wide")]
    model = keras.Sequential([keras.Input((4, 64)), *layers])
    model = kso.sparsify(
        model, 0.3, storage="blocks", structure=kso.Block(16, 16), seed=0
    )
    kinds = [type(layer).__name__ for layer in model.layers]
    assert kinds == ["BlockSparseRNN", "BlockSparseDense"]
    plain = kso.strip(model)
    assert [*plan_of(plain).found] == [plain.layers[1].kernel.path]
    assert (
        plan_of(plain).kept[plain.layers[0].cell.kernel.path]
        == "a LSTMCell is not one product"
    )
    other = as_convolutions(plain, False)
    assert [type(layer) for layer in other.layers] == [
        L.LSTM,
        DenseAsConvolution,
    ]
    x = np.random.default_rng(1).normal(size=(3, 4, 64)).astype("float32")
    np.testing.assert_allclose(array(other(x)), array(model(x)), atol=5e-6)


def test_blocks_of_a_kernel():
    rng = np.random.default_rng(0)
    kernel = np.kron(np.eye(8)[rng.permutation(8)], rng.normal(size=(32, 32)))
    grid, inputs_of = zero_blocks(kernel)
    assert (grid.rows, grid.cols, grid.fan_in) == (32, 32, 1)
    np.testing.assert_array_equal(
        grid.kernel(grid.blocks(kernel, inputs_of), inputs_of), kernel
    )
    # One output block has two live blocks: some others get one of zeros.
    kernel[:, :32] = 0
    kernel[64:128, :32] = 1
    grid, inputs_of = zero_blocks(np.stack([kernel, 0 * kernel]))
    assert grid.live_blocks < 2 * grid.out_blocks
    assert len(grid.of_outputs.groups) == 2
    assert grid.taps == (2,)
    kept = grid.kernel(
        grid.blocks(np.stack([kernel, 0 * kernel]), inputs_of), inputs_of
    )
    np.testing.assert_array_equal(kept[0], kernel)


def test_kernels_without_blocks_and_layers_without_such_a_form_are_told():
    rng = np.random.default_rng(0)
    scattered = rng.normal(size=(64, 64)) * (rng.random((64, 64)) < 0.1)
    assert "not in whole blocks of 8 x 8" in zero_blocks(scattered)
    assert "100% of the kernel" in zero_blocks(rng.normal(size=(64, 64)))
    assert zero_blocks(0 * scattered).grid.fan_in == 1
    layers = [
        L.Conv3D(32, 1),
        L.Reshape((4, 8, 32)),
        L.Conv2D(32, 1, groups=2),
        L.Dense(8),
    ]
    plan = plan_of(keras.Sequential([keras.Input((2, 4, 4, 32)), *layers]))
    assert not plan.found
    for reason, told in zip(
        plan.kept.values(), ("volumes", "groups=2", "be cut"), strict=True
    ):
        assert told in reason


# --- files ---------------------------------------------------------------------------------------


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("einsum", "sequence")
]


@pytest.fixture(scope="module", params=["dense", "image", *SLOW])
def exported(request, tmp_path_factory):
    """A model, rows, its outputs, and a function from batch size and route to a report."""
    model, shape = network(request.param), KINDS[request.param][0]
    data = np.random.default_rng(1).normal(size=(24, *shape)).astype("float32")
    folder = tmp_path_factory.mktemp(request.param)

    @functools.cache
    def file_of(batch, route):
        rows = {"representative_data": data} if route == "int8+blocks" else {}
        path = folder / f"{route}{batch}.tflite"
        return export(
            model, path, mode=route, sample=data, batch_size=batch, **rows
        )

    return model, data, array(model(data)), file_of


@pytest.mark.tensorflow_only
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(
    "route",
    [
        pytest.param(r, marks=pytest.mark.slow) if "float16" in r else r
        for r in ROUTES
    ],
)
def test_files_agree_with_keras_at_any_batch(exported, route, batch):
    model, data, want, file_of = exported
    report = file_of(batch, route)
    assert report.kept == {}
    assert report.folded == ()
    weights = {w.path: array(w.value) for w in model.trainable_weights}
    # A bias along the last axes becomes a vector; others keep their axes and count as weights.
    kernels = [
        x
        for path, x in weights.items()
        if not path.endswith("bias") or x.ndim > 2
    ]
    assert report.total_weights == sum(kernel.size for kernel in kernels)
    if route == "float32+blocks":  # rounding makes more zeros
        live = sum(np.count_nonzero(kernel) for kernel in kernels)
        assert report.total_weights - report.total_zeros == live
    allowed = {"float32": 1e-5, "float16": 2e-3}.get(route.split("+")[0], 0.08)
    file = load_litert(report.path)
    assert file.route == route
    assert rms(file.predict(data), want) < allowed
    for rows in (1, 3, 8):
        assert rms(resized(report.path, data[:rows]), want[:rows]) < allowed


@pytest.mark.tensorflow_only
def test_reshapes_beside_a_gather_are_left_to_litert(exported):
    """XNNPACK takes up to six axes, and copies."""
    model, _, _, file_of = exported
    for route in ROUTES:
        run = interpreter_of(file_of(4, route).path, xnnpack=False)
        gathers = [
            op for op in run._get_ops_details() if op["op_name"] == "GATHER"
        ]
        shapes = {
            about["index"]: about["shape"] for about in run.get_tensor_details()
        }
        axes = [
            len(shapes[k])
            for op in gathers
            for k in (op["inputs"][0], op["outputs"][0])
        ]
        # One for each count of live blocks.
        assert len(axes) >= 2 * len(model.layers)
        assert {*axes} == {7}


@pytest.mark.tensorflow_only
def test_weights_are_named_by_kernels_and_nothing_is_in_floats(exported):
    model, _, _, file_of = exported
    paths = {weight.path for weight in model.weights if weight.name == "kernel"}
    for route in ROUTES:
        report = file_of(4, route)
        assert {one.name.partition(" (")[0] for one in report.weights} >= paths
        assert all(path in str(report) for path in paths)
        assert not report.in_floats


@pytest.mark.tensorflow_only
def test_a_row_does_not_depend_on_the_others(exported):
    _, data, _, file_of = exported
    loud = np.concatenate([data[:1], 100 * data[1:4]])
    for route in ROUTES:
        plain, other = (
            resized(file_of(4, route).path, rows)[0]
            for rows in (data[:4], loud)
        )
        np.testing.assert_allclose(plain, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.tensorflow_only
def test_the_fastest_file_and_layers_that_stay_dense(tmp_path):
    hidden = [
        L.Dense(256, activation="relu", name=f"hidden_{k}") for k in range(3)
    ]
    dense = keras.Sequential(
        [keras.Input((256,), name="x"), *hidden, L.Dense(10, name="head")]
    )
    options = {
        "structure": kso.Block(32, 32, regular=True),
        "storage": "blocks",
    }
    model = kso.sparsify(dense, 0.25, exclude=["head"], seed=0, **options)
    report = export_litert(
        model, tmp_path / "m.tflite", mode="fast", tolerance=1e-5
    )
    routes = {one.route: one for one in report.routes if one.reason is None}
    assert set(routes) == {"float32", "float32+sp", "float32+blocks"}
    one = routes["float32+blocks"]
    ((path, reason),) = one.kept.items()
    assert path.endswith("head/kernel")
    assert "cannot be cut" in reason
    assert report.latency_ms <= 1.05 * min(
        one.latency_ms for one in routes.values()
    )
    assert one.bytes < 0.4 * routes["float32"].bytes


@pytest.mark.slow
@pytest.mark.tensorflow_only
def test_by_default_and_of_a_subclassed_model_which_stays_as_it_was(tmp_path):
    report = export_litert(network("image"), tmp_path / "m.tflite")
    assert report.route == "float32+blocks"
    model, x = attending()
    report = export_litert(
        model, tmp_path / "m.tflite", mode="dynamic_int8+blocks", sample=x
    )
    assert report.route == "dynamic_int8+blocks"
    assert len(report.kept) == 1
    assert type(model.first) is L.Dense


@pytest.mark.tensorflow_only
def test_a_model_without_blocks_has_no_such_route(tmp_path):
    rng = np.random.default_rng(0)
    model = keras.Sequential(
        [keras.Input((64,), name="x"), L.Dense(64, name="d")]
    )
    kernel = array(model.layers[0].kernel)
    model.layers[0].kernel.assign(kernel * (rng.random(kernel.shape) < 0.1))
    with pytest.raises(
        ExportRouteError,
        match=r"'float32\+blocks' needs .*Received: .*d/kernel",
    ):
        export_litert(model, tmp_path / "m.tflite", mode="float32+blocks")
    assert not list(tmp_path.iterdir())
