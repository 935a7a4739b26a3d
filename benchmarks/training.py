"""Data, batches, curves and steps of training, for the scripts of this folder."""

import functools
import glob
import itertools
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import wave
import zipfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from record import HERE, QUICK

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

from data import Dataset, load

__all__ = ["Dataset", "load"]
OUT = HERE / "out"


# --- training -------------------------------------------------------------------------------------


def crossentropy() -> keras.losses.Loss:
    """The loss of all classifiers here, whose heads give logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model: keras.Model, optimizer: Any, **options: Any) -> keras.Model:
    """The model, compiled as a classifier."""
    model.compile(optimizer, crossentropy(), metrics=["accuracy"], **options)
    return model


def accuracy(model: keras.Model, data: Dataset) -> float:
    """The accuracy of a compiled classifier on the test set, in percent."""
    _, share = model.evaluate(
        data.x_test, data.y_test, batch_size=500, verbose=0
    )
    return 100 * float(share)


def first_rows(data: Dataset, count: int | None) -> Dataset:
    """The data with so many rows to train on only."""
    x, y = data.x_train[:count], data.y_train[:count]
    return Dataset(data.name, x, y, data.x_test, data.y_test)


def cached(
    folder: str, name: str, model: keras.Model, fit: Callable[[], None]
) -> keras.Model:
    """The model with the weights of a file in `out`; `fit` trains it if there is no file.

    Args:
        folder: The folder of the file; with `--quick` it lies in `out/quick`.
        name: The name of the file, without its ending.
        model: The model, not trained.
        fit: Trains it.
    """
    place = OUT / "quick" / folder if QUICK else OUT / folder
    file = place / f"{name}.weights.h5"
    if file.exists():
        model.load_weights(file)
        return model
    fit()
    place.mkdir(parents=True, exist_ok=True)
    plain = keras.models.clone_model(model)  # without the optimizer
    plain.set_weights(model.get_weights())
    plain.save_weights(file)
    return model


def training_pass(
    model: keras.Model, x: Any, y: np.ndarray, batch: int
) -> Callable[[], object]:
    """A function that trains a compiled model on all rows once, and waits for it.

    JAX and torch train with `fit`, TensorFlow with the train function of `fit`, because repeated
    short calls of `fit` sometimes wait.
    """
    if keras.backend.backend() != "tensorflow":
        return lambda: model.fit(
            x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0
        )
    import tensorflow as tf

    data = (
        tf.data.Dataset.from_tensor_slices((x, y))
        .batch(batch, drop_remainder=True)
        .cache()
    )
    batches = iter(data.repeat())
    steps = len(y) // batch
    model.make_train_function()

    def run() -> None:
        for _ in range(steps):
            logs = model.train_function(batches)
        float(logs["loss"])  # waits for the device

    return run


# --- batches --------------------------------------------------------------------------------------


def whole_batches(x: np.ndarray, y: np.ndarray, size: int) -> dict[str, Any]:
    """Arguments of `fit` that train on arrays, without the rest after the last whole batch."""
    kept = len(x) // size * size
    return {"x": x[:kept], "y": y[:kept], "batch_size": size}


def shuffled(
    x: np.ndarray, y: np.ndarray, size: int, seed: int
) -> dict[str, Any]:
    """Arguments of `fit` that train on whole batches, in a new order in each epoch.

    Keras 3.15 on TensorFlow shuffles arrays by an operation within a dataset, which restarts in
    each epoch: after `keras.utils.set_random_seed` all epochs have the same batches in the same
    order, which costs a dense MLP on Fashion-MNIST a point after ten epochs (`choices.py
    order`). JAX and torch shuffle outside, and tf_keras uses one dataset for all epochs.

    Args:
        x: Inputs.
        y: Labels.
        size: Batch size; the rest after the last whole batch is dropped.
        seed: Seed of the orders on TensorFlow.
    """
    arrays = whole_batches(x, y, size)
    if keras.backend.backend() != "tensorflow":
        return arrays
    import tensorflow as tf

    inputs, labels, kept = (
        tf.constant(arrays["x"]),
        tf.constant(arrays["y"]),
        len(arrays["x"]),
    )

    # of one epoch: as Keras does it, in half the time of `shuffle`
    def order(
        pair: Any,
    ) -> Any:
        rows = tf.random.experimental.stateless_shuffle(tf.range(kept), pair)
        return tf.data.Dataset.from_tensor_slices(tf.reshape(rows, (-1, size)))

    pairs = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)
    batches = pairs.take(2).batch(2, drop_remainder=True).flat_map(order)
    batches = batches.apply(
        tf.data.experimental.assert_cardinality(kept // size)
    )
    batches = batches.map(
        lambda rows: (tf.gather(inputs, rows), tf.gather(labels, rows))
    )
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = (
        False  # its threads would take half of a single core
    )
    return {"x": batches.prefetch(2).with_options(options), "shuffle": False}


class Progress(keras.callbacks.Callback):
    """Training accuracy in windows of steps: `(last step, accuracy within the window)`.

    `losses` has the loss in the same way, if `fit` reports it.

    In the first epoch every image is new to the network when it is counted, so this is an accuracy
    on unseen images, at no cost.

    Args:
        window: Steps that are averaged.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.points: list[tuple[int, float]] = []
        self.losses: list[tuple[int, float]] = []
        self._restart()

    def _restart(self) -> None:
        self._steps, self._before = 0, {"accuracy": 0.0, "loss": 0.0}

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Metrics start from zero."""
        self._restart()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Recovers the windows from the running mean of the epoch."""
        assert logs is not None
        self._steps += 1
        if self._steps % self.window == 0:
            for name, points in (
                ("accuracy", self.points),
                ("loss", self.losses),
            ):
                if name in logs:
                    total = float(logs[name]) * self._steps
                    points.append(
                        (
                            self._steps,
                            (total - self._before[name]) / self.window,
                        )
                    )
                    self._before[name] = total


