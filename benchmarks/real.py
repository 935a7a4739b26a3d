"""Trained networks that Python packages ship, from the network to the file.

    python benchmarks/real.py [--networks rnet silero] [--minutes 10]

The packages are fetched into `out/real` by pip. Each network is rebuilt in Keras with its weights,
and compared with its package. Rows are files of installed packages (magika), pieces
of the pictures that packages have (mtcnn), and speech of espeak-ng, which must be installed
(silero). Files are kept in `out/real/files`, and made once. Each is a line of `results/real.jsonl`;
`results/real.md` has the tables.
"""

import argparse
import dataclasses
import gzip
import hashlib
import importlib
import inspect
import io
import json
import os
import pathlib
import pkgutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from record import (
    HERE,
    QUICK,
    RESULTS,
    announced,
    append,
    finished,
    machine,
    markdown,
    parsed,
    write,
)

layers, ops = keras.layers, keras.ops
FETCHED = pathlib.Path(os.environ.get("KSO_REAL", HERE / "out/real"))
LINES = RESULTS / "real.jsonl"
_PACKAGES = (
    *("magika==1.0.3", "mtcnn==1.0.0", "silero-vad==6.2.3", "scikit-image==0.26.0"),
    *("face-recognition==1.3.0", "onnx==1.23.2", "onnxruntime==1.32.0", "lz4==4.4.5"),
)


def fetch() -> None:
    """Gets the packages into a folder of their own, which then ends `sys.path`."""
    for one in _PACKAGES:
        mark = FETCHED / f"{one}.done"
        if not mark.exists():
            source = ["download", "--no-binary", ":all:", "--dest"]  # has the images
            place = source if "recognition" in one else ["install", "--target"]
            command = [sys.executable, "-m", "pip", *place[:-1], "--quiet", "--no-deps"]
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
    y = ops.gelu(layers.Embedding(257, 64, name="embedding")(given), approximate=True)
    y = layers.Reshape((512, 256))(y)
    y = layers.LayerNormalization(axis=1, epsilon=1e-6, name="norm_0")(y)
    y = ops.gelu(layers.Conv1D(512, 5, name="conv")(y), approximate=True)
    y = layers.GlobalMaxPooling1D()(y)
    y = layers.LayerNormalization(epsilon=1e-6, name="norm_1")(y)
    model = keras.Model(given, layers.Dense(214, "softmax", name="head")(y), name="magika")
    table = found["jax2tf_get_logits_/Const:0"] + named("Dense_0/Reshape")[0]
    kernel = named("Conv_0/transpose_3")[..., 0].transpose(2, 1, 0)
    weights = {
        "embedding": [table],
        "norm_0": [named("LayerNorm_0/Reshape_2"), named("LayerNorm_0/Reshape_3")],
        "conv": [kernel, found["const_fold_opt__209"]],
        "norm_1": [named("LayerNorm_1/Reshape_2"), named("LayerNorm_1/Reshape_3")],
        "head": [found["jax2tf_get_logits_/Const_24:0"], named("Dense_1/Reshape")],
    }
    for name, values in weights.items():
        layer = model.get_layer(name)
        layer.set_weights([v.reshape(w.shape) for v, w in zip(values, layer.weights, strict=True)])
    return model


def _initializers(path: pathlib.Path) -> dict[str, np.ndarray]:
    import onnx

    initializers = onnx.load(path).graph.initializer
    return {one.name: onnx.numpy_helper.to_array(one) for one in initializers}


def magika_outputs(rows: np.ndarray) -> list[np.ndarray]:
    import onnxruntime

    return onnxruntime.InferenceSession(str(FETCHED / _MAGIKA)).run(None, {"bytes": rows})


def _mtcnn(size: int, blocks: list[tuple[int, int, int, str]], dense: int, heads: list[int]) -> Any:
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
            y = layers.Flatten()(layers.Permute((2, 1, 3))(y))
            y = layers.PReLU()(layers.Dense(dense)(y))
            head = layers.Dense
        model = keras.Model(given, [head(n, "softmax" if n == 2 else None)(y) for n in heads])
        model.set_weights(_mtcnn_weights(size))
        return model

    return build


def _mtcnn_weights(size: int) -> list[np.ndarray]:
    import joblib
    import lz4.frame

    name = {12: "pnet", 24: "rnet", 48: "onet"}[size]
    packed = (FETCHED / f"mtcnn/assets/weights/{name}.lz4").read_bytes()
    return joblib.load(io.BytesIO(lz4.frame.decompress(packed)))


