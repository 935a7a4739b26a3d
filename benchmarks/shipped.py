"""Trained networks as files: on live blocks, quantized, and on Ethos-U.

python benchmarks/shipped.py NAME [options]
"""

import csv
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from networks import mlp, mobilenet
from one_shot import dense_cnn
from record import (
    QUICK,
    column,
    groups,
    last_of_each,
    machine,
    markdown,
    matching,
    mean_and_deviation,
    sentences,
)
from runner import Measurement, Run, Setting, grid, main
from training import OUT, Dataset, accuracy, compiled, first_rows, load

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import ExportConversionError
from keras_sparse_ortho.export import export_litert, latencies, load_litert
from keras_sparse_ortho.quantization import round_biases

L = keras.layers

# --- files ----------------------------------------------------------------------------------------

METHODS = {"mlp": ("dense", "narrow", "blocks"), "cnn": ("dense", "blocks")}
DENSITY = {"mlp": 0.125, "cnn": 0.25}
STAY_DENSE = {"mlp": ["head"], "cnn": ["stem", "head"]}
EPOCHS = {
    ("digits", "mlp"): 40,
    ("digits", "cnn"): 40,
    ("fashion_mnist", "mlp"): 5,
    ("fashion_mnist", "cnn"): 5,
}
SAMPLES = {("fashion_mnist", "cnn"): 20_000}  # else all
RATE = 2e-3
WIDTHS = {"digits": 256, "fashion_mnist": 1024}
NARROW_WIDTHS = {"digits": 80, "fashion_mnist": 272}
"""Widths of the dense MLPs that have as many weights as those on blocks have live ones."""
ROUTES = {
    "dense": ("float32", "int8", "dynamic_int4"),
    "narrow": ("float32", "int8"),
    "blocks": ("float32+blocks", "int8+blocks"),
}
# One call, all files in turn.
TIMED = [
    ("fashion_mnist", "mlp"),
    ("fashion_mnist", "cnn"),
]
FILE_KINDS = {"float32": "float32", "int8": "int8", "dynamic_int4": "int4"}
"""By route without `+blocks`, its title."""


class Files(Measurement):
    """Accuracy of trained networks on blocks beside dense ones: in Keras, and as LiteRT files.

        python benchmarks/shipped.py files
        python benchmarks/shipped.py files --data digits --seeds 1

    An MLP of three hidden layers and a CNN of four 3x3 convolutions are trained on digits and on
    Fashion-MNIST, dense and by `sparsify(model, density, storage="blocks")`, in the same way
    (Adam, cosine decay), and so is a dense MLP of fewer units that has as many weights as the one
    on blocks has live ones. The head, and the first convolution, are dense. Each is exported in
    float32 and in static int8, those on blocks as `+blocks`, and Keras and the files answer the
    whole test set. Dense MLPs also have a file in dynamic int4, rounded after training. One call
    of each file for Fashion-MNIST is timed, all in turn.
    """

    page = lines = "shipped"
    settings = {
        "data": Setting([*WIDTHS], choices=WIDTHS, quick=["digits"]),
        "seeds": Setting(3, quick=1),
        "epochs": Setting(int, "instead of those of the table", quick=1),
        "samples": Setting(
            int, "pictures to train on, instead of those of the table"
        ),
    }

    def measure(self) -> None:
        """Trains first; times only what is trained."""
        super().measure()
        for data, net in TIMED:
            if data in self.given.data:
                case = {"data": data, "net": net, "method": "timed"}
                if net == "mlp":
                    case["methods"] = [*METHODS[net]]
                self.once(case)

    def runs(self) -> Iterable[Run]:
        given = self.given
        for seed, ((data, net), epochs) in itertools.product(
            range(given.seeds), EPOCHS.items()
        ):
            if data in given.data:
                setting = {
                    "data": data,
                    "net": net,
                    "seed": seed,
                    "epochs": given.epochs or epochs,
                }
                setting["samples"] = given.samples or SAMPLES.get((data, net))
                for method in METHODS[net]:
                    yield setting | {"method": method}

    def run(self, which: Run) -> Run:
        data = load(which["data"])
        if which["method"] == "timed":
            return {"ms": timed(data, which["net"])}
        return file_run(data, which)

    def report(self, lines: list[Run]) -> str:
        runs = [line for line in lines if line["method"] != "timed"]
        wanted = [self.line_of(which) for which in self.runs()]
        runs = [run for run in wanted if run is not None]
        trained = {
            (run["data"], run["net"]): (run["epochs"], run["samples"])
            for run in runs
        }
        how = "; ".join(
            f"{net.upper()} on {data}: {epochs}"
            + (f" on {samples:,} pictures" if samples else "")
            for (data, net), (epochs, samples) in trained.items()
        )
        about = sentences(
            f"""
            {"; ".join(dict.fromkeys(line["made"]["machine"] for line in lines))}, Keras
            {keras.__version__} on {keras.backend.backend()}. Test accuracy after the last epoch,
            mean and standard deviation over the seeds: of Keras, and of the files, which answer the
            whole test set. Epochs: {how}; Adam ({RATE:g}, cosine decay). Blocks: `sparsify(model,
            density, storage="blocks")`, density {DENSITY["mlp"]:g} (MLP) and {DENSITY["cnn"]:g}
            (CNN), head and first convolution dense; files `+blocks`. Narrow: a dense MLP of so few
            units ({NARROW_WIDTHS["digits"]} and {NARROW_WIDTHS["fashion_mnist"]}) that it has as
            many weights as the one on blocks has live ones. Live: nonzero weights of the network of
            seed 0, whose files' bytes these are. int4: Dense kernels in four bits, rounded after
            training. ms: one call with one row, one thread, files of a network in turn.
            """
        )
        times = {
            (t["data"], t["net"]): t["ms"]
            for t in matching(lines, method="timed")
        }
        return (
            "# Trained networks on blocks, as files\n\n"
            + about
            + files_table(runs, times)
        )


