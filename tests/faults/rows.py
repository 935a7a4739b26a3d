"""Data of every wrong kind, in every function that takes data: a clear refusal, or a right result.

A refusal is a ValueError of one line without escape codes. A result has finite kernels.
"""

import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho import _data
from keras_sparse_ortho.recovery import distill
from tests.faults.counting import Count, timed

SLOW = 60.0  # seconds of one case, on a machine that is busy
ROWS, WIDTH = 48, 8
L = keras.layers


def network() -> keras.Model:
    """A small trained-like network with batch normalization, compiled."""
    layers = [
        L.Dense(12, "relu", name="a"),
        L.BatchNormalization(),
        L.Dense(3, name="b"),
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def rigl(model: keras.Model, data: Any) -> keras.Model:
    """Updates on these data, from the second step on."""
    sparse = kso.sparsify(model, 0.5, seed=0, include="a")
    sparse.compile("sgd", model.loss)
    callback = kso.callbacks.RigL(data, batch_size=32, frequency=1, end_step=9)
    x = np.zeros((96, WIDTH), "float32")
    sparse.fit(x, np.zeros(96), verbose=0, callbacks=[callback])
    return sparse


def distilled(model: keras.Model, data: Any) -> keras.Model:
    """A pruned model that learnt from these data for one epoch."""
    student = kso.prune(model, 0.5)
    distill(student, model, data, epochs=1, verbose=0)
    return student


def shrunk(model: keras.Model, data: Any) -> None:
    """Only the door of `shrink`: its last check comes before any file is made."""
    kso.shrink(
        model,
        data,
        Path("/tmp/never.tflite"),
        minutes=0,
        metric=_refusing,
        verbose=False,
    )


def _refusing(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    return -np.ones(len(want))


def _mask() -> np.ndarray:
    return np.arange(WIDTH * 12).reshape(WIDTH, 12) % 2 == 0


USES: dict[str, Callable[[Any, Any], Any]] = {
    "obs": lambda model, data: kso.prune(model, 0.5, score="obs", data=data),
    "wanda": lambda model, data: kso.prune(
        model, 0.5, score="wanda", data=data
    ),
    "refit": lambda model, data: kso.prune(model, 0.5, data=data),
    "apply_masks": lambda model, data: kso.apply_masks(
        model, {"a": _mask()}, data=data
    ),
    "sensitivity": lambda model, data: kso.sensitivity(
        model, data, densities=(0.5,)
    ),
    "statistics": lambda model, data: kso.restore_statistics(
        model, data, reference=model
    ),
    "snip": lambda model, data: kso.prune(model, 0.5, score="snip", data=data),
    "grasp": lambda model, data: kso.prune(
        model, 0.5, score="grasp", data=data
    ),
    "report": lambda model, data: kso.report(model, sample=data),
    "rigl": rigl,
    "distill": distilled,
    "shrink": shrunk,
}


def wrong_data(rng: random.Random) -> dict[str, Any]:
    """Data that are wrong or doubtful, with the place drawn."""
    generator = np.random.default_rng(rng.randrange(2**31))
    x = generator.normal(size=(ROWS, WIDTH)).astype("float32")
    y = generator.integers(0, 3, ROWS)

    def changed(value: float) -> np.ndarray:
        rows = x.copy()
        rows[rng.randrange(ROWS), rng.randrange(WIDTH)] = value
        return rows

    def endless() -> Iterator[Any]:
        while True:
            yield x, y

    labels = y.astype("float32")
    labels[rng.randrange(ROWS)] = np.nan
    return {
        "nan": (changed(np.nan), y),
        "infinity": (changed(np.inf), y),
        "minus infinity": (changed(-np.inf), y),
        "constant": (np.full_like(x, rng.random()), y),
        "narrow": (x[:, :5], y),
        "rank 1": (x[:, 0], y),
        "rank 3": (x[:, :, None, None], y),
        "text": (np.full((ROWS, WIDTH), "a"), y),
        "objects": (np.full((ROWS, WIDTH), None), y),
        "complex": (x.astype("complex64"), y),
        "two inputs": ([x, x], y),
        "another name": ({"other": x}, y),
        "labels of text": (x, np.full(ROWS, "cat")),
        "labels that are not finite": (x, labels),
        "fewer labels": (x, y[:-1]),
        "weights that are not finite": (x, y, np.full(ROWS, np.nan)),
        "nothing": [],
        "no rows": (x[:0], y[:0]),
        "lists of lists": [[1.0, 2.0]],
        "one number": 3,
        "a name of a file": "rows.npy",
        "batches of other widths": [(x, y), (x[:, :5], y)],
        "nan in a later batch": [(x, y), (changed(np.nan), y)],
        "an endless function": endless,
    }


def run(share: float, seed: random.Random) -> list[Count]:
    """Every kind of data in every function, or a share of the pairs."""
    _data.MOST_ROWS = 2000  # of endless data
    data = wrong_data(seed)
    pairs = [(use, kind) for use in USES for kind in data]
    chosen = seed.sample(pairs, max(len(USES), round(share * len(pairs))))
    refused = 0
    with timed("rows of wrong kinds") as count:
        for use, kind in chosen:
            answer = _answer(use, data[kind])
            count.runs += 1
            refused += answer == "refused"
            count.wrong += answer.startswith("wrong")
            count.foreign += answer.startswith("raw")
            count.hangs += answer.startswith("slow")
            if answer.startswith(("wrong", "raw", "slow")):
                print(f"rows, {use}, {kind}: {answer}", flush=True)
        count.notes.append(f"{refused} refused, {count.runs - refused} taken")
    return [count]


def _answer(use: str, data: Any) -> str:
    """How a function ended: "refused", "taken", or what is wrong with that."""
    keras.utils.set_random_seed(0)
    model = network()
    before = [np.array(value) for value in model.get_weights()]
    start = time.monotonic()
    answer = "taken"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = USES[use](model, data)
        if isinstance(result, keras.Model) and not _is_finite(result):
            answer = "wrong: weights that are not finite"
    except ValueError as error:
        text = str(error)
        is_clear = (
            "Received: " in text and "\x1b" not in text and "\n" not in text
        )
        answer = "refused" if is_clear else f"raw: {text!r:.300}"
    except Exception as error:
        answer = f"raw: {type(error).__name__}: {error!s:.300}"
    after = model.get_weights()
    if not all(
        np.array_equal(a, b) for a, b in zip(before, after, strict=True)
    ):
        answer = "wrong: the given model has changed"
    return "slow" if time.monotonic() - start > SLOW else answer


def _is_finite(model: keras.Model) -> bool:
    return all(np.isfinite(value).all() for value in model.get_weights())
