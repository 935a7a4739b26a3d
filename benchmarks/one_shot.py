"""Trained networks pruned at once, on calibration data: images and text.

    python benchmarks/one_shot.py NAME [options]

The measurements:

- `on_images`: trained CNNs pruned at once, without training: accuracy by score, refit and
  statistics.
- `recovery`: gradual pruning with distillation on unlabelled images, beside pruning at once.
- `on_text`: a trained language model pruned at once: perplexity by score, pattern and structure.
"""

import argparse
import dataclasses
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

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
    write,
)

# --- on_images ------------------------------------------------------------------------------------

HERE = pathlib.Path(__file__).resolve().parent
LINES = RESULTS / "one_shot.jsonl"
CALIBRATION = 256
RESNETS = {"resnet8": 1, "resnet20": 3}  # residual blocks of a stage
OTHERS = ["conv_0", "head"]
METHODS = {
    "magnitude": {"score": "magnitude"},
    "magnitude, refit": {"score": "magnitude", "data": True},
    "Wanda, refit": {"score": "wanda", "data": True},
    "OBS": {"score": "obs", "data": True},
    "OBS, shares by error": {"score": "obs", "budget": "error", "data": True},
}
TRAINED_DENSITY = 0.1
TRAINED = {
    "dense": None,
    "OBS, shares by error": {"score": "obs", "budget": "error"},
    "OBS": {"score": "obs", "budget": "uniform"},
    "magnitude": {"score": "magnitude", "budget": "uniform"},
    "GMP, one density": {"budget": "uniform"},
    "GMP, ERK": {"budget": "erk"},
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
    """The finished runs of `on_images`; the first ones were all of the CNN."""
    return [{"network": "cnn"} | run for run in finished(LINES) if "rows" not in run]


def measure(name: str, seed: int, given: argparse.Namespace) -> None:
    """Appends the lines of a network and seed that are missing."""
    import keras_sparse_ortho as kso

    setting = {"network": name, "seed": seed, "epochs": given.epochs, "images": given.images}
    own = [run for run in lines() if setting.items() <= run.items() and "rate" not in run]
    done = {(run["method"], run["density"]) for run in own}
    missing = [(m, d) for d in given.densities for m in METHODS if (m, d) not in done]
    if not missing:
        return
    data = given_data(name, given.images)
    model = trained(name, seed, given.epochs, data)
    if ("dense", 1.0) not in done:
        append(LINES, setting | {"method": "dense", "density": 1.0, "plain": accuracy(model, data)})
    x = data.x_train[:CALIBRATION]
    for method, density in announced(f"{name}, seed {seed}", missing):
        options = dict(METHODS[method])
        if options.get("data"):
            options["data"] = x
        start = time.perf_counter()
        exclude = ["stem", "head"] if name in RESNETS else OTHERS
        pruned = kso.prune(model, density, exclude=exclude, **{"budget": "uniform"} | options)
        seconds = time.perf_counter() - start
        plain = accuracy(pruned, data)
        kso.restore_statistics(pruned, x)
        run = {"method": method, "density": density, "plain": plain, "seconds": seconds}
        append(LINES, setting | run | {"restored": accuracy(pruned, data)})
        print(setting | run, flush=True)


def fitted(model, data, epochs: int, rate: float, callbacks=()) -> None:
    """Trains with Adam, whose rate rises shortly and falls along a cosine."""
    import keras

    steps = epochs * len(data.x_train) // 128
    rates = keras.optimizers.schedules.CosineDecay(
        rate / 20, steps, alpha=0.02, warmup_target=rate, warmup_steps=max(1, steps // 20)
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rates), loss)
    model.fit(data.x_train, data.y_train, 128, epochs=epochs, verbose=0, callbacks=[*callbacks])


def trained_on(method: str, seed: int, data, given: argparse.Namespace):
    """The CNN at density 0.1 after as many epochs in all: pruned before the last one, or GMP."""
    import keras

    import keras_sparse_ortho as kso

    how = TRAINED[method]
    if how is None:
        model = trained("cnn", seed, given.epochs, data)
    elif "budget" in how and "score" not in how:
        keras.utils.set_random_seed(seed)
        steps = (given.epochs + 1) * len(data.x_train) // 128
        template = kso.parametrizations.MagnitudeMask(
            kso.schedules.Cubic(None, steps // 10, 7 * steps // 10)
        )
        model = kso.parametrize(network(), template, TRAINED_DENSITY, exclude=OTHERS, **how)
        fitted(model, data, given.epochs + 1, 4e-3, [kso.callbacks.UpdateMasks()])
        return model
    else:
        x = data.x_train[:CALIBRATION]
        options = {"data": x} if how["score"] == "obs" else {}
        dense = trained("cnn", seed, given.epochs, data)
        model = kso.prune(dense, TRAINED_DENSITY, exclude=OTHERS, **options | how)
        kso.restore_statistics(model, x)
    fitted(model, data, 1, given.rate)
    return model


def measure_training(seed: int, given: argparse.Namespace) -> None:
    """Appends the lines of networks that are trained to the end."""
    setting = {"network": "cnn", "seed": seed, "epochs": given.epochs, "images": given.images}
    setting |= {"density": TRAINED_DENSITY, "rate": given.rate}
    done = {run["method"] for run in lines() if setting.items() <= run.items()}
    data = given_data("cnn", given.images)
    missing = [method for method in TRAINED if method not in done]
    for method in announced(f"trained, seed {seed}", missing):
        found = accuracy(trained_on(method, seed, data, given), data)
        append(LINES, setting | {"method": method, "plain": found})
        print(setting | {"method": method, "plain": found}, flush=True)


def summarize(given: argparse.Namespace) -> None:
    """Writes the tables of all lines."""
    setting = {"epochs": given.epochs, "images": given.images}
    runs = [run for run in lines() if setting.items() <= run.items()]
    text = "# Trained CNNs, pruned at once\n\n"
    text += (
        f"Fashion-MNIST; networks with batch normalization, trained on {given.images} images for "
        f"{given.epochs} epochs; all kernels but the first and the last are pruned, to one density "
        f"but for shares by error; {CALIBRATION} images for calibration, no training afterwards. "
        "Test accuracy, mean and standard deviation over the seeds, as pruned and after "
        "`restore_statistics`; points lost to the dense network after that; time of `prune`. "
        "ResNets have 16 to 64 channels, and see images of half the size.\n\n"
    )
    titles = {"cnn": "CNN", "resnet8": "ResNet-8", "resnet20": "ResNet-20"}
    for name, title in titles.items():
        own = [run for run in runs if run["network"] == name and "rate" not in run]
        if own:
            text += f"## {title}\n\n{one_shot_table(own)}\n"
    rows = []
    for method in TRAINED:
        own = [r for r in runs if r["method"] == method and r.get("rate") == given.rate]
        if own:
            rows.append([method, shown([run["plain"] for run in own])])
    if rows:
        text += (
            f"## One epoch more\n\nThe CNN at density {TRAINED_DENSITY:g} after "
            f"{given.epochs + 1} epochs in all. Pruned ones are pruned after {given.epochs} of "
            "them, with statistics restored, and trained for the last with Adam, whose rate falls "
            f"from {given.rate:g}; GMP is trained from scratch, with the rates of the dense "
            "network over all epochs, and its density falls along a cubic from 10% to 70% of the "
            f"run.\n\n{markdown(['method', 'accuracy [%]'], rows)}"
        )
    text += recovery_table([run for run in finished(LINES) if "rows" in run])
    write("one_shot", text, sorted({run["seed"] for run in runs}))


def one_shot_table(runs: list[dict]) -> str:
    """The table of a network."""
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
    return markdown([*header, "lost to dense", "time [s]"], rows)


def shown(values: list[float]) -> str:
    """Mean and standard deviation."""
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} +- {statistics.stdev(values):.2f}"


def on_images() -> None:
    """Trained CNNs pruned at once, without training: accuracy by score, refit and statistics.

        python benchmarks/one_shot.py on_images [--seeds 3] [--epochs 4]
        python benchmarks/one_shot.py on_images --networks resnet8 resnet20 --densities 0.2
        python benchmarks/one_shot.py on_images --train  # one epoch more, against GMP
        python benchmarks/one_shot.py on_images --summary

    For each seed a network with batch normalization is trained on Fashion-MNIST (kept in
    `out/one_shot`), then all kernels but the first and the last are pruned to each density, with
    256 training images for calibration. Each run is a line of `results/one_shot.jsonl`;
    `results/one_shot.md` has the means.
    """
    parser = described(on_images)
    parser.add_argument("--networks", nargs="+", default=["cnn"], choices=["cnn", *RESNETS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=60000)
    parser.add_argument("--densities", type=float, nargs="+", default=[0.2, 0.1])
    parser.add_argument("--train", action="store_true", help="train networks to the end, too")
    parser.add_argument("--rate", type=float, default=1e-3, help="of the epoch after pruning")
    parser.add_argument("--summary", action="store_true", help="only write the table")
    quick = {"seeds": 1, "epochs": 1, "images": 2000, "densities": [0.2]}
    given = parsed(parser, quick=quick)
    for seed in range(0 if given.summary else given.seeds):
        for name in given.networks:
            measure(name, seed, given)
        if given.train:
            measure_training(seed, given)
    summarize(given)


# --- recovery -------------------------------------------------------------------------------------

SEEN, UNLABELLED, RATE, STEPS = 55000, 5000, 3e-3, 468
STRUCTURES = {
    "0.2": {"density": 0.2},
    "0.1": {"density": 0.1},
    "2:4": {"density": 0.5, "structure": "2:4"},
    "blocks of 16 x 16, 0.25": {"density": 0.25, "structure": "16x16"},
    "half the channels": {"density": 0.5, "structure": "inputs", "include": ["conv_1", "conv_2"]},
}
RECOVERED = {
    "at once": [256],
    "at once, then distilled": [UNLABELLED],
    "distilled while it is pruned": [UNLABELLED, 1024, 256],
    "the same, then int8": [UNLABELLED],
    "the same, one density": [UNLABELLED],
}
FEW_ROWS_AT = "0.2"  # the only pattern that is measured with fewer rows


def with_features(model):
    """The model with the inputs of its head as a second output."""
    import keras

    head = model.get_layer("head")
    return keras.Model(model.inputs[0], {"features": head.input, "outputs": head.output})


def distilled(student, targets, x, rate: float, steps: int, callbacks=()):
    """Trains a model of `with_features` on the dense one's outputs; returns the plain one."""
    import keras

    rates = keras.optimizers.schedules.CosineDecay(
        rate / 30, steps, warmup_target=rate, warmup_steps=steps // 20
    )
    weights = {name: 1 / float(value.var()) for name, value in targets.items()}
    losses = dict.fromkeys(targets, "mse")
    student.compile(keras.optimizers.Adam(rates), losses, loss_weights=weights)
    epochs = max(1, round(steps * 32 / len(x)))
    student.fit(x, targets, 32, epochs=epochs, verbose=0, callbacks=[*callbacks])
    return keras.Model(student.input, student.output["outputs"])


def recovered(dense, method: str, pattern: str, x, steps: int):
    """The sparse model of a method, from unlabelled images."""
    import keras_sparse_ortho as kso

    taught, callbacks = with_features(dense), []
    how = {"exclude": OTHERS} | STRUCTURES[pattern]
    if "include" in how:
        del how["exclude"]
    density, structure = how.pop("density"), how.pop("structure", None)
    if method.startswith("at once"):
        whole = kso.calibration.Channels() if structure == "inputs" else structure
        budget = "error" if structure is None else "uniform"
        options = {"score": "obs", "data": x[:CALIBRATION], "budget": budget, "structure": whole}
        student = kso.prune(taught, density, **options | how)
        kso.restore_statistics(student, x[:CALIBRATION])
        if method == "at once":
            return student
    else:
        template = kso.MagnitudeMask(kso.schedules.Cubic(None, 0.0, 0.7), structure=structure)
        shares = "uniform"
        if structure is None and not method.endswith("one density"):
            shares = kso.sensitivity(taught, x[:CALIBRATION], **how)
        student = kso.parametrize(taught, template, density, shares, **how)
        callbacks = [kso.callbacks.UpdateMasks()]
    targets = taught.predict(x, batch_size=500, verbose=0)
    sparse = distilled(student, targets, x, RATE, steps, callbacks)
    if not method.endswith("int8"):
        return sparse
    rounded = kso.quantize_aware(with_features(sparse))
    return distilled(rounded, targets, x, RATE / 6, steps // 3)


def recovery() -> None:
    """Gradual pruning of a trained CNN with distillation on unlabelled images.

        python benchmarks/one_shot.py recovery [--seeds 3]

    The CNN of `on_images`, trained on 55,000 images; the 5,000 others have no labels. It agrees
    where both networks give a test image the same class. Runs are lines of `one_shot.jsonl`; the
    table is the last section of `one_shot.md`.
    """
    parser = described(recovery)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--patterns", nargs="+", default=[*STRUCTURES], choices=STRUCTURES)
    parser.add_argument("--images", type=int, default=SEEN, help="with labels")
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parsed(parser, quick={"seeds": [0], "patterns": ["0.2"], "images": 2000, "steps": 32})
    x = given_data("cnn", given.images + UNLABELLED).x_train[given.images :]
    data = given_data("cnn", given.images)
    keys = ("method", "pattern", "rows", "seed")
    done = {tuple(run[k] for k in keys) for run in finished(LINES) if "rows" in run}
    for seed in given.seeds:
        wanted = [
            (method, pattern, rows, seed)
            for pattern in given.patterns
            for method, counts in RECOVERED.items()
            if method != "the same, one density" or pattern in ("0.2", "0.1")
            for rows in (counts if pattern == FEW_ROWS_AT else counts[:1])
        ]
        dense = trained("cnn", seed, 4, data)
        answers = dense.predict(data.x_test, batch_size=500, verbose=0).argmax(1)
        for run in announced(f"recovery, seed {seed}", [run for run in wanted if run not in done]):
            start = time.perf_counter()
            found = recovered(dense, *run[:2], x[: run[2]], given.steps)
            seconds = time.perf_counter() - start
            outputs = found.predict(data.x_test, batch_size=500, verbose=0)
            own = (outputs["outputs"] if isinstance(outputs, dict) else outputs).argmax(1)
            line = dict(zip(keys, run, strict=True)) | {"seconds": seconds}
            line |= {"agree": 100 * float((own == answers).mean())}
            gained = (own == data.y_test).mean() - (answers == data.y_test).mean()
            append(LINES, line | {"gained": 100 * float(gained)})
            print(line | {"gained": 100 * float(gained)}, flush=True)
    summarize(argparse.Namespace(epochs=4, images=50000, rate=1e-3))


def recovery_table(runs: list[dict]) -> str:
    """The section on recovery."""
    text = (
        f"\n## Recovery without labels\n\nThe CNN, trained on {SEEN} images, pruned with images "
        "without labels: at once (OBS, shares by error for single entries; statistics restored), "
        f"then or meanwhile distilled in {STEPS} batches of 32, on the inputs and outputs of the "
        f"head, at the rate {RATE:g}. Then int8: `quantize_aware`, a third as long at a sixth of "
        "the rate. Agreement with the dense network on the test images, points of accuracy "
        f"gained on it. Seeds: {sorted({run['seed'] for run in runs})}.\n\n"
    )
    rows = []
    for pattern in STRUCTURES:
        for method in RECOVERED:
            for count in RECOVERED[method]:
                key = (pattern, method, count)
                own = [r for r in runs if (r["pattern"], r["method"], r["rows"]) == key]
                if own:
                    agree, gained = ([run[k] for run in own] for k in ("agree", "gained"))
                    rows.append([pattern, method, str(count), shown(agree), shown(gained)])
    header = ["pattern", "method", "images", "agree [%]", "accuracy gained [points]"]
    return text + markdown(header, rows) if rows else ""


# --- on_text --------------------------------------------------------------------------------------

ON_TEXT_LINES = RESULTS / "one_shot_text.jsonl"
ON_TEXT_OTHERS = ["embedding", "head"]
ON_TEXT_METHODS = {
    "magnitude": {},
    "magnitude, refit": {},
    "Wanda, refit": {"score": "wanda"},
    "OBS": {"score": "obs"},
    "OBS, shares by error": {"score": "obs", "budget": "error"},
}
PATTERNS = {"0.5": 0.5, "2:4": 0.5, "0.2": 0.2}
SKIPPED = [("OBS, shares by error", "2:4"), ("magnitude, refit", "0.5"), ("Wanda, refit", "0.5")]
SMALLER = {
    "half the feed-forward channels, OBS": {"score": "obs"},
    "half the feed-forward channels, by magnitude": {"score": "magnitude"},
    "SliceGPT, full width": 1.0,
    "SliceGPT, half the width": 0.5,
}


def pruned(model, method: str, pattern: str, x):
    """The model with the kernels of its blocks pruned."""
    import keras_sparse_ortho as kso

    options = {"exclude": ON_TEXT_OTHERS} | ON_TEXT_METHODS[method]
    if pattern == "2:4":
        options["structure"] = kso.NByM(2, 4)
    if method != "magnitude":
        options["data"] = x
    return kso.prune(model, PATTERNS[pattern], **options)


def smaller(model, name: str, x):
    """The model with fewer channels or a narrower stream."""
    import small_language_model as lm
    from slice_transformer import sliced

    import keras_sparse_ortho as kso

    how = SMALLER[name]
    if isinstance(how, float):
        return sliced(model, x, round(how * lm.WIDTH))
    narrow = [f"narrow_{k}" for k in range(lm.DEPTH)]
    options = how | ({"data": x} if how["score"] == "obs" else {})
    channels = kso.calibration.Channels()
    return kso.remove_channels(kso.prune(model, 0.5, structure=channels, include=narrow, **options))


def on_text_measure(seed: int, given: argparse.Namespace) -> None:
    """Appends the lines of a seed that are missing."""
    import small_language_model as lm

    setting = {"seed": seed, "steps": given.steps, "windows": given.windows}
    done = {
        (run["method"], run["pattern"])
        for run in finished(ON_TEXT_LINES)
        if setting.items() <= run.items()
    }
    wanted = [(m, p) for p in PATTERNS for m in ON_TEXT_METHODS if (m, p) not in SKIPPED]
    wanted = [("dense", "1"), *((name, "smaller") for name in SMALLER), *wanted]
    missing = [run for run in wanted if run not in done and run[1] in given.patterns]
    if not missing:
        return
    model = lm.trained(seed, given.steps)
    x, _ = lm.windows(lm.text()[0], given.windows, 7)
    for method, pattern in announced(f"seed {seed}", missing):
        start = time.perf_counter()
        if pattern in PATTERNS:
            found = pruned(model, method, pattern, x)
        else:
            found = model if method == "dense" else smaller(model, method, x)
        seconds = time.perf_counter() - start
        run = {"method": method, "pattern": pattern, "perplexity": lm.perplexity(found)}
        run |= {"seconds": seconds, "weights": found.count_params()}
        append(ON_TEXT_LINES, setting | run)
        print(setting | run, flush=True)


def measure_time(given: argparse.Namespace) -> None:
    """Appends the times of a call of the full and the sliced model, measured in turns."""
    import keras
    import small_language_model as lm
    from record import interleaved

    model = lm.trained(0, given.steps)
    x, _ = lm.windows(lm.text()[0], 64, 7)
    models = {"dense": model}
    models |= {name: smaller(model, name, x) for name in SMALLER if "half" in name}
    calls = {name: (lambda one=one: one.predict_on_batch(x)) for name, one in models.items()}
    for name, seconds in interleaved(calls, given.rounds, warm_up=3).items():
        run = {"steps": given.steps, "method": name, "pattern": "time", "seconds": seconds}
        append(ON_TEXT_LINES, run | {"backend": keras.backend.backend()})
        print(name, seconds, flush=True)


def on_text_summarize(given: argparse.Namespace) -> None:
    """Writes the tables of all lines: of the model that was trained longest first."""
    runs = finished(ON_TEXT_LINES)
    text = "# A trained language model, pruned at once\n\n"
    text += (
        "Characters of the sources of Python's standard library; two decoder blocks, 128 wide, "
        "trained on batches of 16 windows of 64 characters. All kernels of the "
        "blocks at one density (magnitudes are compared over all; shares by error differ); "
        f"{given.windows} windows for calibration, nothing is trained afterwards. Perplexity of "
        "the next character on 256 windows of other modules, mean and standard deviation over the "
        "seeds. Times of a call with 64 windows: medians of interleaved calls.\n\n"
    )
    for steps in sorted({run["steps"] for run in runs}, reverse=True):
        text += f"## Trained for {steps} batches\n\n"
        text += _table([run for run in runs if run["steps"] == steps], given.windows) + "\n"
    seeds = sorted({run["seed"] for run in runs if "seed" in run})
    write("one_shot_text", text, seeds)


def _table(runs: list[dict], windows: int) -> str:
    rounds: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if run["pattern"] == "time":
            key = run.get("backend", "jax"), run["method"]
            rounds.setdefault(key, []).append(run["seconds"])
    runs = [run for run in runs if run.get("windows") == windows]
    dense = {run["seed"]: run["perplexity"] for run in runs if run["method"] == "dense"}
    backends = {"jax": "time of a call [ms]", "tensorflow": "TensorFlow [ms]"}
    backends = {key: name for key, name in backends.items() if (key, "dense") in rounds}
    rows = []
    for method, pattern in dict.fromkeys((run["method"], run["pattern"]) for run in runs):
        own = [r for r in runs if (r["method"], r["pattern"]) == (method, pattern)]
        more = [100 * (run["perplexity"] / dense[run["seed"]] - 1) for run in own]
        row = [method, pattern, shown([run["perplexity"] for run in own]), shown(more)]
        row.append(f"{own[0]['weights']}" if pattern in ("1", "smaller") else "")
        row.append(f"{statistics.mean(run['seconds'] for run in own):.0f}")
        times = [rounds.get((backend, method)) for backend in backends]
        rows.append([*row, *(f"{1000 * statistics.median(t):.1f}" if t else "" for t in times)])
    header = ["method", "pattern", "perplexity", "more than dense [%]", "weights"]
    return markdown([*header, "time to prune [s]", *backends.values()], rows)


def on_text() -> None:
    """A trained language model pruned at once: perplexity by score, pattern and structure.

        python benchmarks/one_shot.py on_text [--seeds 3] [--steps 1500]
        python benchmarks/one_shot.py on_text --summary

    For each seed the model of `small_language_model.py` is trained (kept in
    `out/language_model`). Then the kernels of its blocks are pruned, with 512 windows for
    calibration; half of its feed-forward channels, or half of the width of its residual stream,
    are taken out. Nothing is trained afterwards. Each run is a line of
    `results/one_shot_text.jsonl`; `results/one_shot_text.md` has the means.
    """
    parser = described(on_text)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--windows", type=int, default=512, help="for calibration")
    parser.add_argument("--patterns", nargs="+", default=["1", "smaller", *PATTERNS])
    parser.add_argument("--rounds", type=int, default=200, help="of the times")
    parser.add_argument("--time", action="store_true", help="only time calls")
    parser.add_argument("--summary", action="store_true", help="only write the table")
    quick = {"seeds": 1, "steps": 20, "windows": 64, "patterns": ["1", "smaller"]}
    given = parsed(parser, quick=quick)
    if given.time:
        measure_time(given)
    elif not given.summary:
        for seed in range(given.seeds):
            on_text_measure(seed, given)
    on_text_summarize(given)


if __name__ == "__main__":
    chosen(on_images, recovery, on_text)
