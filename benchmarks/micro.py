"""Keyword networks on microcontrollers: flash, arena and time of their arrays in LiteRT Micro.

python benchmarks/micro.py [options]
"""

import dataclasses
import functools
import importlib.util
import os
import re
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from record import QUICK, column, groups, markdown, matching, sentences
from runner import Measurement, Run, Setting, main, wall_and_cpu
from shipped import fit
from training import OUT, Dataset, cached, compiled, first_rows, keywords

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import (
    arena_of,
    c_array,
    export_litert,
    kind_of,
    load_litert,
    read_model,
    read_weights,
    write_model,
)

L = keras.layers
CALIBRATION = 256
DECODE_CODE = 11_100  # bytes of the operator on Cortex-M4, compiled with -Os
ARENA = (
    1 << 22
)  # far too large: with some that are too small, the interpreter crashes
LAYERS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
CHECKED = 20  # rows on which arrays are compared


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a trained network is made smaller.

    Attributes:
        share: float. The parameters that `kso.narrow` leaves.
        density: float. The density of kernels after `kso.prune`.
        packed: bool. Whether zeros are packed.
        lean: bool. Whether inner names and metadata are left out.
        bits: int. The bits of a weight. With 4, filters of convolutions are rounded once more.
        limits: tuple. Flash and RAM, for `kso.shrink(target="micro")`; or none.
        tables: bool. Whether filters are numbers of entries in look-up tables, by arithmetic.
    """

    share: float = 1.0
    density: float = 1.0
    packed: bool = False
    lean: bool = True
    bits: int = 8
    limits: tuple[int, int] | None = None
    tables: bool = False


DENSE = Variant()
VARIANTS = {
    "dense, as exported": Variant(lean=False),
    "dense": Variant(),
    "look-up tables, by arithmetic": Variant(tables=True),
    "4-bit filters": Variant(bits=4),
    "packed at 0.35": Variant(density=0.35, packed=True),
    "packed at 0.2": Variant(density=0.2, packed=True),
    "packed at 0.1": Variant(density=0.1, packed=True),
    "narrowed to 0.5": Variant(share=0.5),
    "narrowed to 0.25": Variant(share=0.25),
    "narrowed to 0.5, packed at 0.35": Variant(0.5, 0.35, packed=True),
    "narrowed to 0.5, packed at 0.2": Variant(0.5, 0.2, packed=True),
    "shrink, 64 and 32 kB": Variant(limits=(65536, 32768)),
    "shrink, 16 and 32 kB": Variant(limits=(16384, 32768)),
}
TITLES = {
    "ds_cnn": "DS-CNN",
    "conv1d": "Convolutions along time",
}


def ds_cnn() -> keras.Model:
    """Depthwise and pointwise convolutions of 64 channels (Zhang et al., 2017), size S."""
    inputs = keras.Input((50, 20, 1), name="sound")
    x = normalized(
        L.Conv2D(64, (10, 4), 2, padding="same", use_bias=False)(inputs)
    )
    for _ in range(4):
        x = normalized(L.DepthwiseConv2D(3, padding="same", use_bias=False)(x))
        x = normalized(L.Conv2D(64, 1, use_bias=False)(x))
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(10, name="head")(x))


def conv1d() -> keras.Model:
    """Four convolutions of three frames; the bands are channels."""
    inputs = x = keras.Input((50, 20), name="sound")
    for channels, strides in ((48, 1), (48, 1), (64, 2), (64, 1)):
        x = L.Conv1D(channels, 3, strides, padding="same", use_bias=False)(x)
        x = normalized(x)
    x = L.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, L.Dense(10, name="head")(x))


NETWORKS = {"ds_cnn": ds_cnn, "conv1d": conv1d}


def normalized(x: Any) -> Any:
    """Batch normalization and ReLU."""
    return L.ReLU()(L.BatchNormalization(momentum=0.9)(x))


class Micro(Measurement):
    """Keyword networks as arrays for LiteRT Micro: dense, packed and narrowed.

        python benchmarks/micro.py [--seeds 0 1 2]

    For each seed a DS-CNN and four convolutions along time learn ten words of synthetic voices
    (espeak-ng must be installed). Each is pruned by OBS, narrowed, or both, trained further,
    and exported as int8. The array of `c_array` is run by the package tflite-micro (extra
    `micro`), which also says how much of the arena it uses. Vela, if it is installed, compiles
    the plain files for an Ethos-U55.
    """

    page = lines = "micro"
    settings = {
        "networks": Setting([*TITLES], choices=TITLES, quick=["conv1d"]),
        "seeds": Setting([0], quick=[0]),
        "variants": Setting(
            [*VARIANTS], choices=VARIANTS, quick=["dense", "packed at 0.2"]
        ),
        "epochs": Setting(15, quick=1),
        "further": Setting(6, "epochs after pruning or narrowing", quick=1),
        "rows": Setting(int, "to train on", quick=200),
        "minutes": Setting(2.0, "of `shrink`", quick=0.2),
        "rounds": Setting(300, "of timed calls", quick=3),
    }

    def settings_of(self, network: str, seed: int) -> Run:
        """The settings that all runs of a network have."""
        return {
            "network": network,
            "seed": seed,
            "epochs": self.given.epochs,
            "further": self.given.further,
            "rows": self.given.rows,
        }

    def runs(self) -> Iterable[Run]:
        for seed in self.given.seeds:
            for network in self.given.networks:
                setting = self.settings_of(network, seed)
                for variant in self.given.variants:
                    if VARIANTS[variant].limits is None:
                        yield setting | {"variant": variant}
                    else:
                        minutes = {"minutes": self.given.minutes}
                        yield setting | {"variant": variant} | minutes

    def measure(self) -> None:
        """Times all arrays of a network of the first seed in turn, when all are made."""
        super().measure()
        for network in self.given.networks:
            setting = self.settings_of(network, self.given.seeds[0])
            self.once(setting | {"variant": "times in turn"})
            if importlib.util.find_spec("ethosu") is not None:
                self.once(setting | {"variant": "vela"})

    def run(self, which: Run) -> Run:
        if which["variant"] == "times in turn":
            return self.times(which)
        if which["variant"] == "vela":
            return {"bytes": self.vela(which)}
        variant = VARIANTS[which["variant"]]
        data = dataset(which["network"], which["rows"])
        if variant.limits is not None:
            return shrunk(which, data)
        path = file_of(which)
        array = array_of(path, variant)
        if variant.tables:
            return {
                "weights": live_weights(trained(which)),
                "flash": len(array) - saved_by_tables(path),
            }
        result: Run = {
            "weights": live_weights(trained(which)),
            "filters": filter_bytes(path),
            "flash": len(array),
            "arena": arena_of(array),
        }
        if variant.bits == 8:
            outputs = load_litert(path).predict(data.x_test)
        else:  # of which LiteRT's kernels round one step differently
            outputs = answers_of(array, data.x_test)
        result["accuracy"] = accuracy_of(outputs, data)
        if variant.packed:
            rows = data.x_test[:CHECKED]
            plain = answers_of(path.read_bytes(), rows)
            packed = answers_of(array, rows)
            result["equal"] = bool(np.array_equal(plain, packed))
        return result

    def times(self, which: Run) -> Run:
        """Microseconds of a call of every array of a network: the medians of calls in turn."""
        data = dataset(which["network"], which["rows"])
        calls = {}
        for name, variant in VARIANTS.items():
            line = which | {"variant": name}
            if variant.limits is not None:
                header = header_of_shrunk(line)
                if not header.exists():
                    continue
                array = bytes_of_header(header)
            elif name in self.given.variants and not variant.tables:
                array = array_of(file_of(line), variant)
            else:
                continue
            calls[name] = call_of(array, data.x_test[:1])
        load_before, *_ = os.getloadavg()
        seconds = wall_and_cpu(calls, self.given.rounds, warm_up=3)
        load_after, *_ = os.getloadavg()
        walls = {name: 1e6 * wall for name, (wall, _) in seconds.items()}
        cpus = {name: 1e6 * cpu for name, (_, cpu) in seconds.items()}
        return {
            "microseconds": cpus,
            "wall": walls,
            "loads": [load_before, load_after],
            "rounds": self.given.rounds,
        }

    def vela(self, which: Run) -> dict[str, int]:
        """The bytes of the files that Vela makes of the plain files of a network."""
        sizes = {}
        for name in self.given.variants:
            variant = VARIANTS[name]
            is_file = variant.limits is None and not variant.tables
            if is_file and variant.bits == 8:
                path = file_of(which | {"variant": name})
                sizes[name] = vela_bytes(path)
        return sizes

    def report(self, lines: list[Run]) -> str:
        given = self.given
        lines = matching(
            lines, epochs=given.epochs, further=given.further, rows=given.rows
        )
        text = "# Keyword networks on microcontrollers\n\n" + sentences(
            f"""
            Ten words by synthetic voices under noise, other voices in the test set
            (`training.keywords`). Trained {given.epochs} epochs; those pruned by OBS with the
            budget "error" (but the depthwise kernels and the head), narrowed by `kso.narrow`, or
            narrowed and then pruned, {given.further} more. Exported as static int8. Accuracy: of
            the file, on the test set. Flash: bytes of the array that `c_array` writes; "as
            exported": of the file. With Decode: with the {DECODE_CODE:,} bytes of code of the
            operator that unpacks zeros, on Cortex-M4. Arena: bytes that tflite-micro uses, with the
            unpacked filter. us: processor time of a call in tflite-micro on this machine (x86,
            reference kernels), median, all arrays of a network in turn, of the first seed. Packed
            arrays answer as their plain files, bit for bit. 4-bit filters: those of convolutions in
            the dense file, rounded to 15 values without training. Ends are float32, but those of
            shrink:
            `kso.shrink(target="micro", max_flash=..., max_ram=...)` of the dense network on its
            training rows, in {minutes_of(lines)} minutes, with ends in int8 and the least loss on
            held-out rows; the flash counts without the code of Decode. Means over seeds, with
            the standard deviation of the accuracy; times of one seed. Arrays of shrink are timed
            where they were kept.
            """
        )
        if any(VARIANTS.get(line["variant"], DENSE).tables for line in lines):
            text += sentences(
                """
                Look-up tables: four bits an entry, with a table of 16 values for each output
                channel, as Google's tool writes them; by arithmetic, nothing was run.
                """
            )
        for line in matching(lines, variant="times in turn"):
            before, after = line["loads"]
            text += sentences(
                f"""
                Times of {TITLES[line["network"]]}: {line["rounds"]} rounds, load {before:.1f} to
                {after:.1f} on two cores.
                """
            )
        if matching(lines, variant="vela"):
            text += sentences(
                """
                Vela: bytes of the file that Arm's compiler makes of the plain file for
                Ethos-U55-128, first seed.
                """
            )
        for network, title in TITLES.items():
            members = matching(lines, network=network)
            if members:
                text += f"## {title}\n\n{table(members)}\n"
        return text


@functools.cache
def dataset(network: str, rows: int | None) -> Dataset:
    """Keywords, in the shape of the network's input."""
    data = first_rows(keywords(), rows)
    if network == "conv1d":
        return data
    return dataclasses.replace(
        data, x_train=data.x_train[..., None], x_test=data.x_test[..., None]
    )


