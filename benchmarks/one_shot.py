"""Trained CNNs pruned at once, without training: accuracy by score, refit and statistics.

    python benchmarks/one_shot.py [--seeds 3] [--epochs 4]
    python benchmarks/one_shot.py --networks resnet8 resnet20 --densities 0.2
    python benchmarks/one_shot.py --summary

For each seed a network with batch normalization is trained on Fashion-MNIST (kept in
`out/one_shot`), then all kernels but the first and the last are pruned to each density, with 256
training images for calibration. Each run is a line of `results/one_shot.jsonl`;
`results/one_shot.md` has the means.
"""

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
import time

from record import QUICK, RESULTS, append, finished, markdown, parsed, write

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
HERE = pathlib.Path(__file__).resolve().parent
LINES = RESULTS / "one_shot.jsonl"
CALIBRATION = 256
RESNETS = {"resnet8": 1, "resnet20": 3}  # residual blocks of a stage
METHODS = {
    "magnitude": {"score": "magnitude"},
    "magnitude, refit": {"score": "magnitude", "refit": True},
    "Wanda": {"score": "wanda"},
    "Wanda, refit": {"score": "wanda", "refit": True},
    "OBS": {"score": "obs"},
    "OBS, shares by error": {"score": "obs", "budget": "error"},
}


def network():
    """Three convolutions with batch normalization, and two dense layers: 155,000 weights."""
    import keras

    layers = keras.layers
    inputs = x = keras.Input((28, 28, 1))
    for k, channels in enumerate((16, 32, 64)):
        strides = 2 if k else 1
        x = layers.Conv2D(channels, 3, strides, "same", use_bias=False, name=f"conv_{k}")(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9, name=f"norm_{k}")(x))
        x = x if k else layers.MaxPooling2D()(x)
    x = layers.Dense(128, activation="relu", name="hidden")(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(10, name="head")(x))


def made(name: str):
    """A network by name."""
    from networks import resnet

    options = {"filters": [16, 32, 64], "blocks": RESNETS.get(name)}
    return network() if name == "cnn" else resnet((14, 14, 1), 10, options)


def given_data(name: str, images: int):
    """Fashion-MNIST, `images` to train on; for residual networks of half the size."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    from data import load

    data = load("fashion_mnist")

    def halved(x):
        pooled = x.reshape(-1, 14, 2, 14, 2, 1).mean((2, 4))
        return pooled if name in RESNETS else x

    x, y = halved(data.x_train[:images]), data.y_train[:images]
    return dataclasses.replace(data, x_train=x, y_train=y, x_test=halved(data.x_test))


def trained(name: str, seed: int, epochs: int, data):
    """The trained network of a seed, from its file if there is one."""
    import keras

    folder = HERE / "out" / ("quick/one_shot" if QUICK else "one_shot")
    file = folder / f"{name}-{seed}-{epochs}-{len(data.x_train)}.weights.h5"
    keras.utils.set_random_seed(seed)
    model = made(name)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    steps = epochs * len(data.x_train) // 128
    rate = keras.optimizers.schedules.CosineDecay(
        2e-4, steps, alpha=0.02, warmup_target=4e-3, warmup_steps=max(1, steps // 20)
    )
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    if file.exists():
        model.load_weights(file)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        model.fit(data.x_train, data.y_train, batch_size=128, epochs=epochs, verbose=0)
        model.save_weights(file)
    return model


def accuracy(model, data) -> float:
    """Percent of the test images."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"])
    return 100 * model.evaluate(data.x_test, data.y_test, batch_size=500, verbose=0)[1]


def lines() -> list[dict]:
    """The finished runs; the first ones were all of the CNN."""
    return [{"network": "cnn"} | run for run in finished(LINES)]


def measure(name: str, seed: int, given: argparse.Namespace) -> None:
    """Appends the lines of a network and seed that are missing."""
    import keras_sparse_ortho as kso

    setting = {"network": name, "seed": seed, "epochs": given.epochs, "images": given.images}
    done = {(run["method"], run["density"]) for run in lines() if setting.items() <= run.items()}
    missing = [(m, d) for d in given.densities for m in METHODS if (m, d) not in done]
    if not missing:
        return
    data = given_data(name, given.images)
    model = trained(name, seed, given.epochs, data)
    if ("dense", 1.0) not in done:
        append(LINES, setting | {"method": "dense", "density": 1.0, "plain": accuracy(model, data)})
    x = data.x_train[:CALIBRATION]
    for method, density in missing:
        options = dict(METHODS[method])
        if options["score"] != "magnitude" or "refit" in options:
            options["data"] = x
        start = time.perf_counter()
        exclude = ["stem" if name in RESNETS else "conv_0", "head"]
        pruned = kso.prune(model, density, exclude=exclude, **{"budget": "uniform"} | options)
        seconds = time.perf_counter() - start
        plain = accuracy(pruned, data)
        kso.restore_statistics(pruned, x)
        run = {"method": method, "density": density, "plain": plain, "seconds": seconds}
        append(LINES, setting | run | {"restored": accuracy(pruned, data)})
        print(setting | run, flush=True)


def summarize(given: argparse.Namespace) -> None:
    """Writes the table of all lines."""
    setting = {"epochs": given.epochs, "images": given.images}
    runs = [run for run in finished(LINES) if setting.items() <= run.items()]
    seeds = sorted({run["seed"] for run in runs})
    dense = {run["seed"]: run["plain"] for run in runs if run["method"] == "dense"}
    rows = [["dense", "1", shown(list(dense.values())), "", "", ""]]
    for density in sorted({run["density"] for run in runs if run["density"] < 1}, reverse=True):
        for method in METHODS:
            own = [r for r in runs if (r["method"], r["density"]) == (method, density)]
            if not own:
                continue
            plain, restored = ([run[key] for run in own] for key in ("plain", "restored"))
            lost = [dense[run["seed"]] - run["restored"] for run in own]
            seconds = statistics.mean(run["seconds"] for run in own)
            row = [method, f"{density:g}", shown(plain), shown(restored)]
            rows.append([*row, f"{statistics.mean(lost):.1f}", f"{seconds:.1f}"])
    header = ["method", "density", "accuracy [%]", "statistics restored [%]"]
    header += ["lost to dense", "time [s]"]
    text = "# A trained CNN, pruned at once\n\n"
    text += (
        f"Fashion-MNIST, a CNN with batch normalization, trained on {given.images} images for "
        f"{given.epochs} epochs; all kernels but the first and the last are pruned, to one density "
        f"but for shares by error; {CALIBRATION} images for calibration, no training afterwards. "
        "Test accuracy, mean and standard deviation over the seeds, as pruned and after "
        "`restore_statistics`; points lost to the dense network after that; time of `prune`.\n\n"
    )
    write("one_shot", text + markdown(header, rows), seeds)


def shown(values: list[float]) -> str:
    """Mean and standard deviation."""
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} +- {statistics.stdev(values):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["cnn"], choices=["cnn", *RESNETS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=60000)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.2, 0.1])
    parser.add_argument("--summary", action="store_true", help="only write the table")
    quick = {"seeds": 1, "epochs": 1, "images": 2000, "densities": [0.2]}
    given = parsed(parser, quick=quick)
    for seed in range(0 if given.summary else given.seeds):
        for name in given.networks:
            measure(name, seed, given)
    summarize(given)


if __name__ == "__main__":
    main()