pnet = _mtcnn(12, [(10, 3, 2, "same"), (16, 3, 0, ""), (32, 3, 0, "")], 0, [4, 2])
rnet = _mtcnn(24, [(28, 3, 3, "same"), (48, 3, 3, "valid"), (64, 2, 0, "")], 128, [4, 2])
onet = _mtcnn(
    48,
    [(32, 3, 3, "same"), (64, 3, 3, "valid"), (64, 3, 2, "same"), (128, 2, 0, "")],
    256,
    [4, 10, 2],
)


def mtcnn_outputs(rows: np.ndarray) -> list[np.ndarray]:
    from mtcnn import network

    size = rows.shape[1]
    kind = {12: network.pnet.PNet, 24: network.rnet.RNet, 48: network.onet.ONet}[size]
    model = kind()
    model.build((None, size, size, 3))
    model.set_weights(_mtcnn_weights(size))
    return [np.asarray(one) for one in model(rows)]


_STEPS = 32
_SILERO = "silero_vad/data/silero_vad_16k_op15.onnx"
_KINDS, _CELL = ("weight", "bias"), ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


def silero() -> keras.Model:
    """Whether somebody speaks, for each of 32 pieces of 32 ms; its state starts from zeros."""
    values = _initializers(FETCHED / _SILERO)
    # Each piece is 512 samples and the 64 before it, 64 more are mirrored.
    piece = keras.Input((576,))
    y = ops.concatenate([piece, ops.flip(piece[:, -65:-1], axis=1)], axis=1)
    y = layers.Conv1D(258, 256, 128, use_bias=False, name="stft")(ops.expand_dims(y, -1))
    y = ops.sqrt(ops.square(y[..., :129]) + ops.square(y[..., 129:]))
    for number, (filters, stride) in enumerate([(128, 1), (64, 2), (64, 2), (128, 1)]):
        y = layers.ZeroPadding1D(1)(y)
        y = layers.Conv1D(filters, 3, stride, activation="relu", name=f"conv{number}")(y)
    encoder = keras.Model(piece, layers.Reshape((128,))(y), name="encoder")
    encoder.get_layer("stft").set_weights([values["model.stft.forward_basis_buffer"].T])
    for number in range(4):
        own = [values[f"model.encoder.{number}.reparam_conv.{kind}"].T for kind in _KINDS]
        encoder.get_layer(f"conv{number}").set_weights(own)
    given = keras.Input((_STEPS, 576), name="sound")
    y = ops.reshape(encoder(ops.reshape(given, (-1, 576))), (-1, _STEPS, 128))
    y = layers.LSTM(128, return_sequences=True, name="lstm")(y)
    head = layers.Dense(1, "sigmoid", name="head")
    model = keras.Model(given, head(layers.ReLU()(y)), name="silero")
    cell = {kind: values[f"model.decoder.rnn.{kind}"].T for kind in _CELL}
    biases = cell["bias_ih"] + cell["bias_hh"]
    model.get_layer("lstm").set_weights([cell["weight_ih"], cell["weight_hh"], biases])
    last = [values[f"model.decoder.decoder.2.{kind}"] for kind in _KINDS]
    head.set_weights([last[0][..., 0].T, last[1]])
    return model


def silero_outputs(rows: np.ndarray) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(FETCHED / _SILERO))
    state = np.zeros((2, len(rows), 128), "f4")
    found = []
    for step in range(rows.shape[1]):
        given = {"input": rows[:, step], "state": state, "sr": np.array(16000)}
        one, state = session.run(None, given)
        found.append(one)
    return [np.stack(found, axis=1)]


# --- data -----------------------------------------------------------------------------------------