def trained(which: Run) -> keras.Model:
    """The network of a run, trained or from its file: dense, narrowed, pruned."""
    variant = VARIANTS[which["variant"]]
    data = dataset(which["network"], which["rows"])
    name = (
        f"{which['network']}-{which['seed']}-{which['epochs']}-{which['rows']}"
    )
    keras.utils.set_random_seed(which["seed"])
    model = NETWORKS[which["network"]]()
    model = cached(
        "micro", name, model, lambda: learn(model, data, which["epochs"], 2e-3)
    )
    name += f"-{which['further']}"
    if variant.share < 1:
        name += f"-narrowed-{variant.share}"
        narrow = kso.narrow(
            model, variant.share, data=data.x_train[:CALIBRATION]
        )
        model = cached(
            "micro",
            name,
            narrow,
            lambda: learn(narrow, data, which["further"], 1e-3),
        )
    if variant.density < 1:
        name += f"-pruned-{variant.density}"
        model = pruned(model, variant.density, which, data, name)
    return model


def learn(model: keras.Model, data: Dataset, epochs: int, rate: float) -> None:
    """Trains in batches of 32 with Adam and cosine decay."""
    fit(model, data.x_train, data.y_train, epochs, 32, rate, jit=False)


def pruned(
    model: keras.Model, density: float, which: Run, data: Dataset, name: str
) -> keras.Model:
    """The network after pruning and further training, plain."""
    sparse = kso.prune(
        model,
        density,
        score="obs",
        budget="error",
        data=data.x_train[:CALIBRATION],
        exclude=dense_paths(model),
    )
    plain = keras.models.clone_model(model)

    def train() -> None:
        learn(sparse, data, which["further"], 1e-3)
        plain.set_weights(kso.strip(sparse).get_weights())

    return cached("micro", name, plain, train)


