"""Memory of training: weights, optimizer, file and process, in every storage.

    KERAS_BACKEND=jax        python benchmarks/bench_memory.py
    KERAS_BACKEND=tensorflow python benchmarks/bench_memory.py --width 2048

Appends a line for each form to `results/memory.jsonl` and writes `results/memory.md` from all of
them, the last of each kind. An MLP of four layers of 4096 units is built, trained three steps by
Adam, and saved, in a fresh process for each form. Sparse forms have density 0.1. "Peak" is the
largest resident set of the process, less what it has after its imports. "Blocks" are made by the
layers themselves; "sparsify" makes the same from a dense model, which is freed before training.
"""

import argparse
import gc
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile

from record import RESULTS, append, finished, machine, markdown, parsed, write

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

LAYERS = 4
STEPS = 3
FORMS = ("dense", "masked", "compact", "blocks 32", "blocks 64", "sparsify 32")
STORED = ("weights", "optimizer", "file")
FIGURES = (*STORED, "peak, built", "peak, trained")


def peak() -> float:
    """The largest resident set of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(form: str, width: int, batch: int, density: float) -> dict[str, float | str]:
    """Builds, trains and saves one form in this process; all figures in MiB."""
    import keras
    import numpy as np

    import keras_sparse_ortho as kso

    kind, _, size = form.partition(" ")
    masks = {"masked": kso.FixedMask, "compact": kso.CompactMask}

    def layer(k: int) -> keras.layers.Layer:
        if kind == "blocks":
            options = {"density": density, "block": int(size), "seed": k}
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
        model = kso.sparsify(model, density, "uniform", structure=blocks, storage="auto", seed=0)
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
    command = [sys.executable, __file__, "--form", form]
    for name in ("width", "batch", "density"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float | str] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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
    text += 'model by sparsify(storage="auto").\n\n'
    header = ["backend", "width", "batch", "form", *FIGURES, "stored, ratio", "peak, ratio"]
    write("memory", text + markdown(header, table))


if __name__ == "__main__":
    main()