def bytes_of_files(training: bool) -> np.ndarray:
    """Rows of magika: at most 12 files of each ending of a package; packages are of one side."""
    rng, rows = np.random.default_rng(0), []
    roots = [*map(pathlib.Path, sys.path), pathlib.Path("/usr/share"), pathlib.Path("/usr/include")]
    folders = {one for root in roots if root.is_dir() for one in root.iterdir() if one.is_dir()}
    for folder in sorted(folders):
        if (_digest(folder.name) % 2 == 0) == training:
            continue
        kinds: dict[str, list[pathlib.Path]] = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink() and 16 <= path.stat().st_size < 5e7:
                kinds.setdefault(path.suffix, []).append(path)
        for paths in kinds.values():
            chosen = rng.permutation(len(paths))[:12]
            rows += [_magika_row(paths[k]) for k in chosen]
    return np.stack(rows)[rng.permutation(len(rows))[:6000]]


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
        faces = onet().predict((found - 127.5) / 128, batch_size=256, verbose=0)[-1][:, 1] > 0.5
        rng = np.random.default_rng(1)
        others = rng.permutation(np.flatnonzero(~faces))[: 2 * faces.sum()]
        chosen = rng.permutation(np.concatenate([np.flatnonzero(faces), others]))[:6000]
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
    files: list[Any] = [next(folder.glob(f"{n}.*")) for n in _IMAGES[0 if training else 1]]
    if training:
        archive = tarfile.open(  # noqa: SIM115, is read below
            next(FETCHED.glob("face_recognition-*.tar.gz"))
        )
        names = [n for n in archive.getnames() if "test_images" in n and n.endswith(".jpg")]
        files += [archive.extractfile(name) for name in names]
    else:
        files.append(matplotlib.cbook.get_sample_data("grace_hopper.jpg", asfileobj=False))
    images = [Image.open(file).convert("RGB") for file in files]
    for image in images:
        image.thumbnail((600, 600))
    faces = np.load(folder / "lfw_subset.npy")[0 if training else 1 :: 2]
    gray = (255 * faces / faces.max()).astype("uint8")
    return images + [Image.fromarray(one).convert("RGB") for one in gray]


_VOICES = (
    ("en-us", "de", "fr", "es", "it", "pt", "pl", "ru", "cmn", "hi", "en-gb+f2", "de+f3", "fr+m5"),
    ("en-gb", "nl", "sv", "cs", "tr", "fi", "ja", "en-us+f4", "nl+m3", "sv+f1"),
)


def sounds(training: bool) -> np.ndarray:
    """Rows of silero: speech of espeak-ng with pauses, in noise; other voices and texts to test."""
    rng, rows = np.random.default_rng(int(training)), []
    texts = [inspect.getdoc(importlib.import_module(name)) for name in _modules()]
    texts = [text for text in texts if text and len(text) > 80][0 if training else 1 :: 2]
    for _ in range(600 if training else 400):
        voice = rng.choice(_VOICES[0 if training else 1])
        text = rng.choice(texts)
        begin = rng.integers(max(len(text) - 80, 1))
        speech = _spoken(text[begin : begin + 80], voice, rng.integers(110, 240), rng.integers(99))
        pause = lambda: np.zeros(rng.integers(4000, 24000), "float32")  # noqa: E731
        speech = np.concatenate([pause(), speech, pause()])
        sound = speech * 10 ** rng.uniform(-1.5, 0) + _noise(len(speech), rng)
        sound = np.concatenate([np.zeros(64, "float32"), sound])
        for at in range(0, len(sound) - 64 - 512 * _STEPS + 1, 512 * _STEPS):
            index = at + 512 * np.arange(_STEPS)[:, None] + np.arange(576)
            rows.append(sound[index])
    return np.stack(rows)[rng.permutation(len(rows))].astype("float32")


def _modules() -> list[str]:
    names = (one.name for one in pkgutil.iter_modules([os.path.dirname(os.__file__)]))
    return [n for n in names if n not in ("antigravity", "this", "idlelib") and n[0] != "_"]


