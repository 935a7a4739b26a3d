"""Memory: of training, of making a model sparse, and of large networks.

    python benchmarks/memory.py NAME [options]

The measurements:

- `training`: memory of training: weights, optimizer, file and process, in every storage.
- `sparsify`: time and memory of making a model sparse, against those of cloning it.
- `planning`: memory and traffic of networks of 1 and 10 billion weights, from measured constants.
"""

import argparse
import gc
import json
import math
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from record import (
    HERE,
    RESULTS,
    append,
    chosen,
    described,
    finished,
    machine,
    markdown,
    parsed,
    wall_and_cpu,
    write,
)

# --- training -------------------------------------------------------------------------------------


LAYERS = 4
STEPS = 3
FORMS = ("dense", "masked", "compact", "blocks 32", "blocks 64", "sparsify 32", "any 32", "any 64")
STORED = ("weights", "optimizer", "file")
FIGURES = (*STORED, "peak, built", "peak, trained")


def peak() -> float:
    """The largest resident set of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(form: str, width: int, batch: int, density: float) -> dict[str, float | str]:
    """Builds, trains and saves one form in this process; all figures in MiB."""
    import keras
    import numpy as np
    from blocks import uneven_counts

    import keras_sparse_ortho as kso

    kind, _, size = form.partition(" ")
    masks = {"masked": kso.FixedMask, "compact": kso.parametrizations.CompactMask}

    def layer(k: int) -> keras.layers.Layer:
        if kind in ("blocks", "any"):
            options = {"density": density, "block": int(size), "seed": k}
            if kind == "any":
                options["counts"] = uneven_counts(width, int(size), density, k)
            return kso.layers.BlockSparseDense(width, "relu", name=f"hidden_{k}", **options)
        sparse = kso.initializers.ExactOrthogonal(density, seed=k)
        initializer = sparse if kind in masks else "he_normal"
        dense = keras.layers.Dense(
            width, activation="relu", kernel_initializer=initializer, name=f"hidden_{k}"
        )
        return kso.PrunableLayer(dense, masks[kind]()) if kind in masks else dense

    x = np.random.default_rng(0).normal(size=(STEPS * batch, width)).astype("float32")
    # Keras loads TensorFlow, if there is one, when it first copies or saves a layer.
    keras.saving.serialize_keras_object(keras.initializers.Zeros())
    start = peak()
    model = keras.Sequential([keras.Input((width,)), *map(layer, range(LAYERS))])
    if kind == "sparsify":
        blocks = kso.Block(int(size), int(size), regular=True)
        model = kso.sparsify(model, density, "uniform", structure=blocks, storage="blocks", seed=0)
        gc.collect()
    built = peak()
    on_torch = keras.backend.backend() == "torch"
    model.compile("adam", "mse", jit_compile=not on_torch)
    model.fit(x, x, batch_size=batch, verbose=0)
    trained = peak()
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "model.keras"
        model.save(file)
        size = file.stat().st_size / 2**20

    def total(variables: list) -> float:
        sizes = [np.prod(v.shape) * np.dtype(str(v.dtype)).itemsize for v in variables]
        return float(sum(sizes)) / 2**20

    return {
        "backend": keras.backend.backend(),
        "form": form,
        "width": width,
        "batch": batch,
        "density": density,
        "weights": total(model.weights),
        "optimizer": total(model.optimizer.variables),
        "file": size,
        "peak, built": built - start,
        "peak, trained": trained - start,
    }


def in_fresh_process(form: str, arguments: argparse.Namespace) -> dict[str, float | str]:
    """`measure` in a new process, with its own memory."""
    command = [sys.executable, __file__, "training", "--form", form]
    for name in ("width", "batch", "density"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    return result


def training() -> None:
    """Memory of training: weights, optimizer, file and process, in every storage.

        KERAS_BACKEND=jax        python benchmarks/memory.py training
        KERAS_BACKEND=tensorflow python benchmarks/memory.py training --width 2048

    Appends a line for each form to `results/memory.jsonl` and writes `results/memory.md` from all
    of them, the last of each kind. An MLP of four layers of 4096 units is built, trained three
    steps by Adam, and saved, in a fresh process for each form. Sparse forms have density 0.1.
    "Peak" is the largest resident set of the process, less what it has after its imports.
    "Blocks" are made by the layers themselves, "any" not regular; "sparsify" makes the same from a
    dense model, which is freed before training.
    """
    parser = described(training)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--form", choices=FORMS, help="measure one form in this process")
    quick = {"width": 512, "forms": ("dense", "masked", "blocks 32")}
    arguments = parsed(parser, quick)
    if arguments.form:
        figures = measure(arguments.form, arguments.width, arguments.batch, arguments.density)
        print(json.dumps(figures))
        return

    lines = RESULTS / "memory.jsonl"
    for form in arguments.forms:
        figures = in_fresh_process(form, arguments)
        print(form, figures, flush=True)
        append(lines, figures)
    report(lines)


def report(lines: pathlib.Path) -> None:
    """The table of all measurements, the last of each kind."""
    rows: dict[tuple, dict] = {}
    for row in finished(lines):
        rows[tuple(row[key] for key in ("backend", "width", "batch", "density", "form"))] = row
    table = []
    for key, row in sorted(rows.items(), key=lambda item: (item[0][:4], FORMS.index(item[0][4]))):
        dense = rows.get((*key[:4], "dense"))
        if dense is None:
            continue
        stored = sum(row[name] for name in STORED) / sum(dense[name] for name in STORED)
        trained = row["peak, trained"] / dense["peak, trained"]
        table.append(
            [
                *(str(part) for part in key[:3]),
                key[4],
                *(f"{row[name]:.0f}" for name in FIGURES),
                f"{stored:.3f}",
                f"{trained:.2f}",
            ]
        )
    text = (
        f"# Memory of training, MiB\n\n{machine()}. MLP of {LAYERS} layers, Adam, float32, sparse "
    )
    text += "forms at density 0.1; each in a process of its own. Stored: weights, optimizer and "
    text += "file, as a ratio to dense. Peak: the largest resident set, less that after the "
    text += "imports; blocks 32 are made by layers.BlockSparseDense, sparsify 32 from a dense "
    text += 'model by sparsify(storage="blocks").\n\n'
    header = ["backend", "width", "batch", "form", *FIGURES, "stored, ratio", "peak, ratio"]
    write("memory", text + markdown(header, table))


# --- sparsify -------------------------------------------------------------------------------------


DENSITY = 0.1
NAMES = ("ResNet-50", "ConvNeXtTiny", "transformer")
SMALL = "small transformer"
SPARSIFY_STEPS = ("clone", "sparsify", "draws", "strip")


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


def sparsify_measure(name: str, rounds: int) -> dict[str, object]:
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
    found = wall_and_cpu(cases, rounds)
    return {
        "weights": int(sum(weight.size for weight in weights)),
        "matrices": len(weights),
        "wall": {step: wall for step, (wall, _) in found.items()},
        "cpu": {step: cpu for step, (_, cpu) in found.items()},
    }


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


def sparsify() -> None:
    """Time and memory of making a model sparse, against those of cloning it.

        KERAS_BACKEND=tensorflow python benchmarks/memory.py sparsify
        KERAS_BACKEND=jax        python benchmarks/memory.py sparsify --rounds 5

    Appends a line for each model to `results/sparsify.jsonl` and writes `results/sparsify.md`
    from all of them, the last of each kind. Every model has a process of its own, in which
    `keras.models.clone_model(model)`, `sparsify(model, 0.1)`, the drawing of the kernels alone,
    and `strip` of the sparse model run in turn; medians. CPU time (`process_time`, all cores) is
    given beside wall-clock time, which other work on the machine disturbs. Another process
    measures the largest resident set during one `sparsify`, minus that before; it includes the
    new model's weights and masks.
    """
    parser = described(sparsify)
    parser.add_argument("--models", nargs="*", default=NAMES, choices=(*NAMES, SMALL))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", choices=("time", "memory"), help="for a process of its own")
    arguments = parsed(parser, {"models": (SMALL,), "rounds": 2})
    if arguments.one:
        [name] = arguments.models
        found = (
            sparsify_measure(name, arguments.rounds) if arguments.one == "time" else memory(name)
        )
        print(json.dumps(found))
        return
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    lines = RESULTS / "sparsify.jsonl"
    for name in arguments.models:
        line: dict[str, object] = {"model": name, "backend": backend, "rounds": arguments.rounds}
        for one in ("time", "memory"):
            command = [sys.executable, __file__, "sparsify", "--one", one, "--models", name]
            command += ["--rounds", str(arguments.rounds)]
            result = subprocess.run(command, check=True, capture_output=True, text=True)
            line |= {one: json.loads(result.stdout.splitlines()[-1])}
        line |= {"load": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d")}
        append(lines, line)
        sparsify_report(lines)


def sparsify_report(lines: pathlib.Path) -> None:
    """The table of the last line of each kind."""
    kept = {}
    for line in finished(lines):
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
                *(f"{cpu[step]:.2f}" for step in SPARSIFY_STEPS),
                f"{cpu['sparsify'] / cpu['clone']:.1f}",
                f"{wall['sparsify'] / wall['clone']:.1f}",
                f"{used['peak']:.0f}",
                f"{used['peak'] / (figures['weights'] * 4 / 2**20):.2f}",
                f"{line['load']:.0f}",
            ]
        )
    header = ["model", "backend", "million weights", *(f"{step}, s" for step in SPARSIFY_STEPS)]
    header += ["sparsify / clone", "by the clock", "peak, MiB", "in copies", "load"]
    text = (
        "# Time and memory of making a model sparse\n\n"
        "`benchmarks/memory.py sparsify`, density 0.1, exactly orthogonal kernels. Seconds of the\n"
        "processor, medians of interleaved runs; the last column but one is the largest further\n"
        "memory during `sparsify` in copies of the float32 kernels: one is the new model's, a\n"
        f"quarter its masks. `load`: of the machine, afterwards. {machine()}.\n\n"
    )
    write("sparsify", text + markdown(header, rows))


# --- planning -------------------------------------------------------------------------------------

# Assumed: an accelerator of today, and the part of its memory and links that a program gets.
MEMORY = 60e9  # bytes for weights and optimizer, of 80e9; the rest is for activations
READS = 2.5e12  # bytes per second from its memory
HOST_LINK = 25e9  # bytes per second between an accelerator and its host
LINKS = {8: 300e9, 256: 40e9}  # bytes per second of each to the others: one machine, a network
FREQUENCY = 100  # steps between updates
# From the program of a mask update on a device: passes over weights of 4 bytes,
# for the counts of two ranks, ties and masks; and weights and two moments, each read and written.
PASSES = 2 * 18 + 4 + 6
NETWORKS = (1e9, 10e9)
ACCELERATORS = (1, 8, 256)
PLANNED = {"dense": "dense", "masked": "masked", "compact": "compact", "blocks": "blocks 32"}
# The callback that updates masks by the dense gradient, in each form.
UPDATES = {"masked": "RigL", "compact": "RigL, compact", "blocks": "RigL, blocks 25"}


def read(name: str) -> list[dict]:
    return finished(HERE / f"results/{name}.jsonl")


def stored() -> dict[str, float]:
    """Measured: bytes of weights, masks, indices and Adam's moments per weight of the network."""
    runs = [run for run in read("memory") if (run["backend"], run["width"]) == ("jax", 4096)]
    found, lines = {}, {run["form"]: run for run in runs}
    for form, title in PLANNED.items():
        line = lines[title]
        weights = 4 * line["width"] ** 2
        found[form] = 2**20 * (line["weights"] + line["optimizer"]) / weights
    return found


