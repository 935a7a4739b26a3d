"""A small language model of characters, trained on the sources of Python's standard library."""

import functools
import glob
import math
import os
import pathlib
import sys

import keras
import numpy as np
from record import QUICK

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))
from slice_transformer import decoder  # noqa: E402

LENGTH = 64
SYMBOLS = 97  # printable ASCII, the end of a line, and all others
WIDTH, DEPTH, HEADS, HIDDEN = 128, 2, 4, 512
BATCH = 16


def network() -> keras.Model:
    """Two decoder blocks with normalization in front, of Keras' layers alone: 430,000 weights."""
    return decoder(LENGTH, SYMBOLS, WIDTH, DEPTH, HEADS, HIDDEN)


@functools.cache
def text() -> tuple[np.ndarray, np.ndarray]:
    """Symbols of the standard library's modules: eleven twelfths to train on, the rest to test."""
    root = pathlib.Path(os.__file__).parent
    files = [*glob.glob(f"{root}/*.py"), *glob.glob(f"{root}/[a-z]*/*.py")]
    left_out = ("site-packages", "/test", "idlelib", "encodings")
    files = sorted(file for file in files if not any(name in file for name in left_out))
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
    starts = np.random.default_rng(seed).integers(0, len(symbols) - length - 1, count)
    found = symbols[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return found[:, :-1], found[:, 1:]


def loss() -> keras.losses.Loss:
    """Cross-entropy of the next symbol."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(model: keras.Model, steps: int, seed: int, rate: float) -> None:
    """Trains on new windows with AdamW, whose rate rises and falls along a cosine."""
    warmup = max(1, steps // 20)
    rates = keras.optimizers.schedules.CosineDecay(
        0.05 * rate, steps - warmup, alpha=0.02, warmup_target=rate, warmup_steps=warmup
    )
    optimizer = keras.optimizers.AdamW(rates, weight_decay=0.02, beta_2=0.98, clipnorm=1.0)
    model.compile(optimizer, loss())
    x, y = windows(text()[0], BATCH * steps, seed)
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)


def trained(seed: int, steps: int) -> keras.Model:
    """The trained model of a seed, from its file if there is one."""
    folder = HERE / "out" / ("quick/language_model" if QUICK else "language_model")
    file = folder / f"{seed}-{steps}.weights.h5"
    keras.utils.set_random_seed(seed)
    model = network()
    if file.exists():
        model.load_weights(file)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        fit(model, steps, seed, 5e-3)
        plain = keras.models.clone_model(model)
        plain.set_weights(model.get_weights())
        plain.save_weights(file)
    return model


def perplexity(model: keras.Model, count: int = 256) -> float:
    """The loss of the next symbol, on windows of modules that no training has seen."""
    model.compile(loss=loss())
    x, y = windows(text()[1], count, 1)
    return math.exp(model.evaluate(x, y, batch_size=64, verbose=0))
