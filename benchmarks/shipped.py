"""Trained networks as files: accuracy, size and time where they are run.

    python benchmarks/shipped.py NAME [options]

The measurements:

- `files`: accuracy of trained networks on blocks beside dense ones: in Keras, and as LiteRT
  files.
- `ethos_u`: what Vela estimates for trained networks on Ethos-U: dense, single zeros, quantized,
  2:4.
- `runtimes`: latency of live blocks in ONNX Runtime and OpenVINO, as `model.export` of Keras
  writes them.
"""

import csv
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from record import (
    RESULTS,
    append,
    chosen,
    described,
    finished,
    interleaved,
    machine,
    markdown,
    parsed,
    write,
)
from training import Dataset, load

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import load_litert

# --- files ----------------------------------------------------------------------------------------


L = keras.layers
METHODS = ("dense", "blocks")
DENSITY = {"mlp": 0.125, "cnn": 0.25}
EPOCHS = {
    ("digits", "mlp"): 40,
    ("digits", "cnn"): 40,
    ("fashion_mnist", "mlp"): 5,
    ("fashion_mnist", "cnn"): 5,
}
SAMPLES = {("fashion_mnist", "cnn"): 20_000}  # else all
RATE = 2e-3
WIDTHS = {"digits": 256, "fashion_mnist": 1024}