def exchanged() -> dict[str, float]:
    """Measured: bytes all-reduced per step, per weight of the network."""
    return {
        line["form"]: sum(n for kind, n in line.items() if "-" in kind) / (4 * line["width"] ** 2)
        for line in read("updates")
        if "form" in line
    }


def updates() -> dict[str, tuple[float, float]]:
    """Measured: bytes to and from the host, and seconds of cores, per weight, of one update."""
    found_lines = [line for line in read("updates") if "update" in line]
    most = max(line["millions"] for line in found_lines)
    lines = {
        line["update"]: line
        for line in found_lines
        if line["millions"] == most and line["ranked"] == "host"
    }
    found = {}
    for form, name in UPDATES.items():
        line = lines[name]
        moved = (line["host_mb"] + line["device_mb"]) / most
        found[form] = moved, line["cpu"] / (most * 1e6)
    return found


def constants() -> str:
    """The table of measured constants."""
    kept, sent, moved = stored(), exchanged(), updates()
    rows = []
    for form in PLANNED:
        update = [f"{moved[form][0]:.2f}", f"{moved[form][1] * 1e9:.0f}"] if form in moved else []
        rows.append([form, f"{kept[form]:.2f}", f"{sent[form]:.2f}", *(update or ["", ""])])
    header = ["form", "stored [bytes]", "all-reduced per step [bytes]"]
    header += ["RigL update on the host: transferred [bytes]", "CPU time [ns]"]
    return markdown(header, rows)