def percent(values: Iterable[float]) -> str:
    """Mean and deviation in percent."""
    return mean_and_deviation([100 * value for value in values], sign="±")


def files_table(runs: list[Run], times: dict[tuple, Run]) -> str:
    """A line for each dataset, network and method."""
    rows = []
    by_row = groups(runs, "data", "net", "method")
    networks = dict.fromkeys((run["data"], run["net"]) for run in runs)
    kinds = [
        (data, net, method) for data, net in networks for method in METHODS[net]
    ]
    for data, net, method in kinds:
        members = by_row.get((data, net, method), [])
        if not members:
            continue
        ms = times.get((data, net), {}).get(method, {})
        first = members[0]
        row = [
            data,
            net,
            method,
            f"{first['live']:,}",
            percent(column(members, "accuracy")),
        ]
        for kind in FILE_KINDS:
            if f"{kind}_bytes" not in first:
                row += ["", "", ""]
                continue
            row.append(percent(column(members, f"{kind}_accuracy")))
            row.append(f"{first[f'{kind}_bytes'] / 1e3:.0f}")
            row.append(f"{ms[kind]:.3f}" if kind in ms else "")
        rows.append(row)
    header = ["data", "network", "method", "live", "Keras [%]"]
    for title in FILE_KINDS.values():
        header += [f"{title} file [%]", f"{title} kB", f"{title} ms"]
    return markdown(header, rows)


def file_network(
    data: Dataset, net: str, method: str, seed: int
) -> keras.Model:
    """A network of `files`, dense or on blocks."""
    keras.utils.set_random_seed(seed)
    shape = data.x_train.shape[1:]
    if net == "mlp":
        widths = NARROW_WIDTHS if method == "narrow" else WIDTHS
        model = mlp(shape, 3 * [widths[data.name]], data.classes, "h")
    else:
        small = data.name == "digits"
        sizes = ((64, 1 if small else 2), (128, 2), (128, 1))
        model = convolutions(shape, 1, sizes, pool=not small)
    if method != "blocks":
        return model
    exclude = STAY_DENSE[net]
    return kso.sparsify(
        model, DENSITY[net], storage="blocks", exclude=exclude, seed=seed
    )


def convolutions(
    shape: tuple[int, ...],
    strides: int,
    sizes: Iterable[tuple[int, int]],
    pool: bool = False,
) -> keras.Model:
    """A stem of 32 channels, convolutions of so many channels and strides, and a head."""
    options = {"padding": "same", "activation": "relu"}
    layers: list[keras.Layer] = [
        L.Conv2D(32, 3, strides, **options, name="stem")
    ]
    if pool:
        layers.append(L.MaxPooling2D())
    for k, (channels, stride) in enumerate(sizes):
        layers.append(L.Conv2D(channels, 3, stride, **options, name=f"c{k}"))
    head = L.Dense(10, name="head")
    return keras.Sequential(
        [keras.Input(shape), *layers, L.GlobalAveragePooling2D(), head]
    )


