"""What Vela estimates for trained networks on Ethos-U: dense, single zeros, quantized, 2:4.

    python benchmarks/ethos_u.py
    python benchmarks/ethos_u.py --seeds 1 --epochs 1 --samples 2048

An MLP 784-512-512-256-10 and a CNN of four 3x3 convolutions (32 to 128 channels, 14 x 14 down to
4 x 4) are trained on Fashion-MNIST, all in the same way, Adam with cosine decay: dense; with
single zeros at density 0.1 (`sparsify`, exactly orthogonal, ERK); the same, trained on with int8
weights, a third of the epochs at a quarter of the rate; the CNN also with
`NByM(2, 4)`. The first convolution and the head are dense. Each is exported as static int8, its
file's accuracy taken on the test set, and compiled by Arm's compiler Vela. Finished runs are lines
of `results/ethos_u.jsonl` and not repeated; the tables are `results/ethos_u.md`. Needs the extra
`ethos-u`.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from example_data import Dataset, load
from record import RESULTS, append, finished, machine, markdown, parsed, write

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import load_litert, vela_report

L = keras.layers
ACCELERATORS = ("ethos-u55-128", "ethos-u55-256", "ethos-u65-256", "ethos-u85-256")
# Of the sparse networks, what their weights are in the last epochs.
QUANTIZED = {"0.1, trained as int8": "int8"}
SPARSE = ("density 0.1", *QUANTIZED)
METHODS = {"mlp": ("dense", *SPARSE), "cnn": ("dense", *SPARSE, "2:4")}
# Palettes lost to int4, and are gone since commit 936aadd; their lines stay.
SHOWN = {net: (*rows[:3], "0.1, palette of 16", *rows[3:]) for net, rows in METHODS.items()}
RATE = 2e-3
EPOCHS, SAMPLES = {"mlp": 5, "cnn": 6}, {"mlp": 60_000, "cnn": 60_000}
ROWS = 2000  # of the test set, on which the file is run


def network(net: str, method: str, seed: int) -> keras.Model:
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


def fit(model: keras.Model, data: Dataset, epochs: int, samples: int, rate: float) -> None:
    steps = epochs * -(-samples // 128)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(rate, steps)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=keras.backend.backend() == "jax",  # TensorFlow trains CNNs faster without
    )
    x, y = data.x_train[:samples], data.y_train[:samples]
    model.fit(x, y, batch_size=128, epochs=epochs, verbose=0)


def run(net: str, method: str, data: Dataset, epochs: int, samples: int, seed: int) -> dict:
    """Trains one network, and compiles its file for each accelerator."""
    model = network(net, method, seed)
    fit(model, data, epochs, samples, RATE)
    if method in QUANTIZED:
        model = kso.quantize_aware(model, QUANTIZED[method])
        fit(model, data, -(-epochs // 3), samples, RATE / 4)
        kso.quantization.round_biases(model)
    calibration = None if method in QUANTIZED else data.x_train[:200]
    _, accuracy = model.evaluate(data.x_test, data.y_test, batch_size=1000, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{net}.tflite")
        report = kso.export_litert(
            model, path, quantization="int8", representative_data=calibration
        )
        opened = load_litert(path)
        guesses = opened.predict(data.x_test[:ROWS]).argmax(axis=1)
        found = {name: vela_report(path, name) for name in ACCELERATORS}
    return {
        "accuracy": float(accuracy),
        "file_accuracy": float(np.mean(guesses == data.y_test[:ROWS])),
        "live": report.density,
        "weights": report.total_weights,
        "vela": {name: {**one.to_dict(), "path": path.name} for name, one in found.items()},
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, help=f"default {EPOCHS}")
    parser.add_argument("--samples", type=int, help=f"pictures to train on, default {SAMPLES}")
    parser.add_argument(
        "--summary", action="store_true", help="only the tables, from the lines there are"
    )
    options = parsed(parser, {"seeds": 1, "epochs": 1, "samples": 1024})
    lines = RESULTS / "ethos_u.jsonl"
    RESULTS.mkdir(parents=True, exist_ok=True)
    data = None
    runs = []
    for seed in range(options.seeds):
        for net, methods in METHODS.items():
            for method in methods:
                settings = {
                    "net": net,
                    "method": method,
                    "seed": seed,
                    "epochs": options.epochs or EPOCHS[net],
                    "samples": options.samples or SAMPLES[net],
                }
                done = (one for one in finished(lines) if settings.items() <= one.items())
                row = next(done, None)
                if row is None:
                    if options.summary:
                        continue
                    data = data or load("fashion_mnist")
                    row = settings | run(
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


if __name__ == "__main__":
    main()
