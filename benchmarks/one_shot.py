"""Trained networks pruned at once, on calibration data: images and text.

python benchmarks/one_shot.py NAME [options]
"""

import argparse
import dataclasses
import functools
import itertools
import os
import statistics
import time
from collections.abc import Iterable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from networks import resnet
from record import (
    column,
    groups,
    markdown,
    matching,
    mean_and_deviation,
    sentences,
)
from runner import Measurement, Run, Setting, grid, interleaved, main
from training import (
    DEPTH,
    WIDTH,
    Dataset,
    accuracy,
    cached,
    compiled,
    crossentropy,
    load,
    perplexity,
    python_text,
    trained_language_model,
    windows,
)

import keras_sparse_ortho as kso

L = keras.layers

# --- networks and training ------------------------------------------------------------------------

CALIBRATION = 256
RESNETS = {"resnet8": 1, "resnet20": 3}  # residual blocks of a stage
TITLES = {"cnn": "CNN", "resnet8": "ResNet-8", "resnet20": "ResNet-20"}
STAY_DENSE = ["conv_0", "head"]


def dense_cnn():
    """Three convolutions with batch normalization, and two dense layers: 155,000 weights."""
    import keras

    layers = keras.layers
    inputs = x = keras.Input((28, 28, 1))
    for k, channels in enumerate((16, 32, 64)):
        strides = 2 if k else 1
        x = layers.Conv2D(
            channels, 3, strides, "same", use_bias=False, name=f"conv_{k}"
        )(x)
        x = layers.ReLU()(
            layers.BatchNormalization(momentum=0.9, name=f"norm_{k}")(x)
        )
        x = x if k else layers.MaxPooling2D()(x)
    x = layers.Dense(128, activation="relu", name="hidden")(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(10, name="head")(x))


def network(name: str) -> keras.Model:
    """A network by name."""
    if name == "cnn":
        return dense_cnn()
    return resnet(
        (14, 14, 1), 10, {"filters": [16, 32, 64], "blocks": RESNETS[name]}
    )


def halved(x: np.ndarray) -> np.ndarray:
    """Images of half the size."""
    return x.reshape(-1, 14, 2, 14, 2, 1).mean((2, 4))


def fashion_mnist(images: int, name: str = "cnn") -> Dataset:
    """Fashion-MNIST, `images` to train on; for residual networks of half the size."""
    data = load("fashion_mnist")
    x, y = data.x_train[:images], data.y_train[:images]
    x_test = data.x_test
    if name in RESNETS:
        x, x_test = halved(x), halved(x_test)
    return dataclasses.replace(data, x_train=x, y_train=y, x_test=x_test)