def fit(
    model: keras.Model,
    x: np.ndarray,
    y: np.ndarray,
    epochs: int,
    size: int,
    rate: float,
    jit: bool,
) -> None:
    """Trains with Adam and cosine decay."""
    steps = epochs * -(-len(x) // size)
    rates = keras.optimizers.schedules.CosineDecay(rate, steps)
    compiled(model, keras.optimizers.Adam(rates), jit_compile=jit)
    model.fit(x, y, batch_size=size, epochs=epochs, verbose=0)


def exported(
    model: keras.Model, method: str, data: Dataset, folder: Path
) -> dict:
    """The reports of a model's files, by route without `+blocks`. Convolutions get no int4."""
    files = {}
    for route in ROUTES[method]:
        options = {}
        if route == "dynamic_int4":
            if any(isinstance(layer, L.Conv2D) for layer in model.layers):
                continue
            # Written in any case: its accuracy is what is measured.
            options = {"tolerance": 1e6}
        elif route.startswith("int8"):
            options = {"representative_data": data.x_train[:500]}
        path = folder / f"{method} {route}.tflite"
        report = kso.export_litert(model, path, mode=route, **options)
        files[route.removesuffix("+blocks")] = report
    return files


def file_run(data: Dataset, which: Run) -> Run:
    """Trains one network, and takes its accuracy from Keras and from its files."""
    method = which["method"]
    model = file_network(data, which["net"], method, which["seed"])
    few = first_rows(data, which["samples"])
    size = 32 if len(few.x_train) < 5_000 else 128
    jit = keras.backend.backend() != "torch"
    fit(model, few.x_train, few.y_train, which["epochs"], size, RATE, jit)
    results: Run = {"accuracy": accuracy(model, data) / 100}
    with tempfile.TemporaryDirectory() as folder:
        for kind, report in exported(model, method, data, Path(folder)).items():
            classes = (
                load_litert(report.path).predict(data.x_test).argmax(axis=1)
            )
            results[f"{kind}_accuracy"] = float(np.mean(classes == data.y_test))
            results[f"{kind}_bytes"] = report.bytes
            if kind == "int8":
                results["live"] = round(report.density * report.total_weights)
    return results


def timed(data: Dataset, net: str) -> dict[str, dict[str, float]]:
    """Milliseconds of one call with one row on one thread: all files of a network in turn.

    The networks are not trained: the time does not depend on the values of live weights.
    """
    paths = {}
    ms: dict[str, dict[str, float]] = {method: {} for method in METHODS[net]}
    with tempfile.TemporaryDirectory() as folder:
        for method in METHODS[net]:
            model = file_network(data, net, method, 0)
            for kind, report in exported(
                model, method, data, Path(folder)
            ).items():
                paths[method, kind] = report.path
        times = latencies([*paths.values()], seconds=20)
    for (method, kind), milliseconds in zip(paths, times, strict=True):
        ms[method][kind] = milliseconds
    return ms


# --- ethos_u --------------------------------------------------------------------------------------

ACCELERATORS = (
    "ethos-u55-128",
    "ethos-u55-256",
    "ethos-u65-256",
    "ethos-u85-256",
)
# The weights of the sparse networks in the last epochs.
QUANTIZED = {"0.1, trained as int8": "int8"}
SPARSE = ("density 0.1", *QUANTIZED)
ETHOS_U_METHODS = {"mlp": ("dense", *SPARSE), "cnn": ("dense", *SPARSE, "2:4")}
# Palettes lost to int4, and are gone since commit 936aadd; their lines stay.
SHOWN = {
    net: (*rows[:3], "0.1, palette of 16", *rows[3:])
    for net, rows in ETHOS_U_METHODS.items()
}
ETHOS_U_EPOCHS, ETHOS_U_SAMPLES = (
    {"mlp": 5, "cnn": 6},
    {"mlp": 60_000, "cnn": 60_000},
)
ROWS = 2000  # of the test set, on which the file is run


class EthosU(Measurement):
    """Vela's estimates for trained networks on Ethos-U: dense, single zeros, quantized, 2:4.

        python benchmarks/shipped.py ethos_u
        python benchmarks/shipped.py ethos_u --seeds 1 --epochs 1 --samples 2048

    An MLP 784-512-512-256-10 and a CNN of four 3x3 convolutions (32 to 128 channels, 14 x 14 down
    to 4 x 4) are trained on Fashion-MNIST, all in the same way, Adam with cosine decay: dense;
    with single zeros at density 0.1 (`sparsify`, exactly orthogonal, ERK); the same, trained on
    with int8 weights, a third of the epochs at a quarter of the rate;
    the CNN also with `NByM(2, 4)`. The first convolution and the head are dense. Each is exported
    as static int8, its file's accuracy taken on the test set, and compiled by Arm's compiler
    Vela. Needs the extra `ethos-u`.
    """

    page = lines = "ethos_u"
    settings = {
        "seeds": Setting(1),
        "epochs": Setting(int, f"default {ETHOS_U_EPOCHS}", quick=1),
        "samples": Setting(
            int, f"pictures to train on, default {ETHOS_U_SAMPLES}", quick=1024
        ),
    }

    def runs(
        self, shown: dict[str, tuple[str, ...]] = ETHOS_U_METHODS
    ) -> Iterable[Run]:
        """All methods, or those of the table."""
        for seed, (net, methods) in itertools.product(
            range(self.given.seeds), shown.items()
        ):
            for method in methods:
                yield {
                    "net": net,
                    "method": method,
                    "seed": seed,
                    "epochs": self.given.epochs or ETHOS_U_EPOCHS[net],
                    "samples": self.given.samples or ETHOS_U_SAMPLES[net],
                }

    def run(self, which: Run) -> Run:
        """Trains one network, and compiles its file for each accelerator."""
        net, method, epochs = which["net"], which["method"], which["epochs"]
        data = load("fashion_mnist")
        few = first_rows(data, which["samples"])
        x, y = few.x_train, few.y_train
        # TensorFlow trains CNNs faster without.
        jit = keras.backend.backend() == "jax"
        model = ethos_u_network(net, method, which["seed"])
        fit(model, x, y, epochs, 128, RATE, jit)
        if method in QUANTIZED:
            model = kso.quantize_aware(model, QUANTIZED[method])
            fit(model, x, y, -(-epochs // 3), 128, RATE / 4, jit)
            round_biases(model)
        calibration = None if method in QUANTIZED else data.x_train[:200]
        share = accuracy(model, data) / 100
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{net}.tflite")
            report = export_litert(
                model, path, mode="int8", representative_data=calibration
            )
            classes = (
                load_litert(path).predict(data.x_test[:ROWS]).argmax(axis=1)
            )
            estimates = {name: vela(path, name) for name in ACCELERATORS}
        return {
            "accuracy": share,
            "file_accuracy": float(np.mean(classes == data.y_test[:ROWS])),
            "live": report.density,
            "weights": report.total_weights,
            "vela": estimates,
        }

    def report(self, lines: list[Run]) -> str:
        runs = [
            run
            for run in map(self.line_of, self.runs(SHOWN))
            if run is not None
        ]
        trained = "; ".join(
            f"{net.upper()}: {run['epochs']} epochs on {run['samples']:,} pictures"
            for net, run in last_of_each(runs, "net").items()
        )
        compiler = runs[0]["vela"][ACCELERATORS[0]]
        operators = {
            name
            for run in runs
            for name in run["vela"][ACCELERATORS[0]]["cpu_operators"]
        }
        text = f"# Trained networks on Ethos-U, as Vela {compiler['vela']} estimates them\n\n"
        text += sentences(
            f"""
            {machine()}, Keras {keras.__version__}. Fashion-MNIST; {trained}; batch 128, Adam
            ({RATE}, cosine decay).
            """
        )
        text += "## Accuracy\n\n" + sentences(
            f"""
            Test accuracy, mean over the seeds ({self.given.seeds}): of Keras on all, of the int8
            file on the first {ROWS} rows. Live: nonzero weights in the file.
            """
        )
        text += (
            accuracies_table(runs)
            + "\n## Estimates\n\n"
            + sentences(
                f"""
            Time of a call, batch 1, in Vela's own configuration for each accelerator; nothing was
            run on a device. On the CPU, and not timed: {", ".join(sorted(operators))}. KiB of
            weights before and after Vela's encoding.
            """
            )
        )
        return text + estimates_table(runs)


def accuracies_table(runs: list[Run]) -> str:
    """Means over the seeds."""
    rows = []
    for net, methods in SHOWN.items():
        for method in methods:
            if members := matching(runs, net=net, method=method):
                names = ("live", "accuracy", "file_accuracy")
                live, whole, file = (
                    statistics.mean(column(members, name)) for name in names
                )
                cells = [
                    f"{live:.3f}",
                    f"{100 * whole:.1f}",
                    f"{100 * file:.1f}",
                ]
                rows.append([net, method, *cells])
    return markdown(
        ["network", "method", "live", "Keras [%]", "file [%]"], rows
    )


def estimates_table(runs: list[Run]) -> str:
    """Means over the seeds, for each accelerator."""
    rows = []
    for name, (net, methods) in itertools.product(ACCELERATORS, SHOWN.items()):
        estimates = {
            method: [
                run["vela"][name]
                for run in matching(runs, net=net, method=method)
            ]
            for method in methods
        }
        dense = statistics.mean(column(estimates["dense"], "ms"))
        for method, members in estimates.items():
            if members:
                ms = statistics.mean(column(members, "ms"))
                row = [name, net, method, f"{ms:.3f}", f"{dense / ms:.2f}"]
                for size in ("weight_bytes", "encoded_bytes"):
                    row.append(
                        f"{statistics.mean(column(members, size)) / 1024:.0f}"
                    )
                rows.append(row)
    header = [
        "accelerator",
        "network",
        "method",
        "ms",
        "times as fast",
        "KiB",
        "encoded KiB",
    ]
    return markdown(header, rows)


# Vela's columns, in KiB.
MEMORIES = {
    "SRAM": "sram_memory_used",
    "DRAM": "dram_memory_used",
    "on-chip flash": "on_chip_flash_memory_used",
    "off-chip flash": "off_chip_flash_memory_used",
}


def vela(path: Path, accelerator: str) -> dict:
    """The estimates of Arm's compiler for a static int8 file, by its own command."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["-m", "ethosu.vela", str(path), "--output-dir", folder]
        command += [
            "--accelerator-config",
            accelerator,
            "--verbose-performance",
        ]
        subprocess.run(
            [sys.executable, *command], check=True, stdout=subprocess.DEVNULL
        )
        [layers] = Path(folder).glob("*_per-layer.csv")
        [summary] = Path(folder).glob("*_summary_*.csv")
        operators = list(csv.DictReader(layers.read_text().splitlines()))
        [one] = csv.DictReader(summary.read_text().splitlines())
    on_cpu = [
        row["Original Operator"] for row in operators if row["Target"] == "CPU"
    ]
    return {
        "accelerator": accelerator,
        "system_config": one["system_config"],
        "memory_mode": one["memory_mode"],
        "ms": 1e3 * float(one["inference_time"]),
        "cycles": round(float(one["cycles_total"])),
        "weight_bytes": round(float(one["total_original_weights"])),
        "encoded_bytes": round(float(one["total_npu_encoded_weights"])),
        "memory": {
            name: size
            for name, column in MEMORIES.items()
            if (size := round(1024 * float(one[column])))
        },
        "npu_operators": len(operators) - len(on_cpu),
        "cpu_operators": on_cpu,
        "vela": metadata.version("ethos-u-vela"),
    }


def ethos_u_network(net: str, method: str, seed: int) -> keras.Model:
    """A network of `ethos_u`, dense, with single zeros or in the pattern 2:4."""
    keras.utils.set_random_seed(seed)
    shape = (28, 28, 1)
    if net == "mlp":
        model = mlp(shape, (512, 512, 256), prefix="h")
    else:
        model = convolutions(shape, 2, ((64, 2), (128, 1), (128, 2)))
    if method == "dense":
        return model
    options = {"exclude": STAY_DENSE[net], "seed": seed}
    if method == "2:4":
        return kso.sparsify(
            model, 0.5, "uniform", structure=kso.NByM(2, 4), **options
        )
    return kso.sparsify(model, 0.1, **options)


# --- quantized ------------------------------------------------------------------------------------

VELA_OF_QUANTIZED = ("ethos-u55-128", "ethos-u85-256")
# Epochs and learning rates: sparse from the first step, and those after it.
# Epochs and learning rates: sparse from the first step, and those after it.
QUANTIZED_NETS = {
    "cnn": {"epochs": 4, "rate": 4e-3, "more": 2, "more_rate": 5e-4},
    "mobilenet": {"epochs": 3, "rate": 3.2e-2, "more": 1, "more_rate": 2e-3},
}
# The weights that are rounded: after training, or in training.
ROUNDED = (
    "float",
    "int8 after",
    "int8",
    "int4 after",
    "int4",
    "ternary after",
    "ternary",
)
# Palettes and learnt scales lost, and are gone since commit 936aadd; their lines stay.
ROUNDED_SHOWN = (*ROUNDED[:5], "palette 16 after", "palette 16", *ROUNDED[5:])
ROUNDED_SHOWN += ("int4, learnt scales", "ternary, learnt scales")
ESTIMATED = ("int8 after", "int8", "int4", "ternary")
BATCH = 128


class Quantized(Measurement):
    """Sparse networks quantized after training and in training: accuracy of models and of files.

        python benchmarks/shipped.py quantized [--nets cnn mobilenet] [--seeds 3]

    For each seed the CNN of `one_shot.py` and the MobileNet of `methods.py contemporary` are
    trained sparse from the first step on Fashion-MNIST; then every method goes on from these
    weights for some epochs more, the float network as well, all at the same rates (Adam, cosine
    decay). Trained models stay in `out/quantized`, and are not made twice.
    """

    page = lines = "quantized"
    settings = {
        "nets": Setting(
            [*QUANTIZED_NETS], choices=QUANTIZED_NETS, quick=["cnn"]
        ),
        "seeds": Setting(3, quick=1),
        "images": Setting(10000, quick=512),
        "density": Setting(0.1),
    }

    def runs(self) -> Iterable[Run]:
        given = self.given
        for net in given.nets:
            setting = {
                "net": net,
                "images": given.images,
                "density": given.density,
            }
            for which in grid(seed=range(given.seeds), method=ROUNDED):
                yield setting | QUANTIZED_NETS[net] | which
            for method in ESTIMATED:  # what Vela says of the files of a seed
                yield setting | {"seed": 0, "method": method, "estimated": True}

    def line_of(self, which: Run) -> Run | None:
        """The line of a run; those of Vela's estimates have no epochs."""
        settings = {
            name: value for name, value in which.items() if name != "estimated"
        }
        lines = matching(self.finished(), **settings)
        estimated = "estimated" in which
        return next(
            (line for line in lines if ("vela" in line) == estimated), None
        )

    def run(self, which: Run) -> Run:
        net, method, seed = which["net"], which["method"], which["seed"]
        data = load("fashion_mnist")
        # The file of `int8 after` is the converter's own, calibrated.
        source = "float" if method == "int8 after" else method
        model = trained(
            net, source, seed, data, which["images"], which["density"]
        )
        if source != "float":
            round_biases(model)
        if "estimated" in which:
            return {"vela": estimates_of(model, data)}
        results = {"accuracy": answered(model, data)}
        return (
            results
            if method == "float"
            else results | accuracy_of_file(model, data)
        )

    def report(self, lines: list[Run]) -> str:
        given = self.given
        text = "# Sparse networks, quantized\n\n" + sentences(
            f"""
            Fashion-MNIST, {given.images:,} images, density {given.density:g} from the first step
            (MobileNet: of its pointwise kernels). Every method, float as well, trains from the same
            weights for some epochs more. `after`: the float network after these, rounded without
            training. Its int8 file is the converter's, calibrated on 500 images; in the others
            weights are rounded as `quantize_aware` does it, with ranges of activations from 1000
            images. Test accuracy, mean and standard deviation over the seeds; palettes are of 16
            values that are int8. Points: the loss of the file against the float network.
            """
        )
        common = {"images": given.images, "density": given.density}
        for net, how in QUANTIZED_NETS.items():
            if runs := matching(lines, net=net, **common, **how):
                seeds = sorted({run["seed"] for run in runs})
                text += f"## {net}\n\n{how['epochs']} epochs at {how['rate']:g}, {how['more']} "
                text += f"more at {how['more_rate']:g}; seeds {seeds}.\n\n{quantized_table(runs)}\n"
        text = text.rstrip("\n") + "\n" + storages_table(lines)
        return text + vela_table(
            [line for line in matching(lines, **common) if "vela" in line]
        )


def quantized_table(runs: list[Run]) -> str:
    """Means over the seeds."""
    floats = {
        run["seed"]: run["accuracy"] for run in matching(runs, method="float")
    }
    rows = []
    for method in ROUNDED_SHOWN:
        members = matching(runs, method=method)
        if not members:
            continue
        files = [run for run in members if "file" in run]
        row = [method, mean_and_deviation(column(members, "accuracy"))]
        row.append(mean_and_deviation(column(files, "file")) if files else "")
        # The file where there is one, as it is what ships.
        ships = [
            floats[run["seed"]] - run.get("file", run["accuracy"])
            for run in members
        ]
        row.append(f"{statistics.mean(ships):.2f}" if method != "float" else "")
        if files:
            row.append(f"{100 * max(column(files, 'error')):.2f}")
            row.append(f"{statistics.mean(column(files, 'gzip')) / 1e3:.1f}")
        else:
            row += ["", ""]
        rows.append(row)
    header = ["weights", "Keras [%]", "int8 file [%]", "points lost"]
    return markdown(
        [*header, "largest rms of file and Keras [%]", "gzip [kB]"], rows
    )


def vela_table(runs: list[Run]) -> str:
    """The section on Vela's estimates, if there are some."""
    if not runs:
        return ""
    rows = []
    for name, run in itertools.product(VELA_OF_QUANTIZED, runs):
        estimate = run["vela"][name]
        sizes = [
            f"{estimate[key] / 1024:.1f}"
            for key in ("weight_bytes", "encoded_bytes")
        ]
        rows.append(
            [name, run["net"], run["method"], f"{estimate['ms']:.3f}", *sizes]
        )
    about = sentences(
        """
        The int8 files of seed 0, batch 1; nothing was run on a device. KiB of weights before and
        after Vela's encoding.
        """
    )
    version = runs[0]["vela"][VELA_OF_QUANTIZED[0]]["vela"]
    header = ["accelerator", "network", "weights", "ms", "KiB", "encoded KiB"]
    return (
        f"\n## On Ethos-U, as Vela {version} estimates\n\n"
        + about
        + markdown(header, rows)
    )


def estimates_of(model: keras.Model, data: Dataset) -> Run:
    """Vela's estimates for the model's file, by accelerator."""
    names = ("ms", "weight_bytes", "encoded_bytes", "vela")
    estimates = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        rows = data.x_train[:500]
        export_litert(
            model, path, mode="int8", representative_data=rows, tolerance=2.0
        )
        for accelerator in VELA_OF_QUANTIZED:
            estimate = vela(path, accelerator)
            estimates[accelerator] = {name: estimate[name] for name in names}
    return estimates


def quantized_network(net: str) -> tuple[keras.Model, list[str] | None]:
    """The dense network, and what `sparsify` is to make sparse."""
    if net == "cnn":
        return dense_cnn(), None
    # As RigL has it: depthwise kernels are few, and stay dense.
    return mobilenet((28, 28, 1), 10, {"alpha": 0.25}), [".*_pointwise/kernel"]


def fitted(
    model: keras.Model, data: Dataset, images: int, epochs: int, rate: float
) -> None:
    """Trains a model on the first images."""
    steps = max(1, int(epochs * (images // BATCH)))
    rates = keras.optimizers.schedules.CosineDecay(rate, steps)
    # XLA's depthwise convolutions are slow on a CPU.
    compiled(model, keras.optimizers.Adam(rates), jit_compile=False)
    x, y = data.x_train[:images], data.y_train[:images]
    model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)


def calibrated(model: keras.Model, data: Dataset) -> None:
    """Sets the ranges of activations, and nothing else, on 1000 images."""
    norms = [
        x
        for x in model._flatten_layers()
        if isinstance(x, L.BatchNormalization)
    ]
    for layer in norms:
        layer.trainable = False
    for start in range(0, 1000, 100):
        model(data.x_train[start : start + 100], training=True)
    for layer in norms:
        layer.trainable = True


def answered(model: keras.Model, data: Dataset) -> float:
    """Percent of the test images."""
    answers = model.predict(data.x_test, batch_size=500, verbose=0)
    return 100 * float((answers.argmax(1) == data.y_test).mean())


def accuracy_of_file(model: keras.Model, data: Dataset) -> Run:
    """Percent of the test images in an int8 file, its difference from Keras and gzip bytes."""
    size = 500
    right = 0
    count = len(data.x_test) // size * size
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.tflite"
        options = {"mode": "int8", "batch_size": size, "tolerance": 2.0}
        report = export_litert(
            model, path, representative_data=data.x_train[:size], **options
        )
        file = load_litert(path)
        for start in range(0, count, size):
            classes = file.predict(data.x_test[start : start + size]).argmax(1)
            right += int((classes == data.y_test[start : start + size]).sum())
    return {
        "file": 100 * right / count,
        "error": report.error,
        "gzip": report.gzip_bytes,
    }


def trained(
    net: str, method: str, seed: int, data: Dataset, images: int, density: float
) -> keras.Model:
    """The model of a method, from its file if there is one; `start` is what all go on from."""
    folder = OUT / ("quick/quantized" if QUICK else "quantized")
    file = folder / f"{net}-{seed}-{images}-{density:g}-{method}.keras"
    if file.exists():
        return keras.models.load_model(file, compile=False)
    how = QUANTIZED_NETS[net]
    after = method.endswith(" after")
    keras.utils.set_random_seed(seed)
    if method == "start":
        dense, include = quantized_network(net)
        model = kso.sparsify(dense, density, include=include, seed=seed)
        fitted(model, data, images, how["epochs"], how["rate"])
    else:
        model = trained(
            net, "float" if after else "start", seed, data, images, density
        )
        if method != "float":
            model = kso.quantize_aware(
                model, method.removesuffix(" after"), momentum=0.95
            )
        if after:
            calibrated(model, data)
        else:
            fitted(model, data, images, how["more"], how["more_rate"])
    folder.mkdir(parents=True, exist_ok=True)
    model.save(file)
    return model


# --- storages -------------------------------------------------------------------------------------

WIDE = {"epochs": 3, "rate": 2e-3, "more": 1, "more_rate": 5e-4}
# Arguments of `quantize_aware`, and the files of its models.
STATIC, DYNAMIC = ("int8", "int4"), ("dynamic_int8", "dynamic_int4")
TRAININGS = {
    "none": (None, (*DYNAMIC, *STATIC)),
    "int4": (("int4", "int8"), STATIC),
    "int4, weights alone": (("int4", None), DYNAMIC),
    "ternary, weights alone": (("ternary", None), DYNAMIC),
}


def encoder() -> keras.Model:
    """Two blocks over the rows of an image."""
    inputs = keras.Input((28, 28, 1))
    x = L.Dense(128)(L.Reshape((28, 28))(inputs))
    for _ in range(2):
        y = L.LayerNormalization()(x)
        x = L.Add()([x, L.MultiHeadAttention(4, 32)(y, y)])
        y = L.Dense(256, activation="relu")(L.LayerNormalization()(x))
        x = L.Add()([x, L.Dense(128)(y)])
    return keras.Model(
        inputs, L.Dense(10, name="head")(L.GlobalAveragePooling1D()(x))
    )


# Networks, densities from the first step (1 is the dense network, the rival), other options.
STORED: dict[str, tuple[Callable[[], keras.Model], tuple[float, ...], Run]] = {
    "mlp": (lambda: mlp((28, 28, 1), (1024, 1024)), (1, 0.1), {}),
    "mlp, blocks": (
        lambda: mlp((28, 28, 1), (1024, 1024)),
        (0.125,),
        {"structure": "16x16", "exclude": "head"},
    ),
    "cnn": (dense_cnn, (1, 0.2), {}),
    "encoder": (encoder, (1, 0.2), {}),
}


class Storages(Quantized):
    """Files with kernels in 8, 4 and 2 bits: sparse ones beside those of dense networks.

        python benchmarks/shipped.py storages [--networks mlp]

    Trained with and without the rounding on Fashion-MNIST. The lines and the page are those of
    `quantized`.
    """

    resumes = False
    settings = {
        "networks": Setting([*STORED], choices=STORED, quick=["mlp, blocks"]),
        "images": Setting(10000, quick=256),
        "seconds": Setting(20.0, "of timing in one training", quick=1.0),
        "density": Setting(0.1, "of the other sections"),
    }

    def runs(self) -> Iterable[Run]:
        for network in self.given.networks:
            for density in STORED[network][1]:
                yield {
                    "network": network,
                    "density": density,
                    "images": self.given.images,
                }

    def run(self, which: Run) -> Iterator[Run]:
        """The files of a network at a density, for each training."""
        data = load("fashion_mnist")
        network, density, images = (
            which["network"],
            which["density"],
            which["images"],
        )
        keras.utils.set_random_seed(0)
        build, _, how = STORED[network]
        base = (
            build()
            if density == 1
            else kso.sparsify(build(), density, seed=0, **how)
        )
        fitted(base, data, images, WIDE["epochs"], WIDE["rate"])
        for training, (arguments, routes) in TRAININGS.items():
            if network != "mlp" and "ternary" in training:
                continue
            model = base
            if arguments is not None:
                model = kso.quantize_aware(base, *arguments, momentum=0.95)
                fitted(model, data, images, WIDE["more"], WIDE["more_rate"])
            if arguments == ("int4", "int8"):
                round_biases(model)
            if "structure" in how:
                routes = [
                    f"{route}+blocks" for route in routes if "int8" in route
                ]
            for line in stored_files(model, routes, data, self.given.seconds):
                yield {"storages": training} | WIDE | line


def stored_files(
    model: keras.Model, routes: Iterable[str], data: Dataset, seconds: float
) -> Iterator[Run]:
    """Size, time and accuracy of the files of a model."""
    with tempfile.TemporaryDirectory() as folder:
        reports = []
        for mode in routes:
            rows = data.x_train[:500] if mode.startswith("int") else None
            options = {"representative_data": rows, "sample": data.x_test[:64]}
            path = Path(folder) / mode
            try:
                reports.append(
                    export_litert(
                        model, path, mode=mode, tolerance=2.0, **options
                    )
                )
            except ExportConversionError as error:  # no Dense kernel of 4 bits
                print(mode, error, flush=True)
        times = latencies([report.path for report in reports], 1, seconds)
        for report, ms in zip(reports, times, strict=True):
            classes = (
                load_litert(report.path).predict(data.x_test[:2000]).argmax(1)
            )
            line = {
                "route": report.route,
                "bytes": report.bytes,
                "gzip": report.gzip_bytes,
            }
            line |= {
                "ms": ms,
                "error": report.error,
                "keras": answered(model, data),
            }
            yield line | {
                "file": 100 * float((classes == data.y_test[:2000]).mean())
            }


def storages_table(lines: list[Run]) -> str:
    """The section on files, if there are some; the last line of each counts."""
    files = [{"network": "mlp"} | line for line in lines if "storages" in line]
    if not files:
        return ""
    by_file = last_of_each(files, "network", "density", "storages", "route")
    order = [*STORED]
    rows = []
    for kind in sorted(
        by_file, key=lambda kind: (order.index(kind[0]), -kind[1])
    ):
        network, density, training, route = kind
        line = by_file[kind]
        row = [
            network,
            "dense" if density == 1 else f"{density:g}",
            training,
            route,
        ]
        row += [f"{line[size] / 1e3:.0f}" for size in ("bytes", "gzip")]
        row += [f"{line['ms']:.3f}", f"{100 * line['error']:.2f}"]
        rows.append(
            [*row, *(f"{line[name]:.1f}" for name in ("keras", "file"))]
        )
    about = sentences(
        f"""
        An MLP 784-1024-1024-10 (blocks: of 16), the CNN of `one_shot.py`, whose Dense kernels alone
        can have 4 bits, and an encoder of two blocks; {WIDE["epochs"]} epochs and {WIDE["more"]}
        more with the rounding; the dense network is the rival of each. `dynamic_int4` has ternary
        kernels in 2 bits. Batch 1, one thread, files of a row's training interleaved; test accuracy
        of Keras (10,000 images) and of the file (the first 2,000).
        """
    )
    header = [
        "network",
        "density",
        "training",
        "file",
        "kB",
        "gzip [kB]",
        "ms",
        "rms [%]",
    ]
    table = markdown([*header, "Keras [%]", "file [%]"], rows)
    return "\n## Kernels in 8, 4 and 2 bits\n\n" + about + table


if __name__ == "__main__":
    main(Files, EthosU, Quantized, Storages)
