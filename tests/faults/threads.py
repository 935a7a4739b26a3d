"""Threads that share a model, interrupts at any moment, and what is frozen and unfrozen later."""

import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho.recovery import distill
from tests.faults.counting import Count, timed

L = keras.layers
ROWS = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
BLOCKS = kso.Block(4, 4, regular=True)


def network() -> keras.Model:
    layers = [
        L.Dense(8, "relu", name="a"),
        L.LayerNormalization(),
        L.Dense(8, name="b"),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(loss="mse")
    return model


def weights(model: keras.Model) -> list[np.ndarray]:
    return [np.array(weight) for weight in model.get_weights()]


CALLS: dict[str, Callable[[Any], Any]] = {
    "report": lambda model: kso.report(model).flops,
    "sparsify": lambda model: weights(kso.sparsify(model, 0.5, seed=0)),
    "obs": lambda model: weights(kso.prune(model, 0.5, score="obs", data=ROWS)),
    "synflow": lambda model: weights(kso.prune(model, 0.5, score="synflow")),
    "grasp": lambda model: kso.saliency.grasp(model, 0.5, (ROWS, ROWS)).masks,
    "quantize_aware": lambda model: weights(kso.quantize_aware(model)),
    "predict": lambda model: keras.ops.convert_to_numpy(model(ROWS)),
}

MADE: dict[str, Callable[[Any], Any]] = {
    "sparsify": lambda model: kso.sparsify(model, 0.5),
    "compact": lambda model: kso.prune(model, 0.5, storage="compact"),
    "blocks": lambda model: kso.sparsify(
        model, 0.5, storage="blocks", structure=BLOCKS
    ),
    "strip": lambda model: kso.strip(kso.prune(model, 0.5, storage="compact")),
    "low rank": lambda model: kso.parametrize(
        model, kso.parametrizations.LowRankSoftThreshold(), include=["a/kernel"]
    ),
    "quantize_aware": kso.quantize_aware,
}


def equal(one: Any, other: Any) -> bool:
    pairs = zip(keras.tree.flatten(one), keras.tree.flatten(other), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def is_clean(model: keras.Model) -> bool:
    """Whether no hook has stayed on a layer."""
    return not any("call" in vars(layer) for layer in model._flatten_layers())


def together(share: float) -> Count:
    """Each pair of calls at once, on one model: each gives what it gives alone."""
    model = network()
    alone = {name: call(model) for name, call in CALLS.items()}
    with timed("pairs of calls in two threads") as count:
        for pair in itertools.combinations_with_replacement(CALLS, 2):

            def work(name: str) -> None:
                for _ in range(max(1, round(5 * share))):
                    count.runs += 1
                    try:
                        count.wrong += not equal(
                            CALLS[name](model), alone[name]
                        )
                    except Exception as error:
                        count.foreign += 1
                        count.notes.append(f"{name}: {error!r:.80}")

            threads = [
                threading.Thread(target=work, args=(name,)) for name in pair
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            count.wrong += not is_clean(model)
    return count


def interrupted(rng: random.Random, share: float) -> Count:
    """SIGINT at a random moment: the model is as it was, and nothing stays on its layers."""
    dense = network()
    student = kso.parametrize(
        dense, kso.MagnitudeMask(kso.schedules.Cubic(0.5))
    )
    calls = {
        **CALLS,
        "distill": lambda model: distill(student, model, ROWS, verbose=0),
    }
    seconds = {}
    for name, call in calls.items():
        start = time.monotonic()
        call(dense)
        seconds[name] = time.monotonic() - start
    ends = 0
    calling = threading.Event()

    def interrupt(*_: Any) -> None:
        # A signal that comes late does not belong to the call.
        if calling.is_set():
            raise KeyboardInterrupt

    with timed("interrupts") as count:
        for name, call in calls.items():
            for _ in range(max(1, round(20 * share))):
                count.runs += 1
                before = [weights(dense), weights(student)]
                signal.signal(signal.SIGALRM, interrupt)
                done = False
                calling.set()
                try:
                    signal.setitimer(
                        signal.ITIMER_REAL,
                        max(1e-4, rng.random() * seconds[name]),
                    )
                    call(dense)
                    calling.clear()
                    done = True
                except KeyboardInterrupt:
                    ends += 1
                finally:
                    calling.clear()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                same = equal(before[0], weights(dense))
                if not (done and name == "distill"):
                    same = same and equal(before[1], weights(student))
                count.lost += not same
                count.wrong += not (is_clean(dense) and is_clean(student))
    count.notes.append(f"{ends} came before the end")
    return count


def unfrozen() -> Count:
    """Frozen, made into another model, unfrozen: one step moves all that trains otherwise."""

    def moved(frozen: bool, make: Callable[[Any], Any]) -> list[bool]:
        keras.utils.set_random_seed(0)
        dense = network()
        dense.trainable = not frozen
        model = make(dense)
        model.trainable = True
        model.compile(keras.optimizers.SGD(0.5), "mse")
        before = weights(model)
        model.train_on_batch(ROWS, ROWS)
        return [
            not np.array_equal(x, y)
            for x, y in zip(before, weights(model), strict=True)
        ]

    with timed("frozen, then unfrozen") as count:
        for make in MADE.values():
            count.runs += 1
            count.wrong += moved(True, make) != moved(False, make)
    return count


def run(rng: random.Random, share: float) -> list[Count]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        return [together(share), interrupted(rng, share), unfrozen()]
    finally:
        sys.setswitchinterval(before)
