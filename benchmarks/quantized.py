"""Int4, int8, ternary and palettes: accuracy, files, and time of a step.

    python benchmarks/quantized.py NAME [options]

The measurements:

- `accuracies`: sparse networks quantized after training and in training: accuracy of models and
  of files.
- `storages`: bytes and times of files with kernels in 8, 4 and 2 bits, of dense networks as well.
- `step_times`: the time of a step of quantization-aware training, beside that of the masked
  network.
"""

import argparse
import functools
import os
import pathlib
import statistics
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from networks import mobilenet
from one_shot import network, shown
from record import (
    QUICK,
    RESULTS,
    announced,
    append,
    chosen,
    described,
    finished,
    markdown,
    parsed,
    wall_and_cpu,
    write,
)

import keras_sparse_ortho as kso

# --- accuracies -----------------------------------------------------------------------------------

HERE = pathlib.Path(__file__).resolve().parent
LINES = RESULTS / "quantized.jsonl"
ACCELERATORS = ("ethos-u55-128", "ethos-u85-256")
L = keras.layers
# Epochs and learning rates: sparse from the first step, and those after it.
NETS = {
    "cnn": {"epochs": 4, "rate": 4e-3, "more": 2, "more_rate": 5e-4},
    "mobilenet": {"epochs": 3, "rate": 3.2e-2, "more": 1, "more_rate": 2e-3},
}
# The weights that are rounded: after training, or in training.
METHODS = ("float", "int8 after", "int8", "int4 after", "int4", "ternary after", "ternary")
# Palettes and learnt scales lost, and are gone since commit 936aadd; their lines stay.
SHOWN = (*METHODS[:5], "palette 16 after", "palette 16", *METHODS[5:])
SHOWN += ("int4, learnt scales", "ternary, learnt scales")
BATCH = 128


def made(net: str):
    """The dense network, and what `sparsify` is to make sparse."""
    if net == "cnn":
        return network(), None
    # As RigL has it: depthwise kernels are few, and stay dense.
    return mobilenet((28, 28, 1), 10, {"alpha": 0.25}), [".*_pointwise/kernel"]


