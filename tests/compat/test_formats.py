"""The tables of docs/exports.md: which storages and layers Keras' own `model.export` takes."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.export.models import X, stored
from tests.helpers import array

# Of the exporters.
pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore"),
]

L = keras.layers
BACKEND = keras.backend.backend()


def attention():
    x = keras.Input((8, 64), name="x")
    return keras.Model(x, L.MultiHeadAttention(4, 16, name="a")(x, x))


def of_layer(shape, layer):
    return lambda: keras.Sequential([keras.Input(shape, name="x"), layer()])


KINDS = {
    "Dense": of_layer((64,), lambda: L.Dense(64, name="a")),
    "Dense on sequences": of_layer((8, 64), lambda: L.Dense(64, name="a")),
    "EinsumDense": of_layer(
        (8, 64), lambda: L.EinsumDense("abc,cde->abde", (8, 4, 16), name="a")
    ),
    "MultiHeadAttention": attention,
    "Conv1D": of_layer(
        (16, 32), lambda: L.Conv1D(64, 3, padding="causal", name="a")
    ),
    "Conv2D": of_layer((8, 8, 32), lambda: L.Conv2D(64, 3, name="a")),
    "Conv3D": of_layer(
        (4, 6, 6, 32), lambda: L.Conv3D(32, 3, padding="same", name="a")
    ),
    "LSTM": of_layer((6, 32), lambda: L.LSTM(32, name="a")),
    "GRU": of_layer(
        (6, 32), lambda: L.GRU(32, return_sequences=True, name="a")
    ),
}
RECURRENT = {"LSTM", "GRU"}
SEQUENCES = {"Dense on sequences", "EinsumDense", "MultiHeadAttention"}
FORMATS = {
    "tensorflow": ["tf_saved_model", "onnx", "openvino"],
    "jax": ["tf_saved_model", "onnx"],
    "torch": ["torch", "onnx", "openvino"],
}[BACKEND]
# Which must be stripped, and which fail as plain layers, too.
STRIP = {
    ("jax", "onnx"): SEQUENCES | RECURRENT,
    ("torch", "onnx"): set(KINDS),
    ("torch", "openvino"): set(KINDS),
}
NOT_AT_ALL = {
    ("jax", "onnx"): {"Conv3D"},
    ("tensorflow", "openvino"): RECURRENT,
}


def answer(model, form, x, folder, fixed=BACKEND == "torch"):
    path = str(
        folder
        / {"tf_saved_model": "s", "torch": "m.pt2", "openvino": "m.xml"}.get(
            form, "m.onnx"
        )
    )
    # Programs of torch have a fixed batch here.
    shape = x.shape if fixed else (None, *x.shape[1:])
    spec = [keras.InputSpec(shape=shape, dtype="float32", name="x")]
    model.export(path, format=form, input_signature=spec, verbose=False)
    if form == "tf_saved_model":
        import tensorflow as tf

        artifact = tf.saved_model.load(path)
        return artifact.serve(x).numpy()
    if form == "torch":
        import torch

        with torch.no_grad():
            return torch.export.load(path).module()(torch.from_numpy(x)).numpy()
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        return session.run(None, {session.get_inputs()[0].name: x})[0]
    import openvino

    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    return openvino.Core().compile_model(path, "CPU", exact)(x)[0]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_live_blocks_or_the_stripped_model_go(kind, form, tmp_path):
    keras.utils.set_random_seed(0)
    blocks = kso.Block(8, 8, regular=True)
    model = kso.sparsify(
        KINDS[kind](),
        0.25,
        "uniform",
        structure=blocks,
        storage="blocks",
        seed=0,
    )
    x = (
        np.random.default_rng(0)
        .normal(size=(2, *model.inputs[0].shape[1:]))
        .astype("float32")
    )
    expected = array(model(x))
    if kind in NOT_AT_ALL.get((BACKEND, form), ()):
        with pytest.raises(Exception, match=r"\S"):
            answer(KINDS[kind](), form, x, tmp_path)
        return
    if kind in STRIP.get((BACKEND, form), ()):
        with pytest.raises(Exception, match=r"\S"):
            answer(model, form, x, tmp_path)
        model = kso.strip(model)
    np.testing.assert_allclose(
        answer(model, form, x, tmp_path), expected, atol=1e-4
    )


@pytest.mark.parametrize("form", ["onnx", "openvino"])
@pytest.mark.parametrize(
    "storage", ["masked", "compact", "blocks", "blocks, to_masked", "stripped"]
)
def test_storages(storage, form, tmp_path):
    model, expected_error = stored(storage), None
    # As of a plain model: it is not converted.
    if (BACKEND, form) == (
        "jax",
        "openvino",
    ):
        expected_error = "XlaCallModule"
    elif BACKEND == "torch" and storage == "blocks":
        expected_error = {"onnx": r"(?s)onnx|ONNX", "openvino": "BlockSparse"}[
            form
        ]
    if expected_error:
        with pytest.raises(Exception, match=expected_error):
            answer(model, form, X, tmp_path, fixed=True)
    else:
        np.testing.assert_allclose(
            answer(model, form, X, tmp_path, fixed=True),
            array(model(X)),
            atol=1e-5,
        )