def _spoken(text: str, voice: str, speed: int, pitch: int) -> np.ndarray:
    from scipy import signal

    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", "--", text]
    content = subprocess.run(command, capture_output=True, check=True).stdout
    samples = np.frombuffer(content[44 : len(content) // 2 * 2], "<i2") / 32768
    return signal.resample_poly(samples, 320, 441).astype("float32")  # from 22,050 to 16,000 Hz


def _noise(count: int, rng: np.random.Generator) -> np.ndarray:
    """Noise whose power falls with a power of the frequency, and sometimes tones."""
    spectrum = np.fft.rfft(rng.normal(size=count)) / (1 + np.arange(count // 2 + 1)) ** (
        rng.uniform(0, 1)
    )
    noise = np.fft.irfft(spectrum, count)
    noise /= noise.std()
    if rng.random() < 0.3:
        pitch = rng.uniform(80, 2000) * (1 + rng.integers(0, 8, count // 4000 + 1) / 12)
        noise += np.sin(2 * np.pi * np.cumsum(np.repeat(pitch, 4000)[:count]) / 16000)
    return 10 ** rng.uniform(-3.5, -1.2) * noise


class Network(NamedTuple):
    """How to build it, what its package computes, and rows, for training or not."""

    build: Callable[[], keras.Model]
    outputs: Callable[[np.ndarray], list[np.ndarray]]
    rows: Callable[[bool], np.ndarray]


NETWORKS = {
    "magika": Network(magika, magika_outputs, bytes_of_files),
    "pnet": Network(pnet, mtcnn_outputs, patches(12)),
    "rnet": Network(rnet, mtcnn_outputs, patches(24)),
    "onet": Network(onet, mtcnn_outputs, patches(48)),
    "silero": Network(silero, silero_outputs, sounds),
}


# --- cases ----------------------------------------------------------------------------------------

PASSES = 3
Case = tuple[str, str]
"""How the model is made, and the route of its file."""

CASES: tuple[Case, ...] = (
    *(("dense", route) for route in ("float16", "dynamic_int8", "int8", "dynamic_int4")),
    ("dense, trained", "int8"),
    ("dense, trained", "int4"),
    *((f"at once, {density}", "dynamic_int8") for density in (0.5, 0.2, 0.1)),
    *((f"at once, {density}, distilled", "dynamic_int8") for density in (0.35, 0.2)),
    ("dense, 4 bits", "dynamic_int8"),
    *((f"at once, {density}, distilled, 4 bits", "dynamic_int8") for density in (0.35, 0.2)),
    *((f"gradually, {density}", "dynamic_int8") for density in (0.2, 0.1)),
    ("gradually, 0.2", "float16+sp"),
    ("gradually, 0.2, trained", "int8"),
    ("gradually, 0.2, trained", "int4"),
    ("blocks of 16, 0.5, distilled", "int8+blocks"),
    ("shrink", "gzip"),
    ("shrink", "small"),
)


def made(dense: keras.Model, rows: np.ndarray, how: str, route: str) -> keras.Model:
    """The model of a case, from the dense one and rows without labels."""
    import keras_sparse_ortho as kso
    from keras_sparse_ortho.recovery import distill

    kind, *rest = how.split(", ")
    density = next((float(one) for one in rest if one[0] == "0"), 1.0)
    distilled = {"epochs": PASSES, "verbose": 2}
    model = dense
    if kind == "at once":
        model = kso.prune(dense, density, score="obs", data=rows[:768], budget="error")
    if kind == "gradually":
        model = kso.parametrize(dense, kso.MagnitudeMask(kso.schedules.Cubic(density)))
    if kind == "blocks of 16":
        options = {"structure": kso.Block(16, 16), "storage": "blocks"}
        model = kso.prune(dense, density, score="obs", data=rows[:768], **options)
    if "distilled" in rest or kind == "gradually":
        distill(model, dense, rows, **distilled)
    if kind == "gradually" and "trained" in rest:  # a schedule would start again
        masks = {w.path: w.mask for w in kso.prunable_weights(model)}
        model = kso.apply_masks(kso.strip(model), masks)
    if route == "dynamic_int4" or "4 bits" in rest:
        model = kso.quantize_aware(model, "int4", None)
    elif "trained" in rest:
        model = kso.quantize_aware(model, route)
    if {"trained", "4 bits"} & {*rest}:
        distill(model, dense, rows, epochs=1, learning_rate=5e-4, verbose=2)
    return model


def measure(name: str, given: argparse.Namespace) -> None:
    """Makes the files of a network that are missing, and times all of them in turn."""
    from keras_sparse_ortho.export import export_litert, latencies, load_litert, shrink
    from keras_sparse_ortho.export._judge import Judge

    network, folder = NETWORKS[name], FETCHED / ("quick" if QUICK else "files") / name
    folder.mkdir(parents=True, exist_ok=True)
    dense = network.build()
    rows, tested = (cached(name, training)[: given.rows] for training in (True, False))
    theirs = network.outputs(tested[:64])
    ours = keras.tree.flatten(dense.predict(tested[:64], verbose=0))
    apart = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    want = keras.tree.flatten(dense.predict(tested, verbose=0))[-1]
    judge, found = Judge([want], None, "agreement"), []
    for how, route in announced(name, CASES):
        file = folder / f"{how}, {route}.tflite{'.gz' if route == 'gzip' else ''}"
        notes = file.with_suffix(".json")
        if given.made and not notes.exists():
            continue
        if not notes.exists():
            start, run = time.monotonic(), {}
            try:
                if how == "shrink":
                    report = shrink(dense, rows, file, minutes=given.minutes, verbose=True)
                    run |= {"report": str(report), "minutes": given.minutes}
                else:
                    model = made(dense, rows, how, route)
                    data = rows[:512] if route in ("int8", "int8+blocks") else None
                    options = {"representative_data": data, "tolerance": 10.0}
                    export_litert(model, file, mode=route, sample=rows[:64], **options)
            except (ValueError, RuntimeError) as error:
                run["reason"] = str(error).partition(". ")[0]
            run["seconds"] = round(time.monotonic() - start)
            notes.write_text(json.dumps(run))
        run = json.loads(notes.read_text())
        if "reason" not in run:
            outputs = load_litert(file).predict(tested)
            got = [*outputs.values()][-1] if isinstance(outputs, dict) else outputs
            content = file.read_bytes()
            packed = file.suffix == ".gz"
            run |= dataclasses.asdict(judge.score([got])) | {
                "bytes": len(gzip.decompress(content) if packed else content),
                "gzip": len(content if packed else gzip.compress(content, 6)),
            }
        found.append((file, {"network": name, "how": how, "route": route, "apart": apart} | run))
    timed = [file for file, run in found if "reason" not in run]
    times = dict(zip(timed, latencies(timed, seconds=given.seconds), strict=True))
    for file, run in found:
        own = {"ms": times[file]} if file in times else {}
        append(LINES, run | own | {"rows": len(rows), "tested": len(tested)})


def cached(name: str, training: bool) -> np.ndarray:
    """The rows of a network, from their file if there is one."""
    file = FETCHED / f"{name}_{'train' if training else 'test'}.npy"
    if not file.exists():
        np.save(file, NETWORKS[name].rows(training))
    return np.load(file)


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
    "rnet": "**Take density 0.2 at once, in int8 and compressed**: within a point of dense, "
    "smaller than 8 and 4 bits, as fast. Training wins nothing on other pictures, and gradual "
    "pruning loses. As stored, only 4 bits and sparse float16 are smaller than dense int8.",
}


def summarize() -> None:
    """Writes the tables of all lines."""
    latest = {(run["network"], run["how"], run["route"]): run for run in finished(LINES)}
    text = "# Trained networks of Python packages\n\n"
    text += (
        f"{machine()}. Networks that somebody uses, rebuilt in Keras with their weights; "
        "`apart` is the largest difference from their package's outputs. Score: agreement "
        "with the dense network's class in percent, with the 95% interval of the bootstrap over "
        "rows, on rows of other origin than all that made the files. `ms`: median of one call with "
        "one row on one thread, all files of a network in turn. `s`: from the network to the file. "
        "Models without a density are the dense one; `trained` and `4 bits` (weights): one pass "
        "of quantization-aware training; `distilled` and `gradually`: three passes; all without "
        "labels. `shrink` had nothing but the data.\n\n"
    )
    for name, about in ABOUT.items():
        runs = [run for (network, *_), run in latest.items() if network == name]
        if not runs:
            continue
        first = runs[0]
        text += (
            f"## {name}\n\n{about}; {first['rows']:,} rows, {first['tested']:,} to test. Apart: "
        )
        text += f"{first['apart']:.1e}.\n\n{TAKE.get(name, '')}\n\n"
        rows = []
        for run in runs:
            cells = [run["how"], run["route"]]
            if "reason" in run:
                rows.append([*cells, f"no file: {run['reason']}", *[""] * 5])
                continue
            score = [100 * run[key] for key in ("mean", "low", "high")]
            cells += [f"{score[0]:.1f}", f"{score[1]:.1f} to {score[2]:.1f}"]
            cells += [f"{run['bytes']:,}", f"{run['gzip']:,}", f"{run['ms']:.3g}"]
            rows.append([*cells, str(run["seconds"])])
        header = ["model", "route", "score", "95%", "bytes", "gzip", "ms", "s"]
        text += markdown(header, rows) + "\n"
        for run in (run for run in runs if "report" in run):
            text += f"Printed by `shrink` for `{run['route']}`:\n\n"
            text += f"```text\n{run['report']}\n```\n\n"
    write("real", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=[*NETWORKS], choices=[*NETWORKS])
    parser.add_argument("--rows", type=int, default=6000, help="at most, to train and to test")
    parser.add_argument("--minutes", type=float, default=10.0, help="of shrink")
    parser.add_argument("--seconds", type=float, default=60.0, help="to time the files")
    parser.add_argument("--made", action="store_true", help="make no files, time those there are")
    parser.add_argument("--summary", action="store_true", help="only write the tables")
    quick = {"networks": ["rnet"], "rows": 200, "minutes": 0.1, "seconds": 1.0}
    given = parsed(parser, quick=quick)
    if not given.summary:
        fetch()
        for name in given.networks:
            measure(name, given)
    summarize()


if __name__ == "__main__":
    main()
