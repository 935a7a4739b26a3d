"""Memory that training takes: weights, optimizer, file and process, dense, masked and compact.

    KERAS_BACKEND=jax        python benchmarks/bench_memory.py
    KERAS_BACKEND=tensorflow python benchmarks/bench_memory.py --width 2048

Writes `results/memory_<backend>.md`. An MLP of four layers of 4096 units is built, trained three
steps by Adam, and saved, in a fresh process for each form. Sparse forms have density 0.1. "Peak" is
the largest resident set of the process, less what it has after its imports.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

LAYERS = 4
STEPS = 3
FORMS = ("dense", "masked", "compact", "blocks 32")


def peak() -> float:
    """The largest resident set of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(form: str, width: int, batch: int, density: float) -> dict[str, float]:
    """Builds, trains and saves one form in this process; all figures in MiB."""
    import keras
    import numpy as np

    import keras_sparse_ortho as kso

    def layer(k: int) -> keras.layers.Layer:
        if form.startswith("blocks"):
            return kso.layers.BlockSparseDense(width, "relu", density=density, block=32, seed=k)
        sparse = kso.initializers.ExactOrthogonal(density, seed=k)
        initializer = "he_normal" if form == "dense" else sparse
        dense = keras.layers.Dense(
            width, activation="relu", kernel_initializer=initializer, name=f"hidden_{k}"
        )
        kind = {"masked": kso.FixedMask, "compact": kso.CompactMask}.get(form)
        return dense if kind is None else kso.PrunableLayer(dense, kind())

    x = np.random.default_rng(0).normal(size=(STEPS * batch, width)).astype("float32")
    start = peak()
    model = keras.Sequential([keras.Input((width,)), *map(layer, range(LAYERS))])
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
        "weights": total(model.weights),
        "optimizer": total(model.optimizer.variables),
        "file": size,
        "peak, built": built - start,
        "peak, trained": trained - start,
    }


def in_fresh_process(form: str, arguments: argparse.Namespace) -> dict[str, float]:
    """`measure` in a new process, which knows nothing of the others' memory."""
    command = [sys.executable, __file__, "--form", form]
    for name in ("width", "batch", "density"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--form", choices=FORMS, help="measure one form in this process")
    arguments = parser.parse_args()
    if arguments.form:
        figures = measure(arguments.form, arguments.width, arguments.batch, arguments.density)
        print(json.dumps(figures))
        return

    import keras
    from timing import machine, markdown, write

    rows = []
    measured = {form: in_fresh_process(form, arguments) for form in FORMS}
    for form, figures in measured.items():
        stored, base = (
            sum(table[name] for name in ("weights", "optimizer", "file"))
            for table in (figures, measured["dense"])
        )
        rows.append(
            [
                form,
                *(f"{value:.0f}" for value in figures.values()),
                f"{stored / base:.3f}",
                f"{figures['peak, trained'] / measured['dense']['peak, trained']:.2f}",
            ]
        )
    backend = keras.backend.backend()
    name = f"memory_{backend}" + ("" if arguments.width == 4096 else f"_{arguments.width}")
    text = f"# Memory of training on {backend}, MiB\n\n{machine()}, Keras {keras.__version__}. "
    text += f"MLP {LAYERS} x {arguments.width}, batch {arguments.batch}, Adam, float32, density "
    text += f"{arguments.density}; each form in a process of its own. Stored: weights, optimizer "
    text += "and file, as a ratio to dense.\n\n"
    header = ["form", *measured["dense"], "stored, ratio", "peak, ratio"]
    write(name, text + markdown(header, rows))


if __name__ == "__main__":
    main()
