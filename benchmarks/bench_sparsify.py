"""Time and memory of making a model sparse, against those of cloning it.

    KERAS_BACKEND=tensorflow python benchmarks/bench_sparsify.py
    KERAS_BACKEND=jax        python benchmarks/bench_sparsify.py --rounds 5

Appends a line for each model to `results/sparsify.jsonl` and writes `results/sparsify.md` from all
of them, the last of each kind. Every model has a process of its own, in which
`keras.models.clone_model(model)`, `sparsify(model, 0.1)`, the drawing of the kernels alone, and
`strip` of the sparse model run in turn; medians. CPU time (`process_time`, all cores) is given
beside wall-clock time, which other work on the machine disturbs. Another process measures the
largest resident set during one `sparsify`, minus that before; it includes the new model's weights
and masks.
"""

import argparse
import gc
import json
import os
import pathlib
import resource
import subprocess
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import timing

DENSITY = 0.1
NAMES = ("ResNet-50", "ConvNeXtTiny", "transformer")
SMALL = "small transformer"
STEPS = ("clone", "sparsify", "draws", "strip")


def transformer(layers: int = 14, width: int = 768, vocabulary: int = 2000) -> object:
    """Pre-norm blocks of attention and a feed-forward part: 100 million weights."""
    import keras

    x = ids = keras.Input((64,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width, name="tokens")(x)
    for k in range(layers):
        y = keras.layers.LayerNormalization(name=f"norm_{k}")(x)
        y = keras.layers.MultiHeadAttention(12, width // 12, name=f"attention_{k}")(y, y)
        x = keras.layers.Add(name=f"attended_{k}")([x, y])
        y = keras.layers.LayerNormalization(name=f"second_norm_{k}")(x)
        y = keras.layers.Dense(4 * width, activation="gelu", name=f"wide_{k}")(y)
        y = keras.layers.Dense(width, name=f"narrow_{k}")(y)
        x = keras.layers.Add(name=f"fed_{k}")([x, y])
    return keras.Model(ids, keras.layers.Dense(10, name="head")(x))


def model_of(name: str) -> object:
    import keras

    if name == "transformer":
        return transformer()
    if name == SMALL:
        return transformer(layers=2, width=96, vocabulary=200)
    make = {"ResNet-50": "ResNet50", "ConvNeXtTiny": "ConvNeXtTiny"}[name]
    return getattr(keras.applications, make)(weights=None)


def measure(name: str, rounds: int) -> dict[str, object]:
    """Wall-clock and CPU seconds of each step."""
    import keras

    import keras_sparse_ortho as kso
    from keras_sparse_ortho.pruning import draw_kernels

    model = model_of(name)
    weights = kso.prunable_weights(model)
    sparse = kso.sparsify(model, DENSITY, seed=0)
    cases = {
        "clone": lambda: keras.models.clone_model(model),
        "sparsify": lambda: kso.sparsify(model, DENSITY, seed=0),
        "draws": lambda: draw_kernels(model, weights, DENSITY, "erk", "exact_orthogonal", seed=0),
        "strip": lambda: kso.strip(sparse),
    }
    found = timing.wall_and_cpu(cases, rounds)
    return {
        "weights": int(sum(weight.size for weight in weights)),
        "matrices": len(weights),
        "wall": {step: wall for step, (wall, _) in found.items()},
        "cpu": {step: cpu for step, (_, cpu) in found.items()},
    }


def peak() -> float:
    """The largest resident set of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def resident() -> float:
    """Resident memory now, in MiB."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def memory(name: str) -> dict[str, float]:
    """The largest resident set during one `sparsify`, minus that before it, in MiB."""
    import keras_sparse_ortho as kso

    small = kso.sparsify(model_small(), 0.5, seed=0)  # what is loaded and compiled once
    model = model_of(name)
    del small
    gc.collect()
    before = max(resident(), peak())
    sparse = kso.sparsify(model, DENSITY, seed=0)
    found = {"peak": peak() - before}
    found["model"] = (
        sum(v.value.nbytes if hasattr(v.value, "nbytes") else 0 for v in sparse.weights) / 2**20
    )
    return found


def model_small() -> object:
    import keras

    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(8)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=NAMES, choices=(*NAMES, SMALL))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", choices=("time", "memory"), help="for a process of its own")
    arguments = timing.parsed(parser, {"models": (SMALL,), "rounds": 2})
    if arguments.one:
        [name] = arguments.models
        found = measure(name, arguments.rounds) if arguments.one == "time" else memory(name)
        print(json.dumps(found))
        return
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    lines = timing.RESULTS / "sparsify.jsonl"
    for name in arguments.models:
        line: dict[str, object] = {"model": name, "backend": backend, "rounds": arguments.rounds}
        for one in ("time", "memory"):
            command = [sys.executable, __file__, "--one", one, "--models", name]
            command += ["--rounds", str(arguments.rounds)]
            result = subprocess.run(command, check=True, capture_output=True, text=True)
            line |= {one: json.loads(result.stdout.splitlines()[-1])}
        line |= {"load": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d")}
        timing.append(lines, line)
        write(lines)


def write(lines: pathlib.Path) -> None:
    """The table of the last line of each kind."""
    kept = {}
    for line in timing.finished(lines):
        kept[line["model"], line["backend"]] = line
    rows = []
    for (name, backend), line in sorted(kept.items()):
        figures = line["time"]
        cpu, wall, used = figures["cpu"], figures["wall"], line["memory"]
        rows.append(
            [
                name,
                backend,
                f"{figures['weights'] / 1e6:.1f}",
                *(f"{cpu[step]:.2f}" for step in STEPS),
                f"{cpu['sparsify'] / cpu['clone']:.1f}",
                f"{wall['sparsify'] / wall['clone']:.1f}",
                f"{used['peak']:.0f}",
                f"{used['peak'] / (figures['weights'] * 4 / 2**20):.2f}",
                f"{line['load']:.0f}",
            ]
        )
    header = ["model", "backend", "million weights", *(f"{step}, s" for step in STEPS)]
    header += ["sparsify / clone", "by the clock", "peak, MiB", "in copies", "load"]
    text = (
        "# What making a model sparse takes\n\n"
        "`benchmarks/bench_sparsify.py`, density 0.1, exactly orthogonal kernels. Seconds of the\n"
        "processor, medians of interleaved runs; the last column but one is the largest further\n"
        "memory during `sparsify` in copies of the float32 kernels: one is the new model's, a\n"
        f"quarter its masks. `load`: of the machine, afterwards. {timing.machine()}.\n\n"
    )
    timing.write("sparsify", text + timing.markdown(header, rows))


if __name__ == "__main__":
    main()