def network(data: Dataset, net: str, method: str, seed: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    if net == "mlp":
        width = WIDTHS[data.name]
        hidden = [
            L.Flatten(),
            *(L.Dense(width, activation="relu", name=f"h{k}") for k in range(3)),
        ]
    else:
        step = 1 if data.name == "digits" else 2
        sizes = ((64, step), (128, 2), (128, 1))
        hidden = [
            L.Conv2D(32, 3, 1, padding="same", activation="relu", name="stem"),
            L.MaxPooling2D() if data.name != "digits" else L.Activation("linear"),
            *(
                L.Conv2D(n, 3, strides, padding="same", activation="relu", name=f"c{k}")
                for k, (n, strides) in enumerate(sizes)
            ),
            L.GlobalAveragePooling2D(),
        ]
    head = L.Dense(data.classes, name="head")
    model = keras.Sequential([keras.Input(data.x_train.shape[1:], name="x"), *hidden, head])
    if method == "dense":
        return model
    exclude = ["head"] if net == "mlp" else ["stem", "head"]
    return kso.sparsify(model, DENSITY[net], storage="blocks", exclude=exclude, seed=seed)


def fit(model: keras.Model, data: Dataset, epochs: int, samples: int | None) -> None:
    x, y = data.x_train[:samples], data.y_train[:samples]
    size = 32 if len(x) < 5_000 else 128
    steps = epochs * -(-len(x) // size)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(RATE, steps)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=keras.backend.backend() != "torch",
    )
    model.fit(x, y, batch_size=size, epochs=epochs, verbose=0)


ROUTES = {
    "dense": ("float32", "int8", "dynamic_int4"),
    "blocks": ("float32+blocks", "int8+blocks"),
}
TIMED = [("fashion_mnist", "mlp"), ("fashion_mnist", "cnn")]  # one call, all files in turn


def exported(model: keras.Model, method: str, data: Dataset, folder: Path) -> dict:
    """The reports of a model's files, by route without `+blocks`. Convolutions get no int4."""
    files = {}
    for route in ROUTES[method]:
        options = {}
        if route == "dynamic_int4":
            if any(isinstance(layer, L.Conv2D) for layer in model.layers):
                continue
            options = {"tolerance": 1e6}  # written in any case: its accuracy is what is measured
        elif route.startswith("int8"):
            options = {"representative_data": data.x_train[:500]}
        path = folder / f"{method} {route}.tflite"
        report = kso.export_litert(model, path, mode=route, **options)
        files[route.removesuffix("+blocks")] = report
    return files


def run(data: Dataset, net: str, method: str, epochs: int, samples: int | None, seed: int) -> dict:
    """Trains one network, and takes its accuracy from Keras and from its files."""
    model = network(data, net, method, seed)
    fit(model, data, epochs, samples)
    _, accuracy = model.evaluate(data.x_test, data.y_test, batch_size=1000, verbose=0)
    found = {"accuracy": float(accuracy)}
    with tempfile.TemporaryDirectory() as folder:
        for kind, report in exported(model, method, data, Path(folder)).items():
            guesses = load_litert(report.path).predict(data.x_test).argmax(axis=1)
            found[f"{kind}_accuracy"] = float(np.mean(guesses == data.y_test))
            found[f"{kind}_bytes"] = report.bytes
            if kind == "int8":
                found["live"] = round(report.density * report.total_weights)
    return found


def timed(data: Dataset, net: str) -> dict[str, dict[str, float]]:
    """Milliseconds of one call with one row on one thread: all files of a network in turn.

    The networks are not trained: the time does not depend on the values of live weights.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            (method, kind): report.path
            for method in METHODS
            for kind, report in exported(
                network(data, net, method, 0), method, data, Path(folder)
            ).items()
        }
        taken = zip(paths, kso.export.latencies([*paths.values()], seconds=20), strict=True)
        found: dict[str, dict[str, float]] = {method: {} for method in METHODS}
        for (method, kind), ms in taken:
            found[method][kind] = ms
    return found


def _percent(values: Iterable[float]) -> str:
    found = [100 * value for value in values]
    spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.2f}{spread}"


def table(runs: list[dict]) -> str:
    """A line for each dataset, network and method."""
    lines = []
    times = {(one["data"], one["net"]): one["ms"] for one in runs if one["method"] == "timed"}
    kinds = ("float32", "int8", "dynamic_int4")
    for data, net in dict.fromkeys((one["data"], one["net"]) for one in runs):
        for method in METHODS:
            these = [r for r in runs if (r["data"], r["net"], r["method"]) == (data, net, method)]
            if these:
                ms = times.get((data, net), {}).get(method, {})
                lines.append([data, net, method, f"{these[0]['live']:,}"])
                lines[-1].append(_percent(run["accuracy"] for run in these))
                for kind in kinds:
                    if f"{kind}_bytes" not in these[0]:
                        lines[-1] += ["", "", ""]
                        continue
                    lines[-1] += [
                        _percent(run[f"{kind}_accuracy"] for run in these),
                        f"{these[0][f'{kind}_bytes'] / 1e3:.0f}",
                        f"{ms[kind]:.3f}" if kind in ms else "",
                    ]
    header = ["data", "network", "method", "live", "Keras [%]"]
    for kind in ("float32", "int8", "int4"):
        header += [f"{kind} file [%]", f"{kind} kB", f"{kind} ms"]
    return markdown(header, lines)


def files() -> None:
    """Accuracy of trained networks on blocks beside dense ones: in Keras, and as LiteRT files.

        python benchmarks/shipped.py files
        python benchmarks/shipped.py files --data digits --seeds 1
        python benchmarks/shipped.py files --summary  # only the table, from the lines there are

    An MLP of three hidden layers and a CNN of four 3x3 convolutions are trained on digits and on
    Fashion-MNIST, dense and by `sparsify(model, density, storage="blocks")`, in the same way
    (Adam, cosine decay). The head, and the first convolution, are dense. Each is exported in
    float32 and in static int8, those on blocks as `+blocks`, and Keras and the files answer the
    whole test set. Dense MLPs also have a file in dynamic int4, rounded after training. One call
    of each file for Fashion-MNIST is timed, all in turn. Finished runs are lines of
    `results/shipped.jsonl` and not repeated; the table is `results/shipped.md`.
    """
    parser = described(files)
    parser.add_argument("--data", choices=["digits", "fashion_mnist"], action="append")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="default: by data and network")
    parser.add_argument("--samples", type=int, help="pictures to train on, default all")
    parser.add_argument("--summary", action="store_true", help="only the table")
    options = parsed(parser, {"data": ["digits"], "seeds": 1, "epochs": 1})
    file = RESULTS / "shipped.jsonl"
    RESULTS.mkdir(parents=True, exist_ok=True)
    runs, loaded = [], {}
    for seed in range(options.seeds):
        for (data, net), epochs in EPOCHS.items():
            if options.data and data not in options.data:
                continue
            for method in METHODS:
                settings = {"data": data, "net": net, "method": method, "seed": seed}
                settings |= {"epochs": options.epochs or epochs}
                settings["samples"] = options.samples or SAMPLES.get((data, net))
                done = (one for one in finished(file) if settings.items() <= one.items())
                row = next(done, None)
                if row is None:
                    if options.summary:
                        continue
                    if data not in loaded:
                        loaded[data] = load(data)
                    row = settings | run(
                        loaded[data], net, method, settings["epochs"], settings["samples"], seed
                    )
                    append(file, row)
                    print(row, flush=True)
                runs.append(row)
    if not runs:
        parser.error("nothing is trained yet")
    trained = {(one["data"], one["net"]): (one["epochs"], one["samples"]) for one in runs}
    seeds = [one["seed"] for one in runs]
    for data, net in TIMED:
        settings = {"data": data, "net": net, "method": "timed"}
        row = next((one for one in finished(file) if settings.items() <= one.items()), None)
        if row is None and (data, net) in trained and not options.summary:
            row = settings | {"ms": timed(loaded.get(data) or load(data), net)}
            append(file, row)
        runs += [row] if row else []
    how = "; ".join(
        f"{net.upper()} on {data}: {epochs}" + (f" on {samples:,} pictures" if samples else "")
        for (data, net), (epochs, samples) in trained.items()
    )
    places = "; ".join(dict.fromkeys(one["made"]["machine"] for one in finished(file)))
    text = (
        f"# Trained networks on blocks, as files\n\n{places or machine()}, Keras "
        f"{keras.__version__} on {keras.backend.backend()}. Test accuracy after the last epoch, "
        "mean and standard deviation over the seeds: of Keras, and of the files, which answer the "
        f"whole test set. Epochs: {how}; Adam ({RATE:g}, cosine decay). Blocks: "
        f'`sparsify(model, density, storage="blocks")`, density {DENSITY["mlp"]:g} (MLP) and '
        f"{DENSITY['cnn']:g} (CNN), head and first convolution dense; files `+blocks`. Live: "
        "nonzero weights of the network of seed 0, whose files' bytes these are. int4: Dense "
        "kernels in four bits, rounded after training. ms: one call with one row, one thread, "
        "files of a network in turn.\n\n"
    )
    write("shipped", text + table(runs), seeds=seeds)


# --- ethos_u --------------------------------------------------------------------------------------

ACCELERATORS = ("ethos-u55-128", "ethos-u55-256", "ethos-u65-256", "ethos-u85-256")
# The weights of the sparse networks in the last epochs.
QUANTIZED = {"0.1, trained as int8": "int8"}
SPARSE = ("density 0.1", *QUANTIZED)
ETHOS_U_METHODS = {"mlp": ("dense", *SPARSE), "cnn": ("dense", *SPARSE, "2:4")}
# Palettes lost to int4, and are gone since commit 936aadd; their lines stay.
SHOWN = {net: (*rows[:3], "0.1, palette of 16", *rows[3:]) for net, rows in ETHOS_U_METHODS.items()}
ETHOS_U_EPOCHS, ETHOS_U_SAMPLES = {"mlp": 5, "cnn": 6}, {"mlp": 60_000, "cnn": 60_000}
ROWS = 2000  # of the test set, on which the file is run


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
        command += ["--accelerator-config", accelerator, "--verbose-performance"]
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        [layers] = Path(folder).glob("*_per-layer.csv")
        [summary] = Path(folder).glob("*_summary_*.csv")
        operators = list(csv.DictReader(layers.read_text().splitlines()))
        [one] = csv.DictReader(summary.read_text().splitlines())
    on_cpu = [row["Original Operator"] for row in operators if row["Target"] == "CPU"]
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
    keras.utils.set_random_seed(seed)
    if net == "mlp":
        hidden = [
            L.Flatten(),
            *(L.Dense(n, "relu", name=f"h{k}") for k, n in enumerate((512, 512, 256))),
        ]
    else:
        sizes = ((64, 2), (128, 1), (128, 2))
        hidden = [
            L.Conv2D(32, 3, 2, padding="same", activation="relu", name="stem"),
            *(
                L.Conv2D(n, 3, step, padding="same", activation="relu", name=f"c{k}")
                for k, (n, step) in enumerate(sizes)
            ),
            L.GlobalAveragePooling2D(),
        ]
    model = keras.Sequential([keras.Input((28, 28, 1)), *hidden, L.Dense(10, name="head")])
    dense = ["head"] if net == "mlp" else ["stem", "head"]
    if method == "2:4":
        pattern = kso.NByM(2, 4)
        return kso.sparsify(model, 0.5, "uniform", structure=pattern, exclude=dense, seed=seed)
    return model if method == "dense" else kso.sparsify(model, 0.1, exclude=dense, seed=seed)


def ethos_u_fit(model: keras.Model, data: Dataset, epochs: int, samples: int, rate: float) -> None:
    steps = epochs * -(-samples // 128)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=keras.backend.backend() == "jax",  # TensorFlow trains CNNs faster without
    )
    x, y = data.x_train[:samples], data.y_train[:samples]
    model.fit(x, y, batch_size=128, epochs=epochs, verbose=0)


def ethos_u_run(net: str, method: str, data: Dataset, epochs: int, samples: int, seed: int) -> dict:
    """Trains one network, and compiles its file for each accelerator."""
    model = ethos_u_network(net, method, seed)
    ethos_u_fit(model, data, epochs, samples, RATE)
    if method in QUANTIZED:
        model = kso.quantize_aware(model, QUANTIZED[method])
        ethos_u_fit(model, data, -(-epochs // 3), samples, RATE / 4)
        kso.quantization.round_biases(model)
    calibration = None if method in QUANTIZED else data.x_train[:200]
    _, accuracy = model.evaluate(data.x_test, data.y_test, batch_size=1000, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{net}.tflite")
        report = kso.export_litert(model, path, mode="int8", representative_data=calibration)
        opened = load_litert(path)
        guesses = opened.predict(data.x_test[:ROWS]).argmax(axis=1)
        found = {name: vela(path, name) for name in ACCELERATORS}
    return {
        "accuracy": float(accuracy),
        "file_accuracy": float(np.mean(guesses == data.y_test[:ROWS])),
        "live": report.density,
        "weights": report.total_weights,
        "vela": found,
    }


def tables(runs: list[dict], seeds: int, about: str) -> str:
    """A table of accuracies and one of estimates, both as means over the seeds."""

    def these(net: str, method: str) -> list[dict]:
        return [one for one in runs if (one["net"], one["method"]) == (net, method)]

    accuracies, estimates = [], []
    for net, methods in SHOWN.items():
        for method in methods:
            if not (found := these(net, method)):
                continue
            live, whole, file = (
                statistics.mean(one[name] for one in found)
                for name in ("live", "accuracy", "file_accuracy")
            )
            cells = [f"{live:.3f}", f"{100 * whole:.1f}", f"{100 * file:.1f}"]
            accuracies.append([net, method, *cells])
    for name in ACCELERATORS:
        for net, methods in SHOWN.items():
            dense = statistics.mean(one["vela"][name]["ms"] for one in these(net, "dense"))
            for method in methods:
                if not (made := [one["vela"][name] for one in these(net, method)]):
                    continue
                ms = statistics.mean(one["ms"] for one in made)
                sizes = [
                    statistics.mean(one[size] for one in made) / 1024
                    for size in ("weight_bytes", "encoded_bytes")
                ]
                cells = [f"{ms:.3f}", f"{dense / ms:.2f}", *(f"{one:.0f}" for one in sizes)]
                estimates.append([name, net, method, *cells])
    compiler = runs[0]["vela"][ACCELERATORS[0]]["vela"]
    left = ", ".join(
        sorted({k for one in runs for k in one["vela"][ACCELERATORS[0]]["cpu_operators"]})
    )
    return (
        f"# Trained networks on Ethos-U, as Vela {compiler} estimates them\n\n{about}\n\n"
        f"## Accuracy\n\nTest accuracy, mean over the seeds ({seeds}): of Keras on all, of the "
        f"int8 file on the first {ROWS} rows. Live: nonzero weights in the file.\n\n"
        + markdown(["network", "method", "live", "Keras [%]", "file [%]"], accuracies)
        + "\n## Estimates\n\nTime of a call, batch 1, in Vela's own configuration for each "
        f"accelerator; nothing was run on a device. On the CPU, and not timed: {left}. KiB of "
        "weights before and after Vela's encoding.\n\n"
        + markdown(
            ["accelerator", "network", "method", "ms", "times as fast", "KiB", "encoded KiB"],
            estimates,
        )
    )


def ethos_u() -> None:
    """Vela's estimates for trained networks on Ethos-U: dense, single zeros, quantized, 2:4.

        python benchmarks/shipped.py ethos_u
        python benchmarks/shipped.py ethos_u --seeds 1 --epochs 1 --samples 2048

    An MLP 784-512-512-256-10 and a CNN of four 3x3 convolutions (32 to 128 channels, 14 x 14 down
    to 4 x 4) are trained on Fashion-MNIST, all in the same way, Adam with cosine decay: dense;
    with single zeros at density 0.1 (`sparsify`, exactly orthogonal, ERK); the same, trained on
    with int8 weights, a third of the epochs at a quarter of the rate;
    the CNN also with `NByM(2, 4)`. The first convolution and the head are dense. Each is exported
    as static int8, its file's accuracy taken on the test set, and compiled by Arm's compiler
    Vela. Finished runs are lines of `results/ethos_u.jsonl` and not repeated; the tables are
    `results/ethos_u.md`. Needs the extra `ethos-u`.
    """
    parser = described(ethos_u)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, help=f"default {ETHOS_U_EPOCHS}")
    parser.add_argument(
        "--samples", type=int, help=f"pictures to train on, default {ETHOS_U_SAMPLES}"
    )
    parser.add_argument(
        "--summary", action="store_true", help="only the tables, from the lines there are"
    )
    options = parsed(parser, {"seeds": 1, "epochs": 1, "samples": 1024})
    lines = RESULTS / "ethos_u.jsonl"
    RESULTS.mkdir(parents=True, exist_ok=True)
    data = None
    runs = []
    for seed in range(options.seeds):
        for net, methods in ETHOS_U_METHODS.items():
            for method in methods:
                settings = {
                    "net": net,
                    "method": method,
                    "seed": seed,
                    "epochs": options.epochs or ETHOS_U_EPOCHS[net],
                    "samples": options.samples or ETHOS_U_SAMPLES[net],
                }
                done = (one for one in finished(lines) if settings.items() <= one.items())
                row = next(done, None)
                if row is None:
                    if options.summary:
                        continue
                    data = data or load("fashion_mnist")
                    row = settings | ethos_u_run(
                        net, method, data, settings["epochs"], settings["samples"], seed
                    )
                    append(lines, row)
                    print(row, flush=True)
                runs.append(row)
    trained = {one["net"]: f"{one['epochs']} epochs on {one['samples']:,} pictures" for one in runs}
    about = (
        f"{machine()}, Keras {keras.__version__}. Fashion-MNIST; "
        f"{'; '.join(f'{net.upper()}: {how}' for net, how in trained.items())}; batch 128, Adam "
        f"({RATE}, cosine decay)."
    )
    write("ethos_u", tables(runs, options.seeds, about), seeds=range(options.seeds))


# --- runtimes -------------------------------------------------------------------------------------

NEEDED = ("onnxruntime", "openvino", "tf2onnx")
RUNTIMES_DENSITY = 1 / 8


def networks(width: int, blocks: list[int]) -> dict[str, keras.Model]:
    """The dense MLP, and that of each size of blocks."""
    keras.utils.set_random_seed(0)
    hidden = [L.Dense(width, activation="relu", name=f"dense_{k}") for k in range(4)]
    dense = keras.Sequential([keras.Input((width,), name="x"), *hidden])
    found = {"dense": dense}
    for side in blocks:
        structure = kso.Block(side, side, regular=True)
        options = {"structure": structure, "storage": "blocks", "seed": 0}
        found[f"blocks of {side}"] = kso.sparsify(dense, RUNTIMES_DENSITY, **options)
    return found


def onnx_file(model: keras.Model, x: np.ndarray, folder: Path) -> str:
    """As Keras exports it."""
    path = str(folder / "model.onnx")
    spec = [keras.InputSpec(shape=x.shape, dtype="float32")]
    model.export(path, format="onnx", input_signature=spec, verbose=False)
    return path


def onnx_session(path: str, x: np.ndarray) -> Callable:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    given = {session.get_inputs()[0].name: x}
    return lambda: session.run(None, given)[0]


def onnx_runtime(model: keras.Model, x: np.ndarray, folder: Path) -> Callable:
    return onnx_session(onnx_file(model, x, folder), x)


def onnx_runtime_int8(model: keras.Model, x: np.ndarray, folder: Path) -> Callable:
    """Quantized by ONNX Runtime, activations on the fly."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = folder / "int8.onnx"
    quantize_dynamic(onnx_file(model, x, folder), path, weight_type=QuantType.QInt8)
    return onnx_session(str(path), x)


def openvino(model: keras.Model, x: np.ndarray, folder: Path) -> Callable:
    import openvino

    path = str(folder / "model.xml")
    spec = [keras.InputSpec(shape=x.shape, dtype="float32")]
    model.export(path, format="openvino", input_signature=spec, verbose=False)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    return lambda: request.infer([x])[0]


def litert_int8(model: keras.Model, x: np.ndarray, folder: Path) -> Callable:
    """Weights in int8, activations on the fly; blocks as `export_litert` writes them."""
    from ai_edge_litert.interpreter import Interpreter

    blocks = any(w.live < w.size for w in kso.prunable_weights(model))
    route = "dynamic_int8+blocks" if blocks else "dynamic_int8"
    path = str(folder / "model.tflite")
    kso.export_litert(model, path, mode=route, batch_size=len(x), sample=x)
    interpreter = Interpreter(path, num_threads=1)
    interpreter.allocate_tensors()
    (given,), (found,) = interpreter.get_input_details(), interpreter.get_output_details()

    def call() -> np.ndarray:
        interpreter.set_tensor(given["index"], x)
        interpreter.invoke()
        return interpreter.get_tensor(found["index"])

    return call


RUNTIMES = {
    "ONNX Runtime": onnx_runtime,
    "OpenVINO": openvino,
    "ONNX Runtime, int8": onnx_runtime_int8,
    "LiteRT, int8": litert_int8,
}


def measured(models: dict[str, keras.Model], batch: int, rounds: int) -> list[list[str]]:
    """A line of the table for each runtime and network."""
    width = models["dense"].input_shape[-1]
    x = np.random.default_rng(0).standard_normal((batch, width)).astype("float32")
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        for (runtime, make), (name, model) in itertools.product(RUNTIMES.items(), models.items()):
            place = Path(folder, runtime, name)
            place.mkdir(parents=True)
            call = cases[runtime, name] = make(model, x, place)
            want = keras.ops.convert_to_numpy(model(x))
            apart = np.sqrt(np.mean((call() - want) ** 2) / np.mean(want**2))
            if not apart < (0.05 if "int8" in runtime else 1e-5):
                raise ValueError(f"{runtime} is {apart:.1e} apart from Keras, on {name}")
        times = interleaved(cases, rounds, warm_up=20)
    rows = []
    for (runtime, name), time in times.items():
        ratios = [times[other, "dense"] / time for other in (runtime, "ONNX Runtime")]
        figures = [f"{1e3 * time:.3f}", *(f"{ratio:.2f}" for ratio in ratios)]
        rows.append([runtime, str(batch), name, *figures])
    return rows


def runtimes() -> None:
    """Latency of live blocks in ONNX Runtime and OpenVINO, as `model.export` of Keras writes them.

        KERAS_BACKEND=tensorflow python benchmarks/shipped.py runtimes

    It needs the extra `formats`. An MLP 4 x 1024, dense and with one in eight blocks of 32 or 64
    (`storage="blocks"`: a gather and a batched product for each layer), in float32 (OpenVINO
    would otherwise take bfloat16 where the processor has AMX), and with weights in int8 by ONNX
    Runtime's quantization and by `export_litert`. Each file is compared with Keras; then all of
    one batch are timed in turn, on one thread: pools of threads would wait for each other.
    """
    parser = described(runtimes)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--rounds", type=int, default=1000)
    options = parsed(parser, {"width": 256, "blocks": [32], "rounds": 20})
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"Nothing measured: {', '.join(missing)} missing; install the extra `formats`.")
        return
    models, rows = networks(options.width, options.blocks), []
    for batch in (1, 8):
        rows += measured(models, batch, options.rounds)
    text = "# ONNX Runtime and OpenVINO: live blocks against dense networks\n\n"
    text += f"{machine()}, Keras {keras.__version__}. MLP of four layers of {options.width}, one "
    text += "in eight blocks, as `model.export` of Keras writes it: a gather and a batched product "
    text += "for each layer; for LiteRT as `export_litert` does. int8: weights; activations are "
    text += (
        "quantized in the call. Medians of calls in turn, on one thread; every file agreed with "
    )
    text += "Keras before. `x dense`: times as fast as the dense file of the runtime; `x float32`: "
    text += "as the dense "
    text += "one of ONNX Runtime.\n\n"
    header = ["runtime", "batch", "network", "ms", "x dense", "x float32"]
    write(
        "runtimes", text + markdown(header, sorted(rows, key=lambda row: [*RUNTIMES].index(row[0])))
    )


if __name__ == "__main__":
    chosen(files, ethos_u, runtimes)