# --- speech: for recurrent networks ---------------------------------------------------------------


def vowels() -> Dataset:
    """270 and 370 utterances of two vowels by nine men, 12 coefficients of up to 29 frames."""
    folder = OUT / "vowels"
    if not list(folder.glob("aeon-*.whl")):
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "-q",
            "aeon==1.6.0",
        ]
        subprocess.run([*command, "-d", str(folder)], check=True)
    wheel = zipfile.ZipFile(next(folder.glob("aeon-*.whl")))
    parts = []
    for part in ("TRAIN", "TEST"):
        name = f"aeon/datasets/data/JapaneseVowels/JapaneseVowels_{part}.ts"
        rows = wheel.read(name).decode().split("@data")[1].split()
        x = np.zeros((len(rows), 29, 12), np.float32)
        for place, row in zip(x, rows, strict=True):
            series = np.array(
                [one.split(",") for one in row.split(":")[:-1]], np.float32
            )
            place[29 - series.shape[1] :] = series.T
        parts += [x, np.array([int(row.rsplit(":", 1)[1]) - 1 for row in rows])]
    return standardized("vowels", *parts)


def standardized(
    name: str, x: np.ndarray, y: np.ndarray, *test: np.ndarray
) -> Dataset:
    """Features with mean 0 and deviation 1 on the training set."""
    mean, deviation = x.mean((0, 1)), x.std((0, 1))
    order = (
        np.random.default_rng(0).permutation(len(x))
        if name == "vowels"
        else np.arange(len(x))
    )
    x, y = x[order], y[order]
    return Dataset(
        name, (x - mean) / deviation, y, (test[0] - mean) / deviation, test[1]
    )


WORDS = ("yes", "no", "up", "down", "left", "right", "on", "off", "stop", "go")
ACCENTS = (
    "en-us",
    "en-gb",
    "en-gb-scotland",
    "en-gb-x-rp",
    "en-gb-x-gbclan",
    "en-029",
)
TRAINED_VOICES = 40
TESTED_VOICES = 16
TAKES = 4  # how often each voice says a word
FRAMES = 50
BANDS = 20


def keywords() -> Dataset:
    """Words of Google's set of 12 by synthetic voices under noise; other voices in the test set."""
    cached = OUT / "keywords.npz"
    if not cached.exists():
        cached.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(cached, **spoken())
    with np.load(cached) as found:
        x, y, voice = found["x"], found["y"], found["voice"]
    trained = voice < TRAINED_VOICES
    return standardized(
        "keywords", x[trained], y[trained], x[~trained], y[~trained]
    )


def spoken() -> dict[str, np.ndarray]:
    """Log-mel frames of every take, with word and voice, in the order of voices."""
    listed = subprocess.run(
        ["espeak-ng", "--voices=variant"],
        capture_output=True,
        text=True,
        check=True,
    )
    names = [
        line.split("!v/")[1].strip() for line in listed.stdout.splitlines()[1:]
    ]
    rng = np.random.default_rng(0)
    plain = sorted(name for name in names if " " not in name)
    voices = rng.permutation(plain)[: TRAINED_VOICES + TESTED_VOICES]
    x, y, who = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "word.wav"
        for (k, voice), (n, word), _ in itertools.product(
            enumerate(voices), enumerate(WORDS), range(TAKES)
        ):
            accent, speed, pitch = (
                rng.choice(ACCENTS),
                rng.integers(120, 220),
                rng.integers(20, 80),
            )
            how = [
                "-v",
                f"{accent}+{voice}",
                "-s",
                str(speed),
                "-p",
                str(pitch),
                "-w",
                str(file),
            ]
            subprocess.run(
                ["espeak-ng", *how, word], check=True, capture_output=True
            )
            with wave.open(str(file)) as sound:
                rate = sound.getframerate()
                samples = np.frombuffer(sound.readframes(-1), np.int16).astype(
                    np.float32
                )
            x.append(log_mel(samples, rate, rng))
            y.append(n)
            who.append(k)
    return {
        "x": np.array(x, np.float32),
        "y": np.array(y),
        "voice": np.array(who),
    }