def live_weights(model: keras.Model) -> int:
    """Entries of kernels that are not zero."""
    return sum(
        int(np.count_nonzero(weight.variable.numpy()))
        for weight in kso.prunable_weights(model)
    )


def dense_paths(model: keras.Model) -> list[str]:
    """The kernels that stay dense: depthwise ones of few taps, and the head."""
    paths = []
    for weight in kso.prunable_weights(model):
        if "depthwise" in weight.path or "head" in weight.path:
            paths.append(weight.path)
    return paths


@functools.cache
def folder() -> tempfile.TemporaryDirectory:
    """A folder for the files of this process."""
    return tempfile.TemporaryDirectory()


def file_of(which: Run) -> Path:
    """The int8 file of a run."""
    variant = VARIANTS[which["variant"]]
    name = (
        f"{which['network']}-{which['seed']}-{variant.share}-{variant.density}"
    )
    path = Path(folder().name) / f"{name}.tflite"
    if not path.exists():
        rows = dataset(which["network"], which["rows"]).x_train[:CALIBRATION]
        export_litert(
            trained(which), path, mode="int8", representative_data=rows
        )
    return path


def accuracy_of(outputs: np.ndarray, data: Dataset) -> float:
    """The accuracy of outputs on the test set, in percent."""
    answers = np.argmax(outputs, axis=1)
    return 100 * float(np.mean(answers == data.y_test))


