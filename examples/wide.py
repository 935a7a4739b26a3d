"""Train a sparse network under a memory limit in which the dense one does not fit.

    python examples/wide.py                                  # 2 x 16384^2 at 5%, in 2 GiB
    KERAS_BACKEND=jax python examples/wide.py --limit 1500
    python examples/wide.py --width 8192 --epochs 1

Two processes get the same limit (`resource.setrlimit`, libraries included) and train the same wide
MLP on scikit-learn's digits: one on live blocks, drawn exactly orthogonal without making the
dense kernels; one dense, which should run out of memory and whose error is shown.

Linux only: other systems do not count mapped memory (`RLIMIT_DATA`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # errors only

MIB = 2**20
BATCH = 64


def limit_memory(mib: int) -> None:
    """Limits the memory of this process: heap and private mappings."""
    # RLIMIT_AS would count libraries and address space that is reserved and never used, 3 GiB
    # with TensorFlow.
    resource.setrlimit(resource.RLIMIT_DATA, (mib * MIB, mib * MIB))


def train(form: str, options: argparse.Namespace) -> dict[str, float]:
    """Trains one form in this process, and returns its figures."""
    import quiet  # noqa: F401 - before Keras: no start-up messages of TensorFlow

    # isort: split
    import keras
    from data import load
    from rich.console import Console
    from rich.progress import Progress

    from keras_sparse_ortho.layers import BlockSparseDense

    data = load("digits")
    keras.utils.set_random_seed(options.seed)

    def hidden(k: int) -> keras.layers.Layer:
        settings = {"activation": "relu", "name": f"hidden_{k}"}
        if form == "dense":
            return keras.layers.Dense(options.width, **settings)
        own = {
            "density": options.density,
            "block": options.block,
            "seed": options.seed + k,
        }
        return BlockSparseDense(options.width, **own, **settings)

    model = keras.Sequential(
        [
            keras.Input(data.x_train.shape[1:]),
            keras.layers.Flatten(),
            keras.layers.Dense(options.width, activation="relu", name="first"),
            *(hidden(k) for k in range(options.depth)),
            keras.layers.Dense(data.classes, name="head"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(3e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=keras.backend.backend()
        != "torch",  # XLA; torch needs a C++ compiler
    )
    # Now, and not within the first step, where a backend that gets no memory may end the process.
    model.optimizer.build(model.trainable_variables)
    console = Console(stderr=True)
    with Progress(console=console) as progress:
        bar = progress.add_task(f"{form:<6}", total=options.epochs)
        move = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: progress.advance(bar)
        )
        start = time.perf_counter()
        rows = {"batch_size": BATCH, "epochs": options.epochs, "verbose": 0}
        model.fit(data.x_train, data.y_train, callbacks=[move], **rows)
        seconds = time.perf_counter() - start
    _, accuracy = model.evaluate(
        data.x_test, data.y_test, batch_size=BATCH, verbose=0
    )
    return {
        "accuracy": float(accuracy),
        "seconds": seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_child(
    form: str, options: argparse.Namespace
) -> tuple[dict[str, float] | None, str]:
    """Trains one form in a subprocess under the limit: its figures, or why it ended."""
    command = [sys.executable, "-X", "faulthandler", __file__, "--form", form]
    for name in (
        "limit",
        "width",
        "depth",
        "density",
        "block",
        "epochs",
        "seed",
    ):
        command += [f"--{name}", str(getattr(options, name))]
    # The bar of the dense twin, and the traces that it ends with, are not shown.
    errors = subprocess.PIPE if form == "dense" else None
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=errors, text=True
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0:
        return json.loads(lines[-1]), ""
    if done.returncode < 0:
        # Some kernels of TensorFlow do not check what they were given: the signal, and where.
        frames = [
            line
            for line in (done.stderr or "").splitlines()
            if line.startswith("  File ")
        ]
        name = signal.Signals(-done.returncode).name
        return None, " at".join(
            [name, *(frame.removeprefix("  File") for frame in frames[:1])]
        )
    return None, lines[-1] if lines else f"exit status {done.returncode}"


def state_mib(options: argparse.Namespace, density: float) -> float:
    """Weights, Adam's two moments and gradients, float32, of the hidden kernels."""
    return 4 * 4 * options.depth * options.width**2 * density / MIB


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--limit", type=int, default=2048, help="MiB for each process"
    )
    parser.add_argument(
        "--width", type=int, default=16384, help="units of a hidden layer"
    )
    parser.add_argument(
        "--depth", type=int, default=2, help="kernels of width x width"
    )
    parser.add_argument(
        "--density", type=float, default=0.05, help="live fraction"
    )
    parser.add_argument("--block", type=int, default=64, help="side of a block")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--form", choices=["blocks", "dense"], help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.form:
        limit_memory(options.limit)
        try:
            print(json.dumps(train(options.form, options)))
        except Exception as error:  # each backend has its own for memory
            first = str(error).strip().splitlines()
            print(
                f"{type(error).__name__}: {first[0] if first else 'without a message'}"
            )
            return 1
        return 0

    print(
        f"Hidden kernels, {options.depth} of {options.width} x {options.width}: weights, gradients "
        f"and Adam's moments are {state_mib(options, 1):,.0f} MiB dense, "
        f"{state_mib(options, options.density):,.0f} MiB at density {options.density:g}. "
        f"Each process may have {options.limit:,} MiB, libraries included.",
        flush=True,
    )
    figures, reason = in_child("blocks", options)
    if figures is None:
        print(f"blocks: ended with {reason}")
        return 1
    print(
        f"blocks: epochs {options.epochs}, {figures['seconds']:.0f} s, test accuracy "
        f"{figures['accuracy']:.2%}, peak resident memory {figures['peak_mib']:,.0f} MiB",
        flush=True,
    )
    figures, reason = in_child("dense", options)
    if figures is not None:
        print("dense:  fits as well; use a larger --width, or a lower --limit")
        return 1
    print(f"dense:  ended with {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
