"""A sparse CNN quantized after training and in training: accuracy of models and files; step time.

    python benchmarks/quantized.py [--seeds 3] [--epochs 4] [--more 2]
    python benchmarks/quantized.py --summary

For each seed the CNN of `one_shot.py` is trained sparse from the first step on Fashion-MNIST; then
every method goes on from its weights for `--more` epochs, the float network as well. Each run is a
line of `results/quantized.jsonl`; `results/quantized.md` has the means, and the time of a step
beside that of the masked network.
"""

import argparse
import functools
import os
import pathlib
import statistics
import tempfile

from one_shot import network, shown
from timing import RESULTS, append, finished, interleaved, markdown, parsed, write

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
LINES = RESULTS / "quantized.jsonl"
STEP_LINES = RESULTS / "quantized_step.jsonl"
# What is rounded, and whether in training.
METHODS = ("float", "int8 after", "int8", "int4 after", "int4", "ternary after", "ternary")
METHODS += ("palette 16 after", "palette 16")


def weights_of(method: str):
    """The argument `weights` of `quantize_aware`."""
    from keras_sparse_ortho.parametrizations import Palette

    kind = method.removesuffix(" after")
    return Palette(16, "int8") if kind.startswith("palette") else kind


def compiled(model, rate=1e-3):
    """The model, ready for `fit`."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


def accuracy(model, data) -> float:
    """Percent of the test images; the model stays compiled as it is."""
    answers = model.predict(data.x_test, batch_size=500, verbose=0)
    return 100 * float((answers.argmax(1) == data.y_test).mean())


def accuracy_of_file(model, data) -> tuple[float, float, int]:
    """Percent of the test images in an int8 file, its difference from Keras and gzip bytes."""
    from keras_sparse_ortho.export import export_litert, load_litert

    rows = 500
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.tflite"
        settings = {"quantization": "int8", "batch_size": rows}
        report = export_litert(
            model, path, representative_data=data.x_train[:rows], tolerance=2.0, **settings
        )
        run = load_litert(path)
        parts = range(0, len(data.x_test) // rows * rows, rows)
        found = [run.predict(data.x_test[k : k + rows]).argmax(1) for k in parts]
    right = sum((f == data.y_test[k : k + rows]).sum() for f, k in zip(found, parts, strict=True))
    return 100 * float(right) / (len(found) * rows), report.error, report.gzip_bytes


def measure(seed: int, given: argparse.Namespace) -> None:
    """Appends the lines of a seed that are missing."""
    import keras
    from example_data import load

    import keras_sparse_ortho as kso

    setting = {"seed": seed, "epochs": given.epochs, "more": given.more, "images": given.images}
    done = {run["method"] for run in finished(LINES) if setting.items() <= run.items()}
    missing = [method for method in METHODS if method not in done]
    if not missing:
        return
    data = load("fashion_mnist")
    x, y = data.x_train[: given.images], data.y_train[: given.images]
    keras.utils.set_random_seed(seed)
    start = kso.sparsify(network(), given.density, seed=seed)
    compiled(start, 2e-3).fit(x, y, batch_size=128, epochs=given.epochs, verbose=0)
    tuned = start
    if given.more:
        tuned = keras.models.clone_model(start)
        tuned.set_weights(start.get_weights())
        compiled(tuned, 5e-4).fit(x, y, batch_size=128, epochs=given.more, verbose=0)
    for method in missing:
        after = method.endswith(" after")
        base = tuned if after or method == "float" else start
        model = base  # in float, and for int8 after training, which is calibrated
        if method not in ("float", "int8 after"):
            # After training, weights alone.
            model = kso.quantize_aware(
                base, weights_of(method), None if after else "int8", momentum=0.95
            )
        if not after and method != "float":
            compiled(model, 5e-4).fit(x, y, batch_size=128, epochs=given.more, verbose=0)
        run = {"method": method, "accuracy": accuracy(model, data)}
        if method not in ("float", "int4 after", "ternary after", "palette 16 after"):
            run["file"], run["error"], run["gzip"] = accuracy_of_file(model, data)
        append(LINES, setting | run)
        print(setting | run, flush=True)


def five_steps(model, x, y) -> None:
    """Five steps, each waited for."""
    for _ in range(5):
        float(model.train_on_batch(x, y)[0])


def measure_steps(given: argparse.Namespace) -> None:
    """Appends the time of a compiled step of each kind, beside the masked one."""
    import keras
    import numpy as np

    import keras_sparse_ortho as kso

    rng = np.random.default_rng(0)
    wide = [keras.layers.Dense(1024, activation="relu") for _ in range(3)]
    networks = {
        "CNN": (network(), (28, 28, 1)),
        "MLP of 1024": (
            keras.Sequential([keras.Input((1024,)), *wide, keras.layers.Dense(10)]),
            (1024,),
        ),
    }
    for name, (dense, shape) in networks.items():
        x = rng.normal(size=(128, *shape)).astype("float32")
        y = rng.integers(0, 10, 128)
        masked = kso.sparsify(dense, given.density, seed=0)
        models = {"masked": masked}
        for method in ("int8", "palette 16"):
            models[method] = kso.quantize_aware(masked, weights_of(method))
        models["int8, weights alone"] = kso.quantize_aware(masked, "int8", None)
        for model in models.values():
            compiled(model)
        cases = {kind: functools.partial(five_steps, model, x, y) for kind, model in models.items()}
        times = interleaved(cases, given.rounds, warm_up=2)
        for kind, seconds in times.items():
            append(STEP_LINES, {"network": name, "kind": kind, "ms": 1e3 * seconds / 5})


def summarize(given: argparse.Namespace) -> None:
    """Writes the tables of all lines."""
    runs = [run for run in finished(LINES) if run["images"] == given.images]
    seeds = sorted({run["seed"] for run in runs})
    floats = {run["seed"]: run["accuracy"] for run in runs if run["method"] == "float"}
    rows = []
    for method in METHODS:
        own = [run for run in runs if run["method"] == method]
        if not own:
            continue
        # What ships: the file where there is one.
        ships = [run.get("file", run["accuracy"]) for run in own]
        lost = [floats[run["seed"]] - one for run, one in zip(own, ships, strict=True)]
        files = [run for run in own if "file" in run]
        row = [method, shown([run["accuracy"] for run in own])]
        row.append(shown([run["file"] for run in files]) if files else "")
        row.append(f"{statistics.mean(lost):.2f}")
        row.append(f"{100 * max(run['error'] for run in files):.2f}" if files else "")
        row.append(f"{statistics.mean(run['gzip'] for run in files) / 1e3:.1f}" if files else "")
        rows.append(row)
    header = ["weights", "Keras [%]", "int8 file [%]", "points lost to float"]
    header += ["largest rms of file and Keras [%]", "gzip [kB]"]
    text = "# A sparse CNN, quantized\n\n"
    text += (
        f"Fashion-MNIST, {given.images} images, a CNN with batch normalization, density "
        f"{given.density:g} from the first step, {given.epochs} epochs, then {given.more} more for "
        "every method, float as well. `after`: the float network after those, rounded without "
        "training (int8: weights and activations in the file, calibrated; the others: weights "
        "alone, in Keras). Test accuracy, mean and standard deviation over the seeds; palettes are "
        "of 16 values that are int8.\n\n"
    )
    text += markdown(header, rows)
    steps = finished(STEP_LINES)
    if steps:
        text += "\nA compiled step, batch 128, relative to the masked network:\n\n"
        rows = []
        for name in dict.fromkeys(line["network"] for line in steps):
            last = {line["kind"]: line["ms"] for line in steps if line["network"] == name}
            rows += [
                [name, kind, f"{ms:.1f}", f"{ms / last['masked']:.2f}"] for kind, ms in last.items()
            ]
        text += markdown(["network", "weights", "step [ms]", "relative"], rows)
    write("quantized", text, seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--more", type=int, default=2)
    parser.add_argument("--images", type=int, default=20000)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--summary", action="store_true", help="only write the tables")
    quick = {"seeds": 1, "epochs": 1, "more": 1, "images": 1000, "rounds": 2}
    given = parsed(parser, quick=quick)
    if not given.summary:
        for seed in range(given.seeds):
            measure(seed, given)
        measure_steps(given)
    summarize(given)


if __name__ == "__main__":
    main()
