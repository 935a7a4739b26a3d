"""Compile time and step time over depth: in a `ScannedStack`, and layer by layer.

    KERAS_BACKEND=jax        python benchmarks/depth.py
    KERAS_BACKEND=tensorflow python benchmarks/depth.py --depths 10 100
    KERAS_BACKEND=torch      python benchmarks/depth.py
    KERAS_BACKEND=tensorflow python benchmarks/depth.py --kinds convolutions --depths 100 300

The network of `thousand_mlp` in deep.toml: layers of 128 units, tanh, density 0.125, fixed masks,
SGD with momentum, batch 128, by `fit`; or that of `circular_cnn`, a stack of convolutions, without
XLA where its settings say so. Compile time is the difference between the first call of `fit` and
the median one: tracing, lowering, XLA. Layer by layer goes up to `--in-a-row` layers. Each network
is built and compiled alone; after that all train in turn. A line for each goes to
`results/depth.jsonl`; `results/depth.md` shows the last of each kind.
"""

import argparse
import os
import pathlib
import time
import tomllib
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from networks import deep_mlp, stacked_cnn, stacked_mlp
from record import finished
from timing import RESULTS, append, interleaved, machine, markdown, parsed, write

import keras_sparse_ortho as kso

SETTINGS = tomllib.loads((pathlib.Path(__file__).parent / "deep.toml").read_text())
NETWORKS = {
    "stack": ("thousand_mlp", stacked_mlp),
    "layers": ("thousand_mlp", deep_mlp),
    "convolutions": ("circular_cnn", stacked_cnn),
}


def xla(kind: str) -> bool:
    """Whether XLA compiles it, on TensorFlow."""
    return SETTINGS[NETWORKS[kind][0]].get("jit", True)


def network(kind: str, depth: int) -> keras.Model:
    """Sparse and compiled."""
    net, make = NETWORKS[kind]
    dense = make((28, 28, 1), 10, SETTINGS[net] | {"depth": depth})
    model = kso.sparsify(dense, 0.125, "uniform", "random_sparse", seed=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    model.compile(optimizer, loss, jit_compile="auto" if xla(kind) else False)
    return model


def measure(
    kinds: list[str], depths: list[int], in_a_row: int, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each network."""
    batch = SETTINGS["thousand_mlp"]["batch_size"]
    x = np.random.default_rng(0).normal(size=(steps * batch, 28, 28, 1)).astype("float32")
    y = np.zeros(len(x))
    first, cases = {}, {}
    for depth in depths:
        for kind in kinds:
            if kind == "layers" and depth > in_a_row:
                continue
            model = network(kind, depth)

            def train(model: keras.Model = model) -> None:
                model.fit(x, y, batch_size=batch, verbose=0)

            start = time.perf_counter()
            train()
            first[kind, depth] = time.perf_counter() - start
            cases[kind, depth] = train
            print(kind, depth, f"first {first[kind, depth]:.1f} s", flush=True)
    names = {f"{kind} {depth}": (kind, depth) for kind, depth in cases}
    medians = interleaved({name: cases[key] for name, key in names.items()}, rounds)
    found = []
    for name, (kind, depth) in names.items():
        compiling = first[kind, depth] - medians[name]
        row = {"kind": kind, "depth": depth, "compiling": compiling}
        found.append(row | {"step": medians[name] / steps})
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The last row of each kind."""
    last = {(row["backend"], row["depth"], row["kind"]): row for row in rows}
    header = ["backend", "depth", "kind", "compiling [s]", "step [ms]", "step / depth [ms]"]
    cells = [
        [
            backend,
            str(depth),
            kind,
            f"{row['compiling']:.1f}",
            f"{1e3 * row['step']:.1f}",
            f"{1e3 * row['step'] / depth:.2f}",
        ]
        for (backend, depth, kind), row in sorted(last.items())
    ]
    return markdown(header, cells)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=NETWORKS, default=["stack", "layers"])
    parser.add_argument("--depths", nargs="+", type=int, default=[10, 100, 1000])
    parser.add_argument("--in-a-row", type=int, default=100)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    quick = {"depths": [4, 16], "in_a_row": 16, "steps": 2, "rounds": 1}
    given = parsed(parser, quick)
    lines = RESULTS / "depth.jsonl"
    backend = keras.backend.backend()
    for row in measure(given.kinds, given.depths, given.in_a_row, given.steps, given.rounds):
        compiled = backend == "tensorflow" and xla(row["kind"])
        append(lines, row | {"backend": backend + " XLA" * compiled})
    rows = finished(lines)
    text = "# Depth: compiling and a step of training\n\n"
    text += f"{machine()}, Keras {keras.__version__}. An MLP of so many layers of 128 units, tanh, "
    text += "density 0.125 in fixed masks, SGD with momentum, batch 128. `stack`: a ScannedStack, "
    text += "`layers`: the same layers in a row; `convolutions`: a stack of circular 3x3 ones, 16 "
    text += "channels on 4 x 4 pixels. Compiling is what the first call of `fit` takes longer than "
    text += "the median one; steps are medians of interleaved calls by the clock.\n\n"
    write("depth", text + table(rows))


if __name__ == "__main__":
    main()