def log_mel(
    samples: np.ndarray, rate: int, rng: np.random.Generator
) -> np.ndarray:
    """`FRAMES` log-mel frames of one second with noise, at 0 to 10 dB, and a random delay."""
    sound = np.zeros(rate, np.float32)
    kept = samples[np.flatnonzero(np.abs(samples) > 100)[0] :][:rate]
    delay = rng.integers(0, max(rate - len(kept), 0) + 1)
    sound[delay : delay + len(kept)] = kept
    power = np.mean(kept**2) / 10 ** rng.uniform(0, 1)
    sound += rng.normal(0, np.sqrt(power), rate).astype(np.float32)
    hop, size = rate // FRAMES, 512
    padded = np.pad(sound, (0, size))
    frames = np.stack([padded[k * hop : k * hop + size] for k in range(FRAMES)])
    spectrum = np.abs(np.fft.rfft(frames * np.hanning(size))) ** 2
    edges = 700 * (
        10
        ** (np.linspace(0, 2595 * np.log10(1 + rate / 1400), BANDS + 2) / 2595)
        - 1
    )
    places = np.fft.rfftfreq(size, 1 / rate)
    rising = (places[:, None] - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - places[:, None]) / (edges[2:] - edges[1:-1])
    return np.log(spectrum @ np.maximum(0, np.minimum(rising, falling)) + 1)


# --- text: a small language model of characters ---------------------------------------------------

LENGTH = 64
SYMBOLS = 97  # printable ASCII, the end of a line, and all others
WIDTH = 128
DEPTH = 2
HEADS = 4
HIDDEN = 512
BATCH = 16


def language_model() -> keras.Model:
    """Two decoder blocks with normalization in front, of Keras' layers alone: 430,000 weights."""
    from slice_transformer import decoder

    return decoder(LENGTH, SYMBOLS, WIDTH, DEPTH, HEADS, HIDDEN)


@functools.cache
def python_text() -> tuple[np.ndarray, np.ndarray]:
    """Symbols of the standard library's modules: eleven twelfths to train on, the rest to test."""
    root = pathlib.Path(os.__file__).parent
    files = [*glob.glob(f"{root}/*.py"), *glob.glob(f"{root}/[a-z]*/*.py")]
    left_out = ("site-packages", "/test", "idlelib", "encodings")
    files = sorted(
        file for file in files if not any(name in file for name in left_out)
    )
    np.random.default_rng(0).shuffle(files)
    table = np.full(256, 96, np.uint8)
    table[32:127], table[10] = np.arange(95), 95
    symbols = [table[np.fromfile(file, np.uint8)] for file in files]
    tested = len(files) // 12
    return np.concatenate(symbols[tested:]), np.concatenate(symbols[:tested])


def windows(
    symbols: np.ndarray, count: int, seed: int, length: int = LENGTH
) -> tuple[np.ndarray, np.ndarray]:
    """Random windows, and the symbols that follow theirs."""
    starts = np.random.default_rng(seed).integers(
        0, len(symbols) - length - 1, count
    )
    found = symbols[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return found[:, :-1], found[:, 1:]


def fit_language_model(
    model: keras.Model, steps: int, seed: int, rate: float
) -> None:
    """Trains on new windows with AdamW, whose rate rises and falls along a cosine."""
    warmup = max(1, steps // 20)
    rates = keras.optimizers.schedules.CosineDecay(
        0.05 * rate,
        steps - warmup,
        alpha=0.02,
        warmup_target=rate,
        warmup_steps=warmup,
    )
    optimizer = keras.optimizers.AdamW(
        rates, weight_decay=0.02, beta_2=0.98, clipnorm=1.0
    )
    model.compile(optimizer, crossentropy())
    x, y = windows(python_text()[0], BATCH * steps, seed)
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)


def trained_language_model(seed: int, steps: int) -> keras.Model:
    """The trained model of a seed, from its file if there is one."""
    keras.utils.set_random_seed(seed)
    model = language_model()
    return cached(
        "language_model",
        f"{seed}-{steps}",
        model,
        lambda: fit_language_model(model, steps, seed, 5e-3),
    )


def perplexity(model: keras.Model, count: int = 256) -> float:
    """The perplexity of the next symbol, on windows of modules that no training has seen."""
    model.compile(loss=crossentropy())
    x, y = windows(python_text()[1], count, 1)
    return math.exp(model.evaluate(x, y, batch_size=64, verbose=0))
