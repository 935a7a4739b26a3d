"""CPU seconds that the command `kso` takes to answer.

    python benchmarks/command_line.py [--runs 5]

Every run is a new process. `report` gets models of three kinds: Dense layers only, convolutions
(for which Keras' NumPy backend loads JAX), and attention. The time is user and system time, the
least of the runs: another program's load adds to it. With and without bytecode: installers compile
it, and `PYTHONDONTWRITEBYTECODE` keeps Python from it.
Writes `results/command_line.md`.
"""

import argparse
import os
import pathlib
import resource
import subprocess
import sys
import tempfile

from record import markdown, parsed, write

ROOT = pathlib.Path(__file__).parents[1]
START = "import sys; from keras_sparse_ortho.cli import main; sys.argv[0] = 'kso'; sys.exit(main())"


def save_models(folder: pathlib.Path) -> None:
    """A small sparse model of each kind."""
    import keras

    import keras_sparse_ortho as kso

    layers = keras.layers
    dense = [keras.Input((64,)), layers.Dense(256, activation="relu"), layers.Dense(10)]
    convolutions = [
        *(keras.Input((28, 28, 1)), layers.Conv2D(32, 3, activation="relu")),
        *(layers.GlobalAveragePooling2D(), layers.Dense(10)),
    ]
    x = keras.Input((16, 32))
    attention = keras.Model(x, layers.Dense(10)(layers.MultiHeadAttention(2, 16)(x, x)))
    models = {
        "dense": keras.Sequential(dense),
        "convolutions": keras.Sequential(convolutions),
        "attention": attention,
    }
    for name, model in models.items():
        kso.sparsify(model, 0.25, seed=0).save(folder / f"{name}.keras")


def cpu_seconds(arguments: list[str], folder: pathlib.Path, runs: int, bytecode: bool) -> float:
    """The least CPU time of one command."""
    hidden = ("KERAS_BACKEND", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["PYTHONPATH"] = str(ROOT)
    if bytecode:
        environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    else:  # in a folder where there is none, wherever the packages have theirs
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": str(folder / "none")}
    taken = []
    for _ in range(runs + bytecode):  # the first run writes the bytecode
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-P", "-c", START, *arguments],
            cwd=folder,
            env=environment,
            check=True,
            capture_output=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    options = parsed(parser, quick={"runs": 1})
    commands = [["--help"], ["report", "--help"], ["--version"]]
    commands += [["report", f"{name}.keras"] for name in ("dense", "convolutions", "attention")]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        save_models(folder)
        rows = [
            [
                f"`kso {' '.join(command)}`",
                *(f"{cpu_seconds(command, folder, options.runs, code):.2f}" for code in (1, 0)),
            ]
            for command in commands
        ]
    text = "# The command line: CPU seconds\n\n"
    text += f"The least of {options.runs} runs, user and system time.\n\n"
    write("command_line", text + markdown(["command", "CPU s", "without bytecode"], rows))


if __name__ == "__main__":
    main()
