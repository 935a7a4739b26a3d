"""Accuracy of trained networks on blocks beside dense ones: in Keras, and as LiteRT files.

    python benchmarks/shipped.py
    python benchmarks/shipped.py --data digits --seeds 1
    python benchmarks/shipped.py --summary               # only the table, from the lines there are

An MLP of three hidden layers and a CNN of four 3x3 convolutions are trained on digits and on
Fashion-MNIST, dense and by `sparsify(model, density, storage="blocks")`, in the same way (Adam,
cosine decay). The head, and the first convolution, are dense. Each is exported in float32 and in
static int8, those on blocks as `+blocks`, and Keras and both files answer the whole test set.
Finished runs are lines of `results/shipped.jsonl` and not repeated; the table is
`results/shipped.md`.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from example_data import Dataset, load
from record import RESULTS, append, finished, machine, markdown, parsed, write

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import ExportReport, export_routes, load_litert

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


def run(data: Dataset, net: str, method: str, epochs: int, samples: int | None, seed: int) -> dict:
    """Trains one network, and takes its accuracy from Keras and from its files."""
    model = network(data, net, method, seed)
    fit(model, data, epochs, samples)
    _, accuracy = model.evaluate(data.x_test, data.y_test, batch_size=1000, verbose=0)
    routes = ["float32", "int8"] if method == "dense" else ["float32+blocks", "int8+blocks"]
    found = {"accuracy": float(accuracy)}
    with tempfile.TemporaryDirectory() as folder:
        made = export_routes(model, folder, routes, representative_data=data.x_train[:500])
        for route, report in made.items():
            if not isinstance(report, ExportReport):
                raise RuntimeError(f"No file {route} of {net}: {report.reason}")
            opened = load_litert(Path(folder, f"{route}.tflite"))
            guesses = opened.predict(data.x_test).argmax(axis=1)
            kind = route.removesuffix("+blocks")
            found[f"{kind}_accuracy"] = float(np.mean(guesses == data.y_test))
            found[f"{kind}_bytes"] = report.bytes
    return found | {"live": round(report.density * report.total_weights)}


def _percent(values: Iterable[float]) -> str:
    found = [100 * value for value in values]
    spread = f" ± {statistics.stdev(found):.2f}" if len(found) > 1 else ""
    return f"{statistics.mean(found):.2f}{spread}"


def table(runs: list[dict]) -> str:
    """A line for each dataset, network and method."""
    lines = []
    for data, net in dict.fromkeys((one["data"], one["net"]) for one in runs):
        for method in METHODS:
            these = [r for r in runs if (r["data"], r["net"], r["method"]) == (data, net, method)]
            if these:
                keys = ("accuracy", "float32_accuracy", "int8_accuracy")
                lines.append(
                    [
                        *(data, net, method, f"{these[0]['live']:,}"),
                        *(_percent(r[key] for r in these) for key in keys),
                        *(f"{these[0][key] / 1e3:.0f}" for key in ("float32_bytes", "int8_bytes")),
                    ]
                )
    header = ["data", "network", "method", "live", "Keras [%]", "float32 file [%]"]
    return markdown([*header, "int8 file [%]", "float32 kB", "int8 kB"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        "nonzero weights of the file of seed 0, whose bytes these are.\n\n"
    )
    write("shipped", text + table(runs), seeds=[one["seed"] for one in runs])


if __name__ == "__main__":
    main()
