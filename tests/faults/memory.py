"""Threads in one file, and memory over many cycles."""

import concurrent.futures
import gc
from pathlib import Path

import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import export_litert, load_litert
from tests.faults.counting import Count, status_of, timed

GROWTH = 30.0  # MiB over the second half of the cycles


def threads(folder: Path, share: float) -> Count:
    """One `LiteRTModel` in eight threads, and one in each of eight."""
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8)])
    path = folder / "m.tflite"
    export_litert(model, path)
    x = np.random.default_rng(0).normal(size=(8, 20, 16)).astype("float32")
    with timed("eight threads") as count:
        for shared in (True, False):
            files = (
                [load_litert(path)] * 8
                if shared
                else [load_litert(path) for _ in range(8)]
            )
            want = [files[0].predict(part) for part in x]

            def work(k: int, files: list = files, want: list = want) -> None:
                for _ in range(max(10, round(100 * share))):
                    count.runs += 1
                    try:
                        if not np.array_equal(files[k].predict(x[k]), want[k]):
                            count.wrong += 1
                    except Exception:
                        count.foreign += 1

            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                list(pool.map(work, range(8)))
    return count


def cycles(folder: Path, share: float) -> list[Count]:
    """What memory is in use must not grow."""
    layers = keras.layers
    dense = keras.Sequential(
        [keras.Input((64,)), layers.Dense(64), layers.Dense(8)]
    )
    x = np.ones((3, 16), "float32")
    rng = np.random.default_rng(0)
    rows, targets = rng.normal(size=(64, 64)), rng.normal(size=(64, 8))

    def transform(k: int) -> None:
        kso.report(kso.strip(kso.sparsify(dense, 0.2, seed=k)))

    def save(k: int) -> None:
        path = folder / "m.keras"
        kso.sparsify(dense, 0.2, seed=k).save(path)
        keras.saving.load_model(path)

    def train(k: int) -> None:
        model = kso.sparsify(dense, 0.2, seed=k)
        model.compile("sgd", "mse", jit_compile=False)
        used = [kso.callbacks.SET(frequency=2, end_step=8)]
        model.fit(rows, targets, batch_size=16, verbose=0, callbacks=used)

    def predict(k: int) -> None:
        load_litert(folder / "m.tflite").predict(x)

    counts = []
    for part, work in {
        "sparsify, strip and report": transform,
        "save and load": save,
        "fit": train,
        "load_litert and predict": predict,
    }.items():
        with timed(f"memory: {part}") as count:
            number = max(20, round(500 * share))
            seen = []
            for k in range(number):
                work(k)
                count.runs += 1
                if k + 1 in (number // 2, number):
                    gc.collect()
                    seen.append(status_of("VmRSS") / 2**20)
            count.notes.append(f"{seen[0]:.1f}, then {seen[1]:.1f} MiB")
            if seen[1] - seen[0] > GROWTH:
                count.wrong += 1
        counts.append(count)
    return counts


def run(folder: Path, share: float) -> list[Count]:
    """All of them."""
    folder.mkdir(parents=True)
    return [threads(folder, share), *cycles(folder, share)]