def shrunk(which: Run, data: Dataset) -> Run:
    """The file that `kso.shrink` takes for the limits of a run."""
    max_flash, max_ram = VARIANTS[which["variant"]].limits
    model = compiled(trained(which | {"variant": "dense"}), "adam")
    path = Path(folder().name) / "shrunk.tflite"
    report = kso.shrink(
        model,
        (data.x_train, data.y_train),
        path,
        target="micro",
        max_flash=max_flash,
        max_ram=max_ram,
        minutes=which["minutes"],
    )
    print(report, flush=True)
    report.write(report.taken, header_of_shrunk(which))
    figures = report.taken.micro
    weights = read_weights(path.read_bytes())
    return {
        "taken": report.taken.name,
        "weights": sum(weight.size - weight.zeros for weight in weights),
        "flash": figures.flash,
        "arena": figures.arena,
        "operators": dict(figures.operators),
        "accuracy": accuracy_of(load_litert(path).predict(data.x_test), data),
    }


def header_of_shrunk(which: Run) -> Path:
    """Where the array of a run of `kso.shrink` is kept for its time."""
    place = OUT / "quick" / "micro" if QUICK else OUT / "micro"
    place.mkdir(parents=True, exist_ok=True)
    flash, ram = VARIANTS[which["variant"]].limits
    name = f"{which['network']}-{which['seed']}-shrunk-{flash}-{ram}"
    return place / f"{name}.h"


def vela_bytes(path: Path) -> int:
    """Bytes of the file that Vela makes of a plain int8 file."""
    with tempfile.TemporaryDirectory() as output:
        command = ["-m", "ethosu.vela", str(path), "--output-dir", output]
        command += ["--accelerator-config", "ethos-u55-128"]
        subprocess.run(
            [sys.executable, *command], check=True, stdout=subprocess.DEVNULL
        )
        [file] = Path(output).glob("*_vela.tflite")
        return file.stat().st_size


