"""Convolutions on live blocks: blocks of channels with all their taps, or blocks of single taps.

    KERAS_BACKEND=jax python benchmarks/bench_taps.py [--rounds 9]

A 3x3 convolution and its gradients, compiled by XLA: dense; `BlockSparseConv2D`, whose blocks have
all nine taps of their channels; and one product over blocks of channels under single taps: for each
block of outputs the images, shifted by its taps, are gathered, and multiplied at once.
Each run is a line of `results/taps.jsonl`; `results/taps.md` has the medians.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import ops
from record import RESULTS, append, finished, markdown, parsed, write
from timing import wall_and_cpu

import keras_sparse_ortho as kso

LINES = RESULTS / "taps.jsonl"
SIZES = ["14-256-16-32", "28-128-16-16", "28-128-16-32", "7-512-32-32"]


class BlocksOfTaps(keras.layers.Layer):
    """A 3x3 convolution of live blocks `(tap, block of inputs) -> block of outputs`.

    `y[o] = sum_k shift(x, tap[o, k])[input[o, k]] W[o, k]`, with as many `k` for every block `o`.
    """

    def __init__(self, channels: int, block: int, density: float, seed: int = 0) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.block, blocks = block, channels // block
        count = round(9 * blocks * density)
        pairs = np.stack([rng.permutation(9 * blocks)[:count] for _ in range(blocks)])
        self.pairs = np.sort(pairs, axis=1)
        self.values = self.add_weight(
            shape=(blocks, count * block, block), initializer="glorot_uniform"
        )

    def call(self, x):
        """A product for each block of outputs."""
        _, height, width, channels = x.shape
        padded = ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        outputs = []
        for pairs, values in zip(self.pairs, ops.unstack(1 * self.values), strict=True):
            parts = []
            for pair in pairs:
                tap, part = divmod(int(pair), channels // self.block)
                (row, column), first = divmod(tap, 3), part * self.block
                shifted = padded[:, row : row + height, column : column + width]
                parts.append(shifted[..., first : first + self.block])
            outputs.append(ops.matmul(ops.concatenate(parts, axis=-1), values))
        return ops.concatenate(outputs, axis=-1)


def stepper(layer: keras.layers.Layer, x: np.ndarray):
    """A compiled call with the gradients of the inputs and weights."""
    layer(x[:1])
    weights = [w.value for w in layer.trainable_weights]
    if keras.backend.backend() == "jax":
        import jax

        fixed = [w.value for w in layer.non_trainable_weights]

        def loss(weights, x):
            return ops.sum(layer.stateless_call(weights, fixed, x)[0] ** 2)

        step = jax.jit(jax.grad(loss, argnums=(0, 1)))
        return lambda: jax.block_until_ready(step(weights, x))
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(layer(x) ** 2)
        return tape.gradient(total, [x, *[w.value for w in layer.trainable_weights]])

    given = tf.constant(x)
    return lambda: [g.numpy() for g in step(given)]


def measure(given: argparse.Namespace) -> None:
    """Appends the times of the three, measured in turns, for each size."""
    rng = np.random.default_rng(0)
    for side, channels, batch, block in given.sizes:
        x = rng.normal(size=(batch, side, side, channels)).astype("float32")
        density = max(given.density, 2 * block / channels)
        common = {"kernel_size": 3, "padding": "same", "use_bias": False}
        layers = {
            "dense": keras.layers.Conv2D(channels, **common),
            "blocks of channels": kso.layers.BlockSparseConv2D(
                channels, density=density, block=block, seed=0, **common
            ),
            "blocks of taps": BlocksOfTaps(channels, block, density),
        }
        steps = {name: stepper(layer, x) for name, layer in layers.items()}
        times = wall_and_cpu(steps, given.rounds, warm_up=2)
        for name, (wall, cpu) in times.items():
            run = {"side": side, "channels": channels, "batch": batch, "block": block}
            run |= {"density": density, "layer": name, "wall": wall, "cpu": cpu}
            run |= {"wall_ratio": wall / times["dense"][0], "cpu_ratio": cpu / times["dense"][1]}
            append(LINES, run | {"backend": keras.backend.backend()})
            print(run, flush=True)


def summarize() -> None:
    """Writes the table of the latest lines."""
    keys = ("backend", "side", "channels", "batch", "block", "layer")
    latest = {tuple(run[key] for key in keys): run for run in finished(LINES)}
    rows = []
    for key, run in latest.items():
        backend, side, channels, batch, block, layer = key
        size = f"{side} x {side} x {channels}, batch {batch}"
        times = [f"{1000 * run[clock]:.1f}" for clock in ("wall", "cpu")]
        ratios = [f"{run[f'{clock}_ratio']:.2f}" for clock in ("wall", "cpu")]
        rows.append([backend, size, str(block), f"{run['density']:.4g}", layer, *times, *ratios])
    header = ["backend", "images", "block", "density", "layer", "step [ms]", "cores [ms]"]
    text = "# Blocks of channels, blocks of single taps\n\n"
    text += (
        "A 3x3 convolution and its gradients, compiled by XLA, medians of interleaved calls; "
        "`cores` is the time that all cores have worked; ratios to dense.\n\n"
    )
    write("taps", text + markdown([*header, "ratio", "ratio of cores"], rows), [0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=SIZES, help="side-channels-batch-block")
    parser.add_argument("--density", type=float, default=0.1, help="or two blocks of each row")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--summary", action="store_true", help="only write the table")
    given = parsed(parser, quick={"sizes": ["4-32-2-8"], "rounds": 2})
    given.sizes = [tuple(int(part) for part in one.split("-")) for one in given.sizes]
    if not given.summary:
        measure(given)
    summarize()


if __name__ == "__main__":
    main()
