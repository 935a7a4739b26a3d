"""What the recipes share: data, a model for each method, processes, and the comparison.

Each recipe trains the same models in several ways: the first way is one process with one device,
and the others must end with the same masks and weights. `main` starts the processes on this
machine, with a time limit, and compares what they have saved.

The recipe sets `KERAS_BACKEND` before it imports this.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

METHODS = ("fixed", "str", "gmp", "dnw", "rigl", "set", "compact", "blocks")
FEATURES, HIDDEN, CLASSES = 64, 96, 8
BATCH, BATCHES, EPOCHS = 64, 8, 4
# Between a run on one device and on several, which sum in another order.
TOLERANCE = 1e-4


# --- data and models ------------------------------------------------------------------------------


def data() -> tuple[np.ndarray, np.ndarray]:
    """Samples in training order."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * BATCHES, FEATURES)).astype("float32")
    return x, (x @ rng.normal(size=(FEATURES, CLASSES))).argmax(axis=1).astype(
        "int32"
    )


def shard(rank: int, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """A worker's part of each batch, in order."""
    x, y = data()
    rows = np.arange(len(x)).reshape(BATCHES, workers, -1)[:, rank].reshape(-1)
    return x[rows], y[rows]


def extra_batches(
    rank: int, workers: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For RigL: a worker's part of each batch; the gradient is averaged over all parts."""
    x, y = shard(rank, workers)
    return list(zip(np.split(x, BATCHES), np.split(y, BATCHES), strict=True))


def dense_model():
    """The dense network; its variables are `net/hidden/kernel` and so on."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            layers.Dense(HIDDEN, activation="relu", name="hidden"),
            layers.Dense(HIDDEN, activation="relu", name="middle"),
            layers.Dense(CLASSES, name="head"),
        ],
        name="net",
    )


def sparse_model(method: str):
    """The network of a method, compiled. The same seed on every worker."""
    import keras

    import keras_sparse_ortho as kso

    keras.utils.set_random_seed(1)
    dense, steps = (
        dense_model(),
        {"begin_step": 4, "end_step": 24, "frequency": 4},
    )
    if method in ("fixed", "rigl", "set"):
        model = kso.sparsify(dense, 0.1, seed=0)
    elif method == "compact":
        model = kso.sparsify(dense, 0.1, seed=0, storage="compact")
    elif method == "blocks":
        block = kso.Block(8, 8, regular=True)
        model = kso.sparsify(
            dense, 0.25, "uniform", structure=block, exclude="head", seed=0
        )
        model = kso.convert(model, "blocks")
    elif method == "str":
        model = kso.parametrize(dense, kso.SoftThreshold())
    elif method == "gmp":
        model = kso.parametrize(
            dense, kso.MagnitudeMask(kso.schedules.Cubic(0.1, **steps))
        )
    elif method == "dnw":
        model = kso.parametrize(
            dense, kso.parametrizations.StraightThroughTopK(0.1, frequency=4)
        )
    else:
        raise ValueError(f"There are {METHODS}. Received: {method=}")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    jit = keras.backend.backend() == "jax"
    # Not Adam, which divides gradients by their size: where they are 0 up to rounding, which
    # depends on the number of devices, its steps are not.
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9), loss, jit_compile=jit
    )
    return model


def callbacks(method: str, rank: int, workers: int) -> list:
    """The callbacks of a method."""
    import keras_sparse_ortho as kso

    ours = kso.callbacks
    moving = {"frequency": 4, "end_step": 28}
    made = {
        "str": lambda: ours.TargetDensity(0.1, frequency=4),
        "gmp": lambda: ours.UpdateMasks(),
        "dnw": lambda: ours.UpdateMasks(),
        "set": lambda: ours.SET(**moving),
    }
    if method in ("rigl", "compact", "blocks"):
        return [ours.RigL(extra_batches(rank, workers), **moving)]
    return [made[method]()] if method in made else []


def first_epoch(model) -> int:
    """For a custom training loop: above 0 if `BackupAndRestore` has restored a backup."""
    import keras

    return (
        int(keras.ops.convert_to_numpy(model.optimizer.iterations)) // BATCHES
    )


# --- processes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """One way to train: the number of processes, and their environment variables."""

    name: str
    processes: int = 1
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Which process this is, and where the others are."""

    way: str
    rank: int
    processes: int
    ports: list[int]


Train = Callable[[str, Place], object]
"""`train(method, place) -> model`."""


def main(ways: list[Way], train: Train, begin: Callable[[Place], None]) -> None:
    """Starts the processes of all ways to train, and compares each way with the first.

    Args:
        ways: The first is the reference.
        train: Trains a model in one of the processes.
        begin: Called once in every process, before anything is computed.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--methods", nargs="+", default=["rigl"], choices=METHODS
    )
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="time limit of each way"
    )
    parser.add_argument("--place", help="for the processes that this starts")
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.place:
        place = Place(**json.loads(options.place))
        begin(place)
        for method in options.methods:
            model = train(method, place)
            np.savez(
                options.folder / f"{place.way}_{method}_{place.rank}.npz",
                **state(model),
            )
            print(
                f"{place.way}, process {place.rank}: {method} done", flush=True
            )
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for way in ways:
            start(way, options.methods, folder, options.seconds)
        for way in ways[1:]:
            for method in options.methods:
                prove(folder, ways[0], way, method)


def start(way: Way, methods: list[str], folder: Path, seconds: float) -> None:
    """Runs the processes of one way; ends all when one fails or time is up."""
    ports = free_ports(max(2, way.processes))
    environment = {**os.environ, **way.environment}
    running = []
    for rank in range(way.processes):
        place = json.dumps(vars(Place(way.name, rank, way.processes, ports)))
        command = [
            sys.executable,
            sys.argv[0],
            "--place",
            place,
            "--folder",
            str(folder),
        ]
        log = (folder / f"{way.name}_{rank}.log").open("w+")
        running.append(
            (
                subprocess.Popen(
                    [*command, "--methods", *methods],
                    # Sets have another order in each process, as on machines of their own.
                    env={**environment, "PYTHONHASHSEED": str(rank + 1)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                ),
                log,
            )
        )
    end, wrong = time.monotonic() + seconds, None
    while wrong is None and any(
        process.poll() is None for process, _ in running
    ):
        time.sleep(0.1)
        if any(process.poll() for process, _ in running):
            wrong = "a process has failed"
        elif time.monotonic() > end:
            wrong = f"not done after {seconds:.0f} s"
    if wrong is not None or any(process.returncode for process, _ in running):
        time.sleep(5 if wrong else 0)  # for what the others have to say
        for process, _ in running:
            process.kill()
            process.wait()
        for _, log in running:
            log.seek(0)
            print(log.name, log.read()[-4000:], sep="\n")
        raise SystemExit(f"{way.name}: {wrong or 'a process has failed'}")


def free_ports(count: int) -> list[int]:
    """Free ports of this machine."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


# --- the comparison -------------------------------------------------------------------------------


def state(model) -> dict[str, np.ndarray]:
    """Masks and effective weights of all kernels, and the other weights."""
    import keras_sparse_ortho as kso

    found = {}
    for weight in kso.prunable_weights(model):
        own = weight.storage
        value = weight.value
        mask = np.ones(value.shape, bool) if own is None else own.mask_value()
        assert not value[~mask].any(), (
            f"masked entries of {weight.path} are not 0"
        )
        found[f"mask {weight.path}"], found[f"value {weight.path}"] = (
            mask,
            value,
        )
    return found


def prove(folder: Path, one: Way, other: Way, method: str) -> None:
    """Fails unless another way has ended with the masks and weights of the first."""
    expected = np.load(folder / f"{one.name}_{method}_0.npz")
    worst = 0.0
    for rank in range(other.processes):
        found = np.load(folder / f"{other.name}_{method}_{rank}.npz")
        assert set(found) == set(expected), (set(found), set(expected))
        for name in expected:
            if name.startswith("mask"):
                differ = int((found[name] != expected[name]).sum())
                assert differ == 0, (
                    f"{other.name}, {method}: {differ} entries of {name} differ"
                )
            else:
                worst = max(
                    worst, float(np.abs(found[name] - expected[name]).max())
                )
    live = sum(
        int(expected[name].sum())
        for name in expected
        if name.startswith("mask")
    )
    assert worst < TOLERANCE, (
        f"{other.name}, {method}: weights differ by {worst}"
    )
    print(
        f"{method}: {other.name} equals {one.name}: {live} live entries at the same places, "
        f"weights to {worst:.1e}"
    )