def fit_with_warm_up(
    model: keras.Model,
    data: Dataset,
    epochs: int,
    rate: float,
    callbacks: Iterable[Any] = (),
) -> None:
    """Trains with Adam, whose rate rises shortly and falls along a cosine."""
    steps = epochs * len(data.x_train) // 128
    rates = keras.optimizers.schedules.CosineDecay(
        rate / 20,
        steps,
        alpha=0.02,
        warmup_target=rate,
        warmup_steps=max(1, steps // 20),
    )
    model.compile(keras.optimizers.Adam(rates), crossentropy())
    model.fit(
        data.x_train,
        data.y_train,
        128,
        epochs=epochs,
        verbose=0,
        callbacks=[*callbacks],
    )


def trained(name: str, seed: int, epochs: int, data: Dataset) -> keras.Model:
    """The trained network of a seed, from its file if there is one."""
    keras.utils.set_random_seed(seed)
    model = network(name)
    fit = functools.partial(fit_with_warm_up, model, data, epochs, 4e-3)
    return cached(
        "one_shot", f"{name}-{seed}-{epochs}-{len(data.x_train)}", model, fit
    )


def percent(model: keras.Model, data: Dataset) -> float:
    """Percent of the test images."""
    return accuracy(compiled(model, "sgd"), data)


# --- on_images ------------------------------------------------------------------------------------

METHODS: dict[str, Run] = {
    "magnitude": {"score": "magnitude"},
    "magnitude, refit": {"score": "magnitude", "data": True},
    "Wanda, refit": {"score": "wanda", "data": True},
    "OBS": {"score": "obs", "data": True},
    "OBS, shares by error": {"score": "obs", "budget": "error", "data": True},
}
TRAINED_DENSITY = 0.1
TRAINED: dict[str, Run | None] = {
    "dense": None,
    "OBS, shares by error": {"score": "obs", "budget": "error"},
    "OBS": {"score": "obs", "budget": "uniform"},
    "magnitude": {"score": "magnitude", "budget": "uniform"},
    "GMP, one density": {"budget": "uniform"},
    "GMP, ERK": {"budget": "erk"},
}


class OnImages(Measurement):
    """Trained CNNs pruned at once, without training: accuracy by score, refit and statistics.

        python benchmarks/one_shot.py on_images [--seeds 3] [--epochs 4]
        python benchmarks/one_shot.py on_images --networks resnet8 resnet20 --densities 0.2
        python benchmarks/one_shot.py on_images --train  # one epoch more, against GMP

    For each seed a network with batch normalization is trained on Fashion-MNIST (kept in
    `out/one_shot`), then all kernels but the first and the last are pruned to each density, with
    256 training images for calibration.
    """

    page = lines = "one_shot"
    settings = {
        "networks": Setting(["cnn"], choices=TITLES),
        "seeds": Setting(3, quick=1),
        "epochs": Setting(4, quick=1),
        "images": Setting(60000, quick=2000),
        "densities": Setting([0.2, 0.1], quick=[0.2]),
        "train": Setting(False, "train networks to the end, too"),
        "rate": Setting(1e-3, "of the epoch after pruning"),
    }

    def finished(self) -> list[Run]:
        """The lines; the first ones were all of the CNN."""
        return [{"network": "cnn"} | line for line in super().finished()]

    def line_of(self, which: Run) -> Run | None:
        """The line of a run; a rate marks networks that are trained to the end."""
        lines = matching(self.finished(), **which)
        return next(
            (line for line in lines if ("rate" in line) == ("rate" in which)),
            None,
        )

    def runs(self) -> Iterable[Run]:
        given = self.given
        common = {"epochs": given.epochs, "images": given.images}
        for seed in range(given.seeds):
            for name in given.networks:
                setting = {"network": name, "seed": seed} | common
                yield setting | {"method": "dense", "density": 1.0}
                for which in grid(density=given.densities, method=METHODS):
                    yield setting | which
            if given.train:
                setting = {"network": "cnn", "seed": seed} | common
                setting |= {"density": TRAINED_DENSITY, "rate": given.rate}
                for method in TRAINED:
                    yield setting | {"method": method}

    def run(self, which: Run) -> Run:
        name, seed, method = which["network"], which["seed"], which["method"]
        data = fashion_mnist(which["images"], name)
        if "rate" in which:
            return {"plain": percent(trained_on(which, data), data)}
        model = trained(name, seed, which["epochs"], data)
        if method == "dense":
            return {"plain": percent(model, data)}
        x = data.x_train[:CALIBRATION]
        options = {"budget": "uniform"} | METHODS[method]
        if "data" in options:
            options["data"] = x
        exclude = ["stem", "head"] if name in RESNETS else STAY_DENSE
        start = time.perf_counter()
        pruned = kso.prune(model, which["density"], exclude=exclude, **options)
        results = {
            "seconds": time.perf_counter() - start,
            "plain": percent(pruned, data),
        }
        kso.restore_statistics(pruned, x)
        return results | {"restored": percent(pruned, data)}

    def report(self, lines: list[Run]) -> str:
        given = self.given
        runs = matching(lines, epochs=given.epochs, images=given.images)
        runs = [run for run in runs if "rows" not in run]
        text = "# Trained CNNs, pruned at once\n\n" + sentences(
            f"""
            Fashion-MNIST; networks with batch normalization, trained on {given.images} images for
            {given.epochs} epochs; all kernels but the first and the last are pruned, to one density
            but for shares by error; {CALIBRATION} images for calibration, no training afterwards.
            Test accuracy, mean and standard deviation over the seeds, as pruned and after
            `restore_statistics`; points lost to the dense network after that; time of `prune`.
            ResNets have 16 to 64 channels, and see images of half the size.
            """
        )
        for name, title in TITLES.items():
            members = [
                run for run in matching(runs, network=name) if "rate" not in run
            ]
            if members:
                text += f"## {title}\n\n{one_shot_table(members)}\n"
        text += trained_table(matching(runs, rate=given.rate), given)
        return text + recovery_table([line for line in lines if "rows" in line])


def trained_on(which: Run, data: Dataset) -> keras.Model:
    """The CNN at density 0.1 after as many epochs in all: pruned before the last one, or GMP."""
    how, epochs, seed = TRAINED[which["method"]], which["epochs"], which["seed"]
    if how is not None and "score" not in how:
        keras.utils.set_random_seed(seed)
        steps = (epochs + 1) * len(data.x_train) // 128
        masks = kso.MagnitudeMask(
            kso.schedules.Cubic(None, steps // 10, 7 * steps // 10)
        )
        model = kso.parametrize(
            dense_cnn(), masks, TRAINED_DENSITY, exclude=STAY_DENSE, **how
        )
        fit_with_warm_up(
            model, data, epochs + 1, 4e-3, [kso.callbacks.UpdateMasks()]
        )
        return model
    model = trained("cnn", seed, epochs, data)
    if how is not None:
        x = data.x_train[:CALIBRATION]
        options = how | ({"data": x} if how["score"] == "obs" else {})
        model = kso.prune(model, TRAINED_DENSITY, exclude=STAY_DENSE, **options)
        kso.restore_statistics(model, x)
    fit_with_warm_up(model, data, 1, which["rate"])
    return model


def one_shot_table(runs: list[Run]) -> str:
    """The table of a network."""
    dense = {
        run["seed"]: run["plain"] for run in matching(runs, method="dense")
    }
    rows = [["dense", "1", mean_and_deviation([*dense.values()]), "", "", ""]]
    densities = sorted(
        {run["density"] for run in runs if run["density"] < 1}, reverse=True
    )
    for density, method in itertools.product(densities, METHODS):
        members = matching(runs, density=density, method=method)
        if not members:
            continue
        lost = [dense[run["seed"]] - run["restored"] for run in members]
        row = [method, f"{density:g}"]
        row += [
            mean_and_deviation(column(members, key))
            for key in ("plain", "restored")
        ]
        seconds = statistics.mean(column(members, "seconds"))
        rows.append([*row, f"{statistics.mean(lost):.1f}", f"{seconds:.1f}"])
    header = ["method", "density", "accuracy [%]", "statistics restored [%]"]
    return markdown([*header, "lost to dense", "time [s]"], rows)


def trained_table(runs: list[Run], given: argparse.Namespace) -> str:
    """The section on networks that are trained to the end, if there are some."""
    rows = []
    for method in TRAINED:
        if members := matching(runs, method=method):
            rows.append([method, mean_and_deviation(column(members, "plain"))])
    if not rows:
        return ""
    about = sentences(
        f"""
        The CNN at density {TRAINED_DENSITY:g} after {given.epochs + 1} epochs in all. Pruned ones
        are pruned after {given.epochs} of them, with statistics restored, and trained for the last
        with Adam, whose rate falls from {given.rate:g}; GMP is trained from scratch, with the rates
        of the dense network over all epochs, and its density falls along a cubic from 10% to 70% of
        the run.
        """
    )
    return (
        "## One epoch more\n\n"
        + about
        + markdown(["method", "accuracy [%]"], rows)
    )


# --- recovery -------------------------------------------------------------------------------------

SEEN, UNLABELLED = 55000, 5000
RECOVERY_RATE = 3e-3
STEPS = 468
STRUCTURES: dict[str, Run] = {
    "0.2": {"density": 0.2},
    "0.1": {"density": 0.1},
    "2:4": {"density": 0.5, "structure": "2:4"},
    "blocks of 16 x 16, 0.25": {"density": 0.25, "structure": "16x16"},
    "half the channels": {
        "density": 0.5,
        "structure": "inputs",
        "include": ["conv_1", "conv_2"],
    },
}
RECOVERED = {
    "at once": [256],
    "at once, then distilled": [UNLABELLED],
    "distilled while it is pruned": [UNLABELLED, 1024, 256],
    "the same, then int8": [UNLABELLED],
    "the same, one density": [UNLABELLED],
}
"""By method, how many images it sees."""
FEW_ROWS_AT = "0.2"  # the only pattern that is measured with fewer rows


class Recovery(OnImages):
    """Gradual pruning of a trained CNN with distillation on unlabelled images.

        python benchmarks/one_shot.py recovery [--seeds 0 1 2]

    The CNN of `on_images`, trained on 55,000 images; the 5,000 others have no labels. It agrees
    where both networks give a test image the same class. The lines and the page are those of
    `on_images`; the table is the last section.
    """

    settings = {
        "seeds": Setting([0, 1, 2], quick=[0]),
        "patterns": Setting([*STRUCTURES], choices=STRUCTURES, quick=["0.2"]),
        "labelled": Setting(SEEN, "images with labels", quick=2000),
        "steps": Setting(STEPS, quick=32),
        "epochs": Setting(4, "of the other sections"),
        "images": Setting(50000, "of the other sections"),
        "rate": Setting(1e-3, "of the other sections"),
    }

    def runs(self) -> Iterable[Run]:
        for seed, pattern in itertools.product(
            self.given.seeds, self.given.patterns
        ):
            for method, counts in RECOVERED.items():
                if method == "the same, one density" and pattern not in (
                    "0.2",
                    "0.1",
                ):
                    continue
                for count in counts if pattern == FEW_ROWS_AT else counts[:1]:
                    yield {
                        "method": method,
                        "pattern": pattern,
                        "rows": count,
                        "seed": seed,
                    }

    def run(self, which: Run) -> Run:
        labelled = self.given.labelled
        x = fashion_mnist(labelled + UNLABELLED).x_train[labelled:][
            : which["rows"]
        ]
        data = fashion_mnist(labelled)
        dense = trained("cnn", which["seed"], 4, data)
        answers = dense.predict(data.x_test, batch_size=500, verbose=0).argmax(
            1
        )
        start = time.perf_counter()
        sparse = recovered(
            dense, which["method"], which["pattern"], x, self.given.steps
        )
        seconds = time.perf_counter() - start
        outputs = sparse.predict(data.x_test, batch_size=500, verbose=0)
        classes = (
            outputs["outputs"] if isinstance(outputs, dict) else outputs
        ).argmax(1)
        gained = (classes == data.y_test).mean() - (
            answers == data.y_test
        ).mean()
        agree = 100 * float((classes == answers).mean())
        return {
            "seconds": seconds,
            "agree": agree,
            "gained": 100 * float(gained),
        }


def with_features(model):
    """The model with the inputs of its head as a second output."""
    import keras

    head = model.get_layer("head")
    return keras.Model(
        model.inputs[0], {"features": head.input, "outputs": head.output}
    )


def distilled(
    student: keras.Model,
    targets: Run,
    x: Any,
    rate: float,
    steps: int,
    callbacks: Iterable = (),
) -> keras.Model:
    """Trains a model of `with_features` on the dense one's outputs; returns the plain one."""
    rates = keras.optimizers.schedules.CosineDecay(
        rate / 30, steps, warmup_target=rate, warmup_steps=steps // 20
    )
    weights = {name: 1 / float(value.var()) for name, value in targets.items()}
    losses = dict.fromkeys(targets, "mse")
    student.compile(keras.optimizers.Adam(rates), losses, loss_weights=weights)
    epochs = max(1, round(steps * 32 / len(x)))
    student.fit(
        x, targets, 32, epochs=epochs, verbose=0, callbacks=[*callbacks]
    )
    return keras.Model(student.input, student.output["outputs"])


def recovered(
    dense: keras.Model, method: str, pattern: str, x: np.ndarray, steps: int
) -> keras.Model:
    """The sparse model of a method, from unlabelled images."""
    teacher = with_features(dense)
    how = {"exclude": STAY_DENSE} | STRUCTURES[pattern]
    if "include" in how:
        del how["exclude"]
    density = how.pop("density")
    structure = how.pop("structure", None)
    calibration = x[:CALIBRATION]
    callbacks = []
    if method.startswith("at once"):
        student = kso.prune(
            teacher,
            density,
            score="obs",
            data=calibration,
            budget="error" if structure is None else "uniform",
            structure=kso.calibration.Channels()
            if structure == "inputs"
            else structure,
            **how,
        )
        kso.restore_statistics(student, calibration)
        if method == "at once":
            return student
    else:
        masks = kso.MagnitudeMask(
            kso.schedules.Cubic(None, 0.0, 0.7), structure=structure
        )
        shares = "uniform"
        if structure is None and not method.endswith("one density"):
            shares = kso.sensitivity(teacher, calibration, **how)
        student = kso.parametrize(teacher, masks, density, shares, **how)
        callbacks = [kso.callbacks.UpdateMasks()]
    targets = teacher.predict(x, batch_size=500, verbose=0)
    sparse = distilled(student, targets, x, RECOVERY_RATE, steps, callbacks)
    if not method.endswith("int8"):
        return sparse
    rounded = kso.quantize_aware(with_features(sparse))
    return distilled(rounded, targets, x, RECOVERY_RATE / 6, steps // 3)


def recovery_table(runs: list[Run]) -> str:
    """The section on recovery, if there are runs."""
    rows = []
    by_row = groups(runs, "pattern", "method", "rows")
    for pattern, (method, counts) in itertools.product(
        STRUCTURES, RECOVERED.items()
    ):
        for count in counts:
            if members := by_row.get((pattern, method, count)):
                cells = [
                    mean_and_deviation(column(members, key))
                    for key in ("agree", "gained")
                ]
                rows.append([pattern, method, str(count), *cells])
    if not rows:
        return ""
    about = sentences(
        f"""
        The CNN, trained on {SEEN} images, pruned with images without labels: at once (OBS, shares
        by error for single entries; statistics restored), then or meanwhile distilled in {STEPS}
        batches of 32, on the inputs and outputs of the head, at the rate {RECOVERY_RATE:g}. Then
        int8: `quantize_aware`, a third as long at a sixth of the rate. Agreement with the dense
        network on the test images, points of accuracy gained on it. Seeds:
        {sorted({run["seed"] for run in runs})}.
        """
    )
    header = [
        "pattern",
        "method",
        "images",
        "agree [%]",
        "accuracy gained [points]",
    ]
    return "\n## Recovery without labels\n\n" + about + markdown(header, rows)


# --- on_text --------------------------------------------------------------------------------------

TEXT_STAY_DENSE = ["embedding", "head"]
TEXT_METHODS: dict[str, Run] = {
    "magnitude": {},
    "magnitude, refit": {},
    "Wanda, refit": {"score": "wanda"},
    "OBS": {"score": "obs"},
    "OBS, shares by error": {"score": "obs", "budget": "error"},
}
PATTERNS = {"0.5": 0.5, "2:4": 0.5, "0.2": 0.2}
SKIPPED = [
    ("OBS, shares by error", "2:4"),
    ("magnitude, refit", "0.5"),
    ("Wanda, refit", "0.5"),
]
SMALLER: dict[str, Any] = {
    "half the feed-forward channels, OBS": {"score": "obs"},
    "half the feed-forward channels, by magnitude": {"score": "magnitude"},
    "SliceGPT, full width": 1.0,
    "SliceGPT, half the width": 0.5,
}
"""By method, the options of `prune`, or the part of the width."""
BACKENDS = {"jax": "time of a call [ms]", "tensorflow": "TensorFlow [ms]"}


class OnText(Measurement):
    """A trained language model pruned at once: perplexity by score, pattern and structure.

        python benchmarks/one_shot.py on_text [--seeds 3] [--steps 1500]

    For each seed the small language model of training.py is trained (kept in
    `out/language_model`). Then the kernels of its blocks are pruned, with 512 windows for
    calibration; half of its feed-forward channels, or half of the width of its residual stream,
    are taken out. Nothing is trained afterwards.
    """

    page = lines = "one_shot_text"
    settings = {
        "seeds": Setting(3, quick=1),
        "steps": Setting(1500, quick=20),
        "windows": Setting(512, "for calibration", quick=64),
        "patterns": Setting(
            ["1", "smaller", *PATTERNS], quick=["1", "smaller"]
        ),
    }

    def runs(self) -> Iterable[Run]:
        given = self.given
        cases = [("dense", "1"), *((name, "smaller") for name in SMALLER)]
        cases += [
            (method, pattern) for pattern in PATTERNS for method in TEXT_METHODS
        ]
        for seed in range(given.seeds):
            for method, pattern in cases:
                if (
                    pattern in given.patterns
                    and (method, pattern) not in SKIPPED
                ):
                    setting = {
                        "seed": seed,
                        "steps": given.steps,
                        "windows": given.windows,
                    }
                    yield setting | {"method": method, "pattern": pattern}

    def run(self, which: Run) -> Run:
        method, pattern = which["method"], which["pattern"]
        model = trained_language_model(which["seed"], which["steps"])
        x, _ = windows(python_text()[0], which["windows"], 7)
        start = time.perf_counter()
        if pattern in PATTERNS:
            model = pruned(model, method, pattern, x)
        elif method != "dense":
            model = smaller(model, method, x)
        seconds = time.perf_counter() - start
        results = {"perplexity": perplexity(model), "seconds": seconds}
        return results | {"weights": model.count_params()}

    def report(self, lines: list[Run]) -> str:
        """The tables: of the model that was trained longest first."""
        count = self.given.windows
        text = "# A trained language model, pruned at once\n\n" + sentences(
            f"""
            Characters of the sources of Python's standard library; two decoder blocks, 128 wide,
            trained on batches of 16 windows of 64 characters. All kernels of the blocks at one
            density (magnitudes are compared over all; shares by error differ); {count} windows for
            calibration, nothing is trained afterwards. Perplexity of the next character on 256
            windows of other modules, mean and standard deviation over the seeds. Times of a call
            with 64 windows: medians of interleaved calls.
            """
        )
        for steps, members in sorted(
            groups(lines, "steps").items(), reverse=True
        ):
            text += f"## Trained for {steps} batches\n\n{text_table(members, count)}\n"
        return text


class TextTimes(OnText):
    """Times of a call of the full and the smaller language models.

        KERAS_BACKEND=jax python benchmarks/one_shot.py text_times

    The models of the first seed are called in turn with 64 windows; the lines and the page are
    those of `on_text`.
    """

    resumes = False
    settings = OnText.settings | {"rounds": Setting(200, quick=3)}

    def runs(self) -> list[Run]:
        return [{"steps": self.given.steps, "pattern": "time"}]

    def run(self, which: Run) -> Iterable[Run]:
        model = trained_language_model(0, which["steps"])
        x, _ = windows(python_text()[0], 64, 7)
        models = {"dense": model}
        models |= {
            name: smaller(model, name, x) for name in SMALLER if "half" in name
        }
        calls = {
            name: functools.partial(m.predict_on_batch, x)
            for name, m in models.items()
        }
        times = interleaved(calls, self.given.rounds, warm_up=3)
        for name, seconds in times.items():
            yield {
                "method": name,
                "seconds": seconds,
                "backend": keras.backend.backend(),
            }


def pruned(
    model: keras.Model, method: str, pattern: str, x: np.ndarray
) -> keras.Model:
    """The model with the kernels of its blocks pruned."""
    options: Run = {"exclude": TEXT_STAY_DENSE} | TEXT_METHODS[method]
    if pattern == "2:4":
        options["structure"] = kso.NByM(2, 4)
    if method != "magnitude":
        options["data"] = x
    return kso.prune(model, PATTERNS[pattern], **options)


def smaller(model: keras.Model, name: str, x: np.ndarray) -> keras.Model:
    """The model with fewer channels or a narrower stream."""
    from slice_transformer import sliced

    how = SMALLER[name]
    if isinstance(how, float):
        return sliced(model, x, round(how * WIDTH))
    options = how | ({"data": x} if how["score"] == "obs" else {})
    options |= {"include": [f"narrow_{k}" for k in range(DEPTH)]}
    channels = kso.calibration.Channels()
    return kso.remove_channels(
        kso.prune(model, 0.5, structure=channels, **options)
    )


def text_table(lines: list[Run], count: int) -> str:
    """A table of runs with so many windows, and of all times."""
    seconds = {}
    for line in matching(lines, pattern="time"):
        key = line.get("backend", "jax"), line["method"]
        seconds.setdefault(key, []).append(line["seconds"])
    columns = {
        backend: title
        for backend, title in BACKENDS.items()
        if (backend, "dense") in seconds
    }
    runs = matching(lines, windows=count)
    dense = {
        run["seed"]: run["perplexity"] for run in matching(runs, method="dense")
    }
    rows = []
    for (method, pattern), members in groups(runs, "method", "pattern").items():
        more = [
            100 * (run["perplexity"] / dense[run["seed"]] - 1)
            for run in members
        ]
        row = [
            method,
            pattern,
            mean_and_deviation(column(members, "perplexity")),
        ]
        row.append(mean_and_deviation(more))
        row.append(
            f"{members[0]['weights']}" if pattern in ("1", "smaller") else ""
        )
        row.append(f"{statistics.mean(column(members, 'seconds')):.0f}")
        for backend in columns:
            times = seconds.get((backend, method))
            row.append(
                f"{1000 * statistics.median(times):.1f}" if times else ""
            )
        rows.append(row)
    header = [
        "method",
        "pattern",
        "perplexity",
        "more than dense [%]",
        "weights",
    ]
    return markdown([*header, "time to prune [s]", *columns.values()], rows)


if __name__ == "__main__":
    main(OnImages, Recovery, OnText, TextTimes)