def saved_by_tables(path: Path) -> int:
    """Bytes that look-up tables save: half a byte an entry, and 16 for each output channel."""
    saved = 0
    model = read_model(path.read_bytes())
    graph = model.subgraphs[0]
    for operator in graph.operators:
        if kind_of(model, operator) in LAYERS:
            tensor = graph.tensors[operator.inputs[1]]
            entries = int(np.prod(tensor.shape))
            table_bytes = 16 * len(tensor.quantization.scale)
            saved += max(entries // 2 - table_bytes, 0)
    return saved


def in_4_bits(content: bytes) -> bytes:
    """A file whose filters of convolutions are rounded to -7 ... 7, two in a byte."""
    from ai_edge_litert import schema_py_generated as schema

    model = read_model(content)
    model.metadata = None  # with the digest of the file before
    graph = model.subgraphs[0]
    for operator in graph.operators:
        if kind_of(model, operator) not in ("CONV_2D", "DEPTHWISE_CONV_2D"):
            continue
        _, filter_index, bias_index = operator.inputs
        tensor = graph.tensors[filter_index]
        buffer = model.buffers[tensor.buffer]
        values = np.asarray(buffer.data, np.uint8).view(np.int8)
        rounded = np.rint(values * (7 / 127)).astype(np.int8) & 15
        buffer.data = (rounded[0::2] | rounded[1::2] << 4).astype(np.uint8)
        tensor.type = schema.TensorType.INT4
        # Biases are in steps of inputs times filters.
        bias = graph.tensors[bias_index]
        bias_buffer = model.buffers[bias.buffer]
        biases = np.asarray(bias_buffer.data, np.uint8).view(np.int32)
        biases = np.rint(biases * (7 / 127)).astype(np.int32)
        bias_buffer.data = biases.view(np.uint8)
        for each in (tensor, bias):
            scales = np.asarray(each.quantization.scale)
            each.quantization.scale = scales * (127 / 7)
    return write_model(model)


def array_of(path: Path, variant: Variant) -> bytes:
    """The array of a file as it lies in flash."""
    if not variant.lean:
        return path.read_bytes()
    if variant.bits == 4:
        content = in_4_bits(path.read_bytes())
        path = path.with_name(f"{path.stem}-4.tflite")
        path.write_bytes(content)
    header = path.with_suffix(".h")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        c_array(path, header, packed=variant.packed)
    return bytes_of_header(header)


def bytes_of_header(header: Path) -> bytes:
    """The array of a header of `c_array`."""
    body = header.read_text(encoding="utf-8").partition("[] = {")[2]
    return bytes(map(int, re.findall(r"\d+", body.partition("}")[0])))


def filter_bytes(path: Path) -> int:
    """The bytes of all filters of a dense file."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(str(path))
    total = 0
    for details in interpreter.get_tensor_details():
        if "kernel" in details["name"] and details["dtype"] == np.int8:
            total += int(np.prod(details["shape"]))
    return total


def interpreter_of(array: bytes) -> Any:
    """LiteRT Micro's interpreter for an array."""
    from tflite_micro.python.tflite_micro import runtime

    return runtime.Interpreter.from_bytes(array, arena_size=ARENA)


def answers_of(array: bytes, rows: np.ndarray) -> np.ndarray:
    """The outputs of an array on rows."""
    interpreter = interpreter_of(array)
    outputs = []
    for row in rows:
        interpreter.set_input(row[None], 0)
        interpreter.invoke()
        outputs.append(interpreter.get_output(0)[0].copy())
    return np.stack(outputs)


def call_of(array: bytes, row: np.ndarray) -> Callable[[], object]:
    """A function that runs an array once."""
    interpreter = interpreter_of(array)
    details = interpreter.get_input_details(0)
    if details["dtype"] != row.dtype:  # the ends of `kso.shrink` are int8
        settings = details["quantization_parameters"]
        steps = np.rint(row / settings["scales"]) + settings["zero_points"]
        row = np.clip(steps, -128, 127).astype(details["dtype"])
    interpreter.set_input(row, 0)
    return lambda: interpreter.invoke()


def minutes_of(lines: list[Run]) -> str:
    """The minutes that runs of `kso.shrink` had, from the fewest to the most."""
    ends = sorted({line["minutes"] for line in lines if "minutes" in line})
    if not ends:
        return "no"
    text = f"{ends[0]:g}"
    if len(ends) > 1:
        text += f" to {ends[-1]:g}"
    return text


def unpacks(line: Run) -> bool:
    """Whether the array of a run has packed zeros."""
    return VARIANTS[line["variant"]].packed or "Decode" in line.get(
        "operators", ()
    )


def table(members: list[Run]) -> str:
    """A row for each variant of a network."""
    times: dict[str, float] = {}
    for line in matching(members, variant="times in turn"):
        times = line["microseconds"]
    sizes: dict[str, int] = {}
    for line in matching(members, variant="vela"):
        sizes = line["bytes"]
    by_variant = groups(members, "variant")
    rows = []
    for name in VARIANTS:
        lines = by_variant.get(name, [])
        if not lines:
            continue
        flash = statistics.mean(column(lines, "flash"))
        weights = statistics.mean(column(lines, "weights"))
        accuracies = [line["accuracy"] for line in lines if "accuracy" in line]
        arenas = [line["arena"] for line in lines if "arena" in line]
        accuracy, arena = "", ""
        if accuracies:
            accuracy = f"{statistics.mean(accuracies):.1f}"
            arena = f"{statistics.mean(arenas):,.0f}"
        if len(accuracies) > 1:
            accuracy += f" +- {statistics.stdev(accuracies):.1f}"
        unpacking = [line for line in lines if unpacks(line)]
        code = DECODE_CODE * len(unpacking) / len(lines)
        row = [
            name,
            str(len(lines)),
            f"{weights:,.0f}",
            accuracy,
            f"{flash:,.0f}",
            f"{flash + code:,.0f}",
            arena,
            f"{times[name]:.0f}" if name in times else "",
            f"{sizes[name]:,}" if name in sizes else "",
        ]
        rows.append(row if sizes else row[:-1])
    header = [
        "array",
        "seeds",
        "live weights",
        "accuracy [%]",
        "flash",
        "with Decode",
        "arena",
        "us",
        "Vela",
    ]
    return markdown(header if sizes else header[:-1], rows)


if __name__ == "__main__":
    main(Micro)