def planned_memory() -> str:
    """Bytes on each accelerator, and the smallest number of accelerators that holds the network."""
    rows = []
    for size in NETWORKS:
        for form, each in stored().items():
            whole = size * each
            shared = [f"{whole / n / 1e9:.2f}" for n in ACCELERATORS]
            rows.append([f"{size / 1e9:.0f}", form, *shared, str(math.ceil(whole / MEMORY))])
    header = [
        "billion weights",
        "form",
        "on 1 [GB]",
        "sharded over 8 [GB]",
        "sharded over 256 [GB]",
    ]
    return markdown([*header, f"accelerators of {MEMORY / 1e9:.0f} GB"], rows)


def traffic() -> str:
    """Time of a ring all-reduce of the gradients of a step."""
    rows = []
    for size in NETWORKS:
        for form, each in exchanged().items():
            whole = size * each
            times = [f"{1e3 * 2 * (n - 1) / n * whole / rate:.1f}" for n, rate in LINKS.items()]
            rows.append([f"{size / 1e9:.0f}", form, f"{whole / 1e9:.2f}", "0", *times])
    header = ["billion weights", "form", "all-reduced [GB]", "1 [ms]", "8 [ms]", "256 [ms]"]
    return markdown(header, rows)


def cost_of_updates() -> str:
    """Time of a mask update on the host and on the devices, divided by the steps between two."""
    return markdown(
        ["billion weights", "form", "ranked on", "1 [ms]", "8 [ms]", "256 [ms]"],
        [
            [f"{size / 1e9:.0f}", form, place, *(f"{1e3 * s / FREQUENCY:.2f}" for s in seconds)]
            for size in NETWORKS
            for form, place, seconds in _seconds(size)
        ],
    )


def _seconds(size: float) -> Iterator[tuple[str, str, list[float]]]:
    for form, (moved, work) in updates().items():
        # Every host ranks the whole network.
        on_host = size * (moved / HOST_LINK + work)
        yield form, "host", [on_host for _ in ACCELERATORS]
        if form == "masked":
            yield form, "device", [size * 4 * PASSES / READS / n for n in ACCELERATORS]


def planning() -> None:
    """Memory and traffic on 1, 8 and 256 accelerators: the tables of `docs/planning.md`.

        python benchmarks/memory.py planning

    Nothing is run: bytes per weight come from `results/memory.jsonl`, bytes exchanged per step, and
    time and bytes of an update, from `results/updates.jsonl`. The speeds of accelerators and links
    are assumed, above.
    """
    parsed(described(planning), {})
    for part in (constants, planned_memory, traffic, cost_of_updates):
        print(f"<!-- {part.__name__} -->\n{part()}")


if __name__ == "__main__":
    chosen(training, sparsify, planning)