def fitted(model, data, images: int, epochs: float, rate: float) -> None:
    """Trains a model on the first images."""
    import keras

    steps = max(1, int(epochs * (images // BATCH)))
    decay = keras.optimizers.schedules.CosineDecay(rate, steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # XLA's depthwise convolutions are slow on a CPU.
    model.compile(keras.optimizers.Adam(decay), loss, jit_compile=False)
    x, y = data.x_train[:images], data.y_train[:images]
    model.fit(x, y, batch_size=BATCH, epochs=epochs, verbose=0)


def calibrated(model, data) -> None:
    """Sets the ranges of activations, and nothing else, on 1000 images."""
    import keras

    norms = [x for x in model._flatten_layers() if isinstance(x, keras.layers.BatchNormalization)]
    for layer in norms:
        layer.trainable = False
    for start in range(0, 1000, 100):
        model(data.x_train[start : start + 100], training=True)
    for layer in norms:
        layer.trainable = True


def accuracy(model, data) -> float:
    """Percent of the test images."""
    answers = model.predict(data.x_test, batch_size=500, verbose=0)
    return 100 * float((answers.argmax(1) == data.y_test).mean())


def accuracy_of_file(model, data) -> dict:
    """Percent of the test images in an int8 file, its difference from Keras and gzip bytes."""
    from keras_sparse_ortho.export import export_litert, load_litert

    rows = 500
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.tflite"
        settings = {"mode": "int8", "batch_size": rows}
        report = export_litert(
            model, path, representative_data=data.x_train[:rows], tolerance=2.0, **settings
        )
        run = load_litert(path)
        parts = range(0, len(data.x_test) // rows * rows, rows)
        found = [run.predict(data.x_test[k : k + rows]).argmax(1) for k in parts]
    right = sum((f == data.y_test[k : k + rows]).sum() for f, k in zip(found, parts, strict=True))
    return {
        "file": 100 * float(right) / (len(found) * rows),
        "error": report.error,
        "gzip": report.gzip_bytes,
    }


def trained(net: str, method: str, seed: int, data, given: argparse.Namespace):
    """The model of a method; `start` is what all of them go on from."""
    import keras

    import keras_sparse_ortho as kso

    how, after = NETS[net], method.endswith(" after")
    folder = HERE / "out" / ("quick/quantized" if QUICK else "quantized")
    file = folder / f"{net}-{seed}-{given.images}-{given.density:g}-{method}.keras"
    if file.exists():
        return keras.models.load_model(file, compile=False)
    keras.utils.set_random_seed(seed)
    if method == "start":
        dense, include = made(net)
        model = kso.sparsify(dense, given.density, include=include, seed=seed)
        fitted(model, data, given.images, how["epochs"], how["rate"])
    else:
        model = trained(net, "float" if after else "start", seed, data, given)
        if method != "float":
            model = kso.quantize_aware(model, method.removesuffix(" after"), momentum=0.95)
        if after:
            calibrated(model, data)
        else:
            fitted(model, data, given.images, how["more"], how["more_rate"])
    folder.mkdir(parents=True, exist_ok=True)
    model.save(file)
    return model


def measure(net: str, seed: int, given: argparse.Namespace) -> None:
    """Appends the lines of a seed that are missing."""
    from training import load

    from keras_sparse_ortho.quantization import round_biases

    setting = {"net": net, "seed": seed, "images": given.images, "density": given.density}
    setting |= NETS[net]
    done = {run["method"] for run in finished(LINES) if setting.items() <= run.items()}
    missing = [method for method in METHODS if method not in done]
    data = load("fashion_mnist") if missing else None
    for method in announced(f"{net}, seed {seed}", missing):
        # The file of `int8 after` is the converter's own, calibrated.
        model = trained(net, "float" if method == "int8 after" else method, seed, data, given)
        if method not in ("float", "int8 after"):
            round_biases(model)
        run = {"method": method, "accuracy": accuracy(model, data)}
        if method != "float":
            run |= accuracy_of_file(model, data)
        append(LINES, setting | run)
        print(setting | run, flush=True)


def estimate(net: str, seed: int, given: argparse.Namespace) -> None:
    """Appends what Vela says of the files of a seed; missing ones alone."""
    from shipped import vela
    from training import load

    from keras_sparse_ortho.export import export_litert
    from keras_sparse_ortho.quantization import round_biases

    setting = {"net": net, "seed": seed, "images": given.images, "density": given.density}
    data = load("fashion_mnist")
    for method in ("int8 after", "int8", "int4", "ternary"):
        here = setting | {"method": method}
        if any("vela" in run and here.items() <= run.items() for run in finished(LINES)):
            continue
        model = trained(net, "float" if method == "int8 after" else method, seed, data, given)
        if method != "int8 after":
            round_biases(model)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "model.tflite"
            rows = data.x_train[:500]
            export_litert(model, path, mode="int8", representative_data=rows, tolerance=2.0)
            found = {name: vela(path, name) for name in ACCELERATORS}
        kept = ("ms", "weight_bytes", "encoded_bytes", "vela")
        found = {name: {key: one[key] for key in kept} for name, one in found.items()}
        append(LINES, here | {"vela": found})
        print(here, found, flush=True)


def vela_table(given: argparse.Namespace) -> str:
    """A table of the estimates, if there are some."""
    known = {"images": given.images, "density": given.density}
    runs = [run for run in finished(LINES) if "vela" in run and known.items() <= run.items()]
    rows = []
    for name in ACCELERATORS if runs else ():
        for run in runs:
            one = run["vela"][name]
            sizes = [f"{one[key] / 1024:.1f}" for key in ("weight_bytes", "encoded_bytes")]
            rows.append([name, run["net"], run["method"], f"{one['ms']:.3f}", *sizes])
    if not rows:
        return ""
    header = ["accelerator", "network", "weights", "ms", "KiB", "encoded KiB"]
    return (
        f"\n## On Ethos-U, as Vela {runs[0]['vela'][ACCELERATORS[0]]['vela']} estimates\n\n"
        "The int8 files of seed 0, batch 1; nothing was run on a device. KiB of weights before and "
        f"after Vela's encoding.\n\n{markdown(header, rows)}"
    )


def rows_of(runs: list[dict]) -> list[list[str]]:
    """The rows of a table: means over the seeds."""
    floats = {run["seed"]: run["accuracy"] for run in runs if run["method"] == "float"}
    rows = []
    for method in SHOWN:
        own = [run for run in runs if run["method"] == method]
        if not own:
            continue
        # The file where there is one, as it is what ships.
        ships = [run.get("file", run["accuracy"]) for run in own]
        lost = [floats[run["seed"]] - one for run, one in zip(own, ships, strict=True)]
        files = [run for run in own if "file" in run]
        row = [method, shown([run["accuracy"] for run in own])]
        row.append(shown([run["file"] for run in files]) if files else "")
        row.append(f"{statistics.mean(lost):.2f}" if method != "float" else "")
        row.append(f"{100 * max(run['error'] for run in files):.2f}" if files else "")
        row.append(f"{statistics.mean(run['gzip'] for run in files) / 1e3:.1f}" if files else "")
        rows.append(row)
    return rows


def summarize(given: argparse.Namespace) -> None:
    """Writes the tables of all lines."""
    text = "# Sparse networks, quantized\n\n"
    text += (
        f"Fashion-MNIST, {given.images:,} images, density {given.density:g} from the first step "
        "(MobileNet: of its pointwise kernels). Every method, float as well, trains from the same "
        "weights for some epochs more. `after`: the float network after these, rounded without "
        "training. Its int8 file is the converter's, calibrated on 500 images; in the others "
        "weights are rounded as `quantize_aware` does it, with ranges of activations from 1000 "
        "images. Test accuracy, mean and standard deviation over the seeds; palettes are of 16 "
        "values that are int8. Points: the loss of the file against the float network.\n"
    )
    header = ["weights", "Keras [%]", "int8 file [%]", "points lost"]
    header += ["largest rms of file and Keras [%]", "gzip [kB]"]
    seeds: set[int] = set()
    for net, how in NETS.items():
        setting = {"net": net, "images": given.images, "density": given.density} | how
        runs = [run for run in finished(LINES) if setting.items() <= run.items()]
        if runs:
            own = sorted({run["seed"] for run in runs})
            seeds |= set(own)
            text += (
                f"\n## {net}\n\n{how['epochs']} epochs at {how['rate']:g}, {how['more']} more at "
                f"{how['more_rate']:g}; seeds {own}.\n\n{markdown(header, rows_of(runs))}"
            )
    write("quantized", text + storages_table() + vela_table(given), seeds)


def accuracies() -> None:
    """Sparse networks quantized after training and in training: accuracy of models and of files.

        python benchmarks/quantized.py accuracies [--nets cnn mobilenet] [--seeds 3]
        python benchmarks/quantized.py accuracies --summary

    For each seed the CNN of `one_shot.py` and the MobileNet of `methods.py contemporary` are
    trained sparse from the first step on Fashion-MNIST; then every method goes on from these
    weights for some epochs more, the float network as well, all at the same rates (Adam, cosine
    decay). Each run is a line of `results/quantized.jsonl`; trained models stay in
    `out/quantized`, and neither is made twice. `results/quantized.md` has the means.
    """
    parser = described(accuracies)
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=NETS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=10000)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--summary", action="store_true", help="only write the tables")
    given = parsed(parser, quick={"seeds": 1, "images": 512, "nets": ["cnn"]})
    if not given.summary:
        for net in given.nets:
            for seed in range(given.seeds):
                measure(net, seed, given)
            estimate(net, 0, given)
    summarize(given)


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


def wide_mlp() -> keras.Model:
    hidden = [L.Dense(1024, activation="relu", name=f"hidden_{k}") for k in range(2)]
    return keras.Sequential(
        [keras.Input((28, 28, 1)), L.Flatten(), *hidden, L.Dense(10, name="head")]
    )


def encoder() -> keras.Model:
    """Two blocks over the rows of an image."""
    inputs = keras.Input((28, 28, 1))
    x = L.Dense(128)(L.Reshape((28, 28))(inputs))
    for _ in range(2):
        y = L.LayerNormalization()(x)
        x = L.Add()([x, L.MultiHeadAttention(4, 32)(y, y)])
        y = L.Dense(256, activation="relu")(L.LayerNormalization()(x))
        x = L.Add()([x, L.Dense(128)(y)])
    return keras.Model(inputs, L.Dense(10, name="head")(L.GlobalAveragePooling1D()(x)))


# Networks, densities from the first step (1 is the dense network, the rival), other options.
STORED = {
    "mlp": (wide_mlp, (1, 0.1), {}),
    "mlp, blocks": (wide_mlp, (0.125,), {"structure": "16x16", "exclude": "head"}),
    "cnn": (network, (1, 0.2), {}),
    "encoder": (encoder, (1, 0.2), {}),
}


def measure_storages(net: str, density: float, images: int, seconds: float) -> None:
    """Appends the lines of all files of a network at a density."""
    from training import load

    from keras_sparse_ortho.errors import ExportConversionError
    from keras_sparse_ortho.export import export_litert, latencies, load_litert
    from keras_sparse_ortho.quantization import round_biases

    data = load("fashion_mnist")
    keras.utils.set_random_seed(0)
    make, _, how = STORED[net]
    base = make() if density == 1 else kso.sparsify(make(), density, seed=0, **how)
    fitted(base, data, images, WIDE["epochs"], WIDE["rate"])
    for training, (arguments, routes) in TRAININGS.items():
        if "structure" in how:
            routes = [f"{route}+blocks" for route in routes if "int8" in route]
        if net != "mlp" and "ternary" in training:
            continue
        model = base if arguments is None else kso.quantize_aware(base, *arguments, momentum=0.95)
        if arguments is not None:
            fitted(model, data, images, WIDE["more"], WIDE["more_rate"])
        if arguments == ("int4", "int8"):
            round_biases(model)
        with tempfile.TemporaryDirectory() as folder:
            reports = []
            for mode in routes:
                rows = data.x_train[:500] if mode.startswith("int") else None
                options = {"representative_data": rows, "sample": data.x_test[:64]}
                path = pathlib.Path(folder) / mode
                try:
                    reports.append(export_litert(model, path, mode=mode, tolerance=2.0, **options))
                except ExportConversionError as error:  # no Dense kernel of 4 bits
                    print(net, mode, error, flush=True)
            times = latencies([report.path for report in reports], 1, seconds)
            for report, ms in zip(reports, times, strict=True):
                answers = load_litert(report.path).predict(data.x_test[:2000]).argmax(1)
                run = {"network": net, "storages": training, "density": density} | WIDE
                run["images"] = images
                run |= {"route": report.route, "bytes": report.bytes, "gzip": report.gzip_bytes}
                run |= {"ms": ms, "error": report.error, "keras": accuracy(model, data)}
                run |= {"file": 100 * float((answers == data.y_test[:2000]).mean())}
                append(LINES, run)
                print(run, flush=True)


def storages_table() -> str:
    """A table of the files, if there are some; the last line of each counts."""
    runs = {
        (r.get("network", "mlp"), r["density"], r["storages"], r["route"]): r
        for r in finished(LINES)
        if "storages" in r
    }
    if not runs:
        return ""
    rows = []
    order = [*STORED]
    for key, run in sorted(runs.items(), key=lambda item: (order.index(item[0][0]), -item[0][1])):
        net, density, training, route = key
        row = [net, "dense" if density == 1 else f"{density:g}", training, route]
        row += [f"{run[key] / 1e3:.0f}" for key in ("bytes", "gzip")]
        row += [f"{run['ms']:.3f}", f"{100 * run['error']:.2f}"]
        rows.append([*row, *(f"{run[key]:.1f}" for key in ("keras", "file"))])
    header = ["network", "density", "training", "file", "kB", "gzip [kB]", "ms", "rms [%]"]
    return (
        "\n## Kernels in 8, 4 and 2 bits\n\nAn MLP 784-1024-1024-10 (blocks: of 16), the CNN of "
        "`one_shot.py`, whose Dense kernels alone can have 4 bits, and an encoder of two blocks; "
        f"{WIDE['epochs']} epochs and {WIDE['more']} more with the rounding; the dense network is "
        "the rival of each. `dynamic_int4` has ternary kernels in 2 bits. Batch 1, one thread, "
        "files of a row's training interleaved; test accuracy of Keras (10,000 images) and of the "
        f"file (the first 2,000).\n\n{markdown([*header, 'Keras [%]', 'file [%]'], rows)}"
    )


def storages() -> None:
    """Files with kernels in 8, 4 and 2 bits: sparse ones beside those of dense networks.

        python benchmarks/quantized.py storages [--networks mlp]

    Trained with and without the rounding on Fashion-MNIST. Each file is a line of
    `results/quantized.jsonl`, and `accuracies --summary` writes the table.
    """
    parser = described(storages)
    parser.add_argument("--networks", nargs="+", default=[*STORED], choices=STORED)
    parser.add_argument("--images", type=int, default=10000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing in one training")
    given = parsed(parser, quick={"images": 256, "networks": ["mlp, blocks"], "seconds": 1.0})
    for net in given.networks:
        for density in STORED[net][1]:
            measure_storages(net, density, given.images, given.seconds)


# --- step_times -----------------------------------------------------------------------------------


STEP_TIMES_LINES = RESULTS / "quantized_step.jsonl"
STEPS = 3  # of one measurement


def mlp() -> keras.Model:
    """Three layers of 1024 units, and a head."""
    hidden = [L.Dense(1024, activation="relu") for _ in range(3)]
    return keras.Sequential([keras.Input((1024,)), *hidden, L.Dense(10)])


STEP_TIMES_NETS = {"CNN": (network, (28, 28, 1)), "MLP of 1024": (mlp, (1024,))}


def some_steps(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
    """Steps, each waited for."""
    for _ in range(STEPS):
        float(model.train_on_batch(x, y))


def step_times_measure(name: str, rounds: int) -> None:
    """Appends the times of the steps of one network."""
    make, shape = STEP_TIMES_NETS[name]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(128, *shape)).astype("float32"), rng.integers(0, 10, 128)
    masked = kso.sparsify(make(), 0.1, seed=0)
    models = {"masked": masked, "int8, weights alone": kso.quantize_aware(masked, "int8", None)}
    for method in ("int8", "int4"):
        models[method] = kso.quantize_aware(masked, method)
    for model in models.values():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=True)
    cases = {kind: functools.partial(some_steps, model, x, y) for kind, model in models.items()}
    times = wall_and_cpu(cases, rounds, warm_up=2)
    for kind, (wall, cpu) in times.items():
        row = {"backend": keras.backend.backend(), "network": name, "kind": kind}
        row |= {"ms": 1e3 * wall / STEPS, "cpu_ms": 1e3 * cpu / STEPS}
        row |= {"relative": wall / times["masked"][0], "cpu": cpu / times["masked"][1]}
        append(STEP_TIMES_LINES, row)
        print(row, flush=True)


def step_times() -> None:
    """The time of a step of quantization-aware training, beside that of the masked network.

        KERAS_BACKEND=jax python benchmarks/quantized.py step_times

    Steps of the CNN of `one_shot.py` and of an MLP of three layers of 1024 units, density 0.1,
    batch 128, under XLA and interleaved, are lines of `results/quantized_step.jsonl`;
    `results/quantized_step.md` has the last of each backend.
    """
    parser = described(step_times)
    parser.add_argument("--nets", nargs="+", default=list(STEP_TIMES_NETS), choices=STEP_TIMES_NETS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--summary", action="store_true", help="only write the table")
    given = parsed(parser, quick={"rounds": 1})
    if not given.summary:
        for name in given.nets:
            step_times_measure(name, given.rounds)
    last = {
        (run["backend"], run["network"], run["kind"]): run for run in finished(STEP_TIMES_LINES)
    }
    rows = [
        [*key, f"{run['ms']:.1f}", f"{run['relative']:.2f}", f"{run['cpu']:.2f}"]
        for key, run in sorted(last.items())
    ]
    header = ["backend", "network", "weights", "step [ms]", "to masked", "CPU time to masked"]
    write(
        "quantized_step",
        "# A step of quantization-aware training\n\nUnder XLA, batch 128, density 0.1; medians of "
        "interleaved calls. Activations are int8 but in the second kind.\n\n"
        + markdown(header, rows),
    )


if __name__ == "__main__":
    chosen(accuracies, storages, step_times)
