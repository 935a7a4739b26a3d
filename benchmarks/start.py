"""Time before training: drawing kernels, scores, and the command `kso`.

    python benchmarks/start.py NAME [options]

The measurements:

- `orthogonal`: speed and memory of EOI against Keras' dense QR initializer and against a plain
  loop.
- `initializers`: all sparse initializers at width 1024, and AI against the loop of its reference.
- `scores`: time of the saliencies on ResNet-50 at 224 pixels, with random weights.
- `kso`: CPU seconds that the command `kso` takes to answer.
"""

import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from networks import cnn
from record import chosen, described, interleaved, machine, markdown, parsed, write

from keras_sparse_ortho import saliency
from keras_sparse_ortho.initializers import (
    ApproximateIsometry,
    ExactOrthogonal,
    RamanujanOrthogonal,
    RandomSparse,
)
from keras_sparse_ortho.orthogonal import (
    Block,
    NByM,
    RegularBlocks,
    approximate_isometry,
    exact_orthogonal,
    regular_blocks,
)

# --- orthogonal -----------------------------------------------------------------------------------


DENSITY = 0.1


def plain_loop(n: int, density: float, seed: int) -> np.ndarray:
    """The reference's procedure: rotate, copy, count the nonzeros, stop at the density."""
    rng = np.random.default_rng(seed)
    matrix = np.eye(n, dtype=np.float32)
    while np.count_nonzero(matrix) < density * n * n:
        i, j = rng.choice(n, 2, replace=False)
        angle = rng.uniform(0.0, 2.0 * np.pi)
        rotated = matrix.copy()
        rotated[:, i] = np.cos(angle) * matrix[:, i] + np.sin(angle) * matrix[:, j]
        rotated[:, j] = -np.sin(angle) * matrix[:, i] + np.cos(angle) * matrix[:, j]
        matrix = rotated
    return matrix


def allocate(n: int) -> np.ndarray:
    output = np.empty((n, n), dtype=np.float32)
    output.fill(1.0)
    return output


def dense_qr(n: int) -> np.ndarray:
    return keras.ops.convert_to_numpy(keras.initializers.Orthogonal(seed=1)((n, n)))


def eoi(n: int, density: float = DENSITY) -> None:
    exact_orthogonal((n, n), density, seed=1)


def peak_memory(n: int, density: float) -> float:
    """Peak memory above that of an idle process (VmHWM), in sizes of the float32 output."""
    code = (
        "import re, sys; from keras_sparse_ortho.orthogonal import exact_orthogonal\n"
        "def peak():\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "n, density = int(sys.argv[1]), float(sys.argv[2])\n"
        "exact_orthogonal((300, 300), 0.5, seed=0)\n"
        "idle = peak()\n"
        "exact_orthogonal((n, n), density, seed=1)\n"
        "print((peak() - idle) * 1024)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(n), str(density)],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout) / (4 * n * n)


def blocks_of(n: int, size: int, density: float) -> RegularBlocks:
    structure = Block(size, size, regular=True)
    return regular_blocks((n, n), density, structure, seed=1, dtype=np.float32)


def blocks_memory(n: int, size: int, density: float) -> float:
    """Peak memory of drawing live blocks above that of an idle process, in MiB."""
    code = (
        "import re, sys; import numpy as np\n"
        "from keras_sparse_ortho.orthogonal import Block, regular_blocks\n"
        "def peak():\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "def draw(n, size, density):\n"
        "    structure = Block(size, size, regular=True)\n"
        "    regular_blocks((n, n), density, structure, seed=1, dtype=np.float32)\n"
        "draw(256, 16, 0.5)\n"
        "idle = peak()\n"
        "draw(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))\n"
        "print(peak() - idle)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(n), str(size), str(density)],
        check=True,
        capture_output=True,
        text=True,
    )
    return int(done.stdout) / 1024


def table_of_blocks(quick: bool) -> str:
    """Regular blocks, drawn as live blocks alone."""
    rows = []
    cases = [(n, size, 0.1) for n in (1024, 2048, 4096, 8192) for size in (16, 32, 64, 128)]
    cases += [(16384, size, 0.05) for size in (32, 64, 128)]
    for n, size, density in cases[:2] if quick else cases:
        times = interleaved({"draw": lambda n=n, s=size, d=density: blocks_of(n, s, d)}, 3)
        drawn = blocks_of(n, size, density)
        zero = float((drawn.blocks == 0).all(axis=(-1, -2)).mean())
        rows.append(
            [
                str(n),
                str(size),
                f"{drawn.density:.4f}",
                f"{zero:.3f}",
                f"{1e3 * times['draw']:.0f}",
                f"{drawn.blocks.nbytes / 2**20:.1f}",
                f"{blocks_memory(n, size, density):.0f}",
                f"{4 * n * n / 2**20:.0f}",
            ]
        )
    head = ["n", "block", "density", "zero blocks", "draw [ms]", "live blocks [MiB]", "peak [MiB]"]
    return markdown([*head, "dense kernel [MiB]"], rows)


def orthogonal() -> None:
    """Speed and memory of EOI against Keras' dense QR initializer and against a plain loop.

        python benchmarks/start.py orthogonal            # a few minutes
        python benchmarks/start.py orthogonal --quick    # small widths, into out/quick

    Writes `results/orthogonal.md`. The plain loop is a copy of the published procedure: it
    rotates two columns of the whole matrix, and counts all nonzeros, once a rotation.
    """
    parser = described(orthogonal)
    quick = parsed(parser, {}).quick
    rows = []
    for n in [256, 512] if quick else [256, 1024, 2048, 4096]:
        times = interleaved({"eoi": lambda n=n: eoi(n), "qr": lambda n=n: dense_qr(n)}, 5)
        ratio = times["qr"] / times["eoi"]
        rows.append(
            [str(n), f"{1e3 * times['eoi']:.1f}", f"{1e3 * times['qr']:.0f}", f"{ratio:.0f}"]
        )
    text = f"# EOI initialization, density {DENSITY}, float32, square kernels\n\n{machine()}, "
    text += f"Keras {keras.__version__} on {keras.backend.backend()}. "
    text += "Medians, interleaved; kernel and mask are drawn.\n\n"
    text += "Against `keras.initializers.Orthogonal` (dense QR):\n\n"
    text += markdown(["n", "EOI [ms]", "dense QR [ms]", "times faster"], rows)

    rows = []
    for n in (256,) if quick else (256, 1024):
        cases = {"eoi": lambda n=n: eoi(n), "loop": lambda n=n: plain_loop(n, DENSITY, 1)}
        times = interleaved(cases, 3)
        ratio = times["loop"] / times["eoi"]
        rows.append(
            [str(n), f"{1e3 * times['eoi']:.1f}", f"{1e3 * times['loop']:.0f}", f"{ratio:.0f}"]
        )
    text += "\nAgainst the published procedure as a plain loop:\n\n"
    text += markdown(["n", "EOI [ms]", "plain loop [ms]", "times faster"], rows)

    rows = []
    for density in (0.1,) if quick else (0.1, 0.5, 1.0):
        for n in (512, 1024) if quick else (1024, 2048, 4096, 8192):
            cases = {
                "eoi": lambda n=n, d=density: eoi(n, d),
                "write": lambda n=n: allocate(n),
            }
            times = interleaved(cases, 3)
            rows.append(
                [
                    str(density),
                    str(n),
                    f"{1e3 * times['eoi']:.1f}",
                    f"{1e3 * times['write']:.1f}",
                    f"{times['eoi'] / times['write']:.1f}",
                    f"{peak_memory(n, density):.2f}",
                ]
            )
    text += "\nAgainst allocating and writing the output, and how it grows:\n\n"
    text += markdown(
        ["density", "n", "EOI [ms]", "write [ms]", "ratio", "peak memory / output"], rows
    )
    text += "\nRegular blocks, drawn as live blocks alone (float32, all arithmetic in float64):\n\n"
    text += table_of_blocks(quick)
    write("orthogonal", text, seeds=[1])


# --- initializers ---------------------------------------------------------------------------------

# Otherwise BLAS threads that wait for each other on a shared machine dominate the time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

STEPS, RATE = 1000, 0.1
AI_ITERATIONS = 100
INITIALIZERS_DENSITY = 0.125


def initializers_plain_loop(
    start: np.ndarray, mask: np.ndarray, rule: str, steps: int
) -> tuple[float, float]:
    """Least relative error of the reference's loop, and its seconds."""
    began = time.perf_counter()
    live, kernel = mask.astype(np.float32), start.astype(np.float32)
    first, second = np.zeros_like(kernel), np.zeros_like(kernel)
    eye = np.eye(len(kernel), dtype=np.float32)
    least = np.inf
    for step in range(1, steps + 1):
        effective = kernel * live
        rest = effective @ effective.T - eye
        norm = float(np.linalg.norm(rest))
        least = min(least, norm)
        slope = (2.0 / norm) * (rest @ effective) * live
        if rule == "SGD":
            kernel -= RATE * slope
            continue
        first += 0.1 * (slope - first)
        second += 0.001 * (slope**2 - second)
        corrected = np.sqrt(second / (1 - 0.999**step)) + 1e-8
        kernel -= RATE / (1 - 0.9**step) * first / corrected
    return least / np.sqrt(len(kernel)), time.perf_counter() - began


def ours(start: np.ndarray, mask: np.ndarray, tolerance: float) -> tuple[float, float, int]:
    """Error, seconds and iterations of ours on the way to `tolerance`."""
    errors: list[float] = []
    began = time.perf_counter()
    approximate_isometry(
        start,
        mask,
        tolerance=tolerance,
        min_decrease=0.0,
        callback=lambda _, error: errors.append(error),
    )
    return errors[-1], time.perf_counter() - began, len(errors)


def against_the_loop(widths: list[int], steps: int) -> str:
    rows = []
    for width in widths:
        for density in (0.1, 0.3):
            rng = np.random.default_rng(0)
            mask = rng.random((width, width)) < density
            start = rng.normal(size=mask.shape, scale=1 / np.sqrt(density * width))
            for rule in ("SGD", "Adam"):
                error, loop = initializers_plain_loop(start, mask, rule, steps)
                reached, seconds, iterations = ours(start, mask, error)
                ratio = f"{loop / seconds:.1f}" if reached <= error else "not reached"
                rows.append(
                    [
                        str(width),
                        str(density),
                        rule,
                        f"{error:.3g}",
                        f"{loop:.2f}",
                        f"{reached:.3g}",
                        f"{seconds:.2f}",
                        str(iterations),
                        ratio,
                    ]
                )
                print(*rows[-1], flush=True)
    return markdown(
        ["n", "density", "loop", "least error", "[s]", "ours", "[s]", "iterations", "times faster"],
        rows,
    )


def error_of(kernel: np.ndarray) -> float:
    """`||K K^T - I||_F / sqrt(n)`."""
    kernel = kernel.astype(np.float64)
    return float(np.linalg.norm(kernel @ kernel.T - np.eye(len(kernel))) / np.sqrt(len(kernel)))


def all_initializers(width: int) -> str:
    shape = (width, width)
    cases = {
        "EOI": ExactOrthogonal(INITIALIZERS_DENSITY, seed=1),
        "EOI, Block(16, 1)": ExactOrthogonal(INITIALIZERS_DENSITY, seed=1, structure=Block(16, 1)),
        "EOI, 2:4": ExactOrthogonal(INITIALIZERS_DENSITY, seed=1, structure=NByM(2, 4)),
        "EOI, 2:4, full": ExactOrthogonal(0.5, seed=1, structure=NByM(2, 4)),
        "RandomSparse of glorot_uniform": RandomSparse(
            INITIALIZERS_DENSITY, "glorot_uniform", seed=1
        ),
        "SAO (RamanujanOrthogonal)": RamanujanOrthogonal(
            round(INITIALIZERS_DENSITY * width), seed=1
        ),
    }
    drawn = {name: case.sample(shape) for name, case in cases.items()}
    dense = keras.initializers.Orthogonal(seed=1)
    drawn["Keras Orthogonal, dense"] = (
        keras.ops.convert_to_numpy(dense(shape)),
        np.ones(shape, dtype=bool),
    )
    runs = {name: lambda case=case: case.sample(shape) for name, case in cases.items()}
    runs["Keras Orthogonal, dense"] = lambda: keras.ops.convert_to_numpy(dense(shape))
    times = interleaved(runs, 5)

    slow = ApproximateIsometry(INITIALIZERS_DENSITY, seed=1, max_iterations=AI_ITERATIONS)
    name = f"AI, {AI_ITERATIONS} iterations"
    began = time.perf_counter()
    drawn[name] = slow.sample(shape)
    times[name] = time.perf_counter() - began
    rows = [
        [
            name,
            f"{drawn[name][1].mean():.4g}",
            f"{1e3 * times[name]:.1f}",
            f"{error_of(drawn[name][0]):.2g}",
        ]
        for name in sorted(times, key=lambda name: times[name])
    ]
    place = [row[0] for row in rows].index("EOI") + 1
    text = markdown(["initializer", "density", "time [ms]", "isometry error"], rows)
    return text + f"\nEOI is number {place} of {len(rows)} in time.\n"


def initializers() -> None:
    """All sparse initializers at width 1024, and AI against the loop of its reference.

        export KERAS_BACKEND=tensorflow OPENBLAS_NUM_THREADS=1
        taskset -c 0 python benchmarks/start.py initializers          # one core, some minutes
        python benchmarks/start.py initializers --quick               # small widths

    Writes `results/initializers.md`. The reference's loop is a copy in NumPy, float32, with its
    gradient written out: SGD or Adam at a rate of 0.1 on `||W W^T - I||_F`, as published. It gets
    `STEPS` steps; then ours must reach its smallest error, from the same start and mask.
    """
    parser = described(initializers)
    quick = parsed(parser, {}).quick
    width, steps = (128, 200) if quick else (1024, STEPS)
    text = f"# Initializers at width {width}\n\n{machine()}, Keras {keras.__version__} on "
    text += f"{keras.backend.backend()}. {len(os.sched_getaffinity(0))} core(s) used, "
    text += f"{os.environ['OPENBLAS_NUM_THREADS']} BLAS thread(s). Square float32 "
    text += "kernels; medians of 5, interleaved, of drawing kernel and mask (AI: one run). "
    text += "Isometry error: `||K K^T - I||_F / sqrt(n)`.\n"
    text += f"\n{all_initializers(width)}\n## AI against the loop of its reference\n\n"
    text += f"The least error of {steps} steps of the plain loop (float32, rate {RATE}), and the "
    text += "time that ours (L-BFGS, float64) takes to the same error from the same start.\n\n"
    text += against_the_loop([64] if quick else [128, 256, 512], steps)
    write("initializers", text, seeds=[0, 1])


# --- scores ---------------------------------------------------------------------------------------

NETWORKS = {
    "ResNet-50 (224 pixels)": lambda: keras.applications.ResNet50(weights=None),
    "a CNN 8-16-16 (28 pixels)": lambda: cnn((28, 28, 1), 10, {"filters": (8, 16, 16)}),
}


def bare_passes(model: keras.Model) -> str:
    """Seconds of one forward and backward pass of one sample, without masks and scores."""
    import tensorflow as tf

    lines = []
    for dtype in ("float32", "float64"):
        twin = keras.models.clone_model(model, clone_function=lambda layer, d=dtype: cast(layer, d))
        x = tf.ones((1, *model.input_shape[1:]), dtype)

        @tf.function
        def step(x, twin=twin):
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(twin(x, training=False))
            kernels = [v.value for v in twin.trainable_variables if "kernel" in v.path]
            return tape.gradient(total, kernels)

        seconds = interleaved({dtype: lambda step=step, x=x: step(x)}, 5)[dtype]
        lines.append(f"{dtype} {seconds:.2f} s")
    return ", ".join(lines)


def cast(layer: keras.layers.Layer, dtype: str) -> keras.layers.Layer:
    return type(layer).from_config({**layer.get_config(), "dtype": dtype})


def scores() -> None:
    """Time of the saliencies on ResNet-50 at 224 pixels, with random weights.

        KERAS_BACKEND=tensorflow python benchmarks/start.py scores
        KERAS_BACKEND=tensorflow python benchmarks/start.py scores --rounds 5 --only synflow

    Writes `results/saliency.md`, unless `--only` asks for a part. A single run of each, with
    tracing and compilation in it, since that is what a user waits for.
    """
    parser = described(scores)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", choices=["snip", "grasp", "synflow", "synflow32", "random"])
    big, small = NETWORKS
    parser.add_argument("--network", choices=NETWORKS, default=big)
    arguments = parsed(parser, {"network": small, "rounds": 10})
    backend = keras.backend.backend()
    keras.utils.set_random_seed(0)
    model = NETWORKS[arguments.network]()
    # XLA on TensorFlow compiles longer than the few steps of a saliency take.
    model.compile(loss="sparse_categorical_crossentropy", jit_compile=backend == "jax")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(arguments.batch, *model.input_shape[1:])).astype("float32")
    y = rng.integers(0, model.output_shape[-1], arguments.batch)
    rounds = arguments.rounds
    options = {"on_collapse": "ignore"}
    runs = {
        "random": lambda: saliency.random(model, DENSITY, seed=0, **options),
        "magnitude": lambda: saliency.magnitude(model, DENSITY, **options),
        "snip": lambda: saliency.snip(model, DENSITY, (x, y), **options),
        "grasp": lambda: saliency.grasp(model, DENSITY, (x, y), **options),
        "synflow": lambda: saliency.synflow(model, DENSITY, rounds=rounds, **options),
    }
    samples = {"snip": arguments.batch, "grasp": arguments.batch}
    rows = []
    for name, run in runs.items():
        if arguments.only not in (None, name):
            continue
        start = time.perf_counter()
        try:
            found = run()
            names = [path.removesuffix("/kernel") for path in found.collapsed]
            note = f"nothing left of {', '.join(names)}" if names else ""
        except ValueError as error:  # float32 overflows, which is the result
            note = str(error).split(". Received")[0]
        seconds = time.perf_counter() - start
        what = f"{rounds} rounds" if name.startswith("synflow") else f"{samples.get(name, 0)}"
        rows.append([name, what, f"{seconds:.1f}", note])
        print(rows[-1], flush=True)
    if arguments.only is None:
        text = f"# Saliencies of {arguments.network}, random weights, on {backend}\n\n{machine()}"
        text += f", Keras {keras.__version__}. Density {DENSITY}; one run of each, compilation "
        text += "included. `synflow` computes in float64, `synflow32` in float32.\n\n"
        if backend == "tensorflow":
            text += "One plain forward and backward pass of one sample for the gradient of all "
            text += f"kernels: {bare_passes(model)}.\n\n"
        header = ["method", "samples or rounds", "seconds", "note"]
        write("saliency", text + markdown(header, rows))


# --- kso ------------------------------------------------------------------------------------------


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


def kso() -> None:
    """CPU seconds that the command `kso` takes to answer.

        python benchmarks/start.py kso [--runs 5]

    Every run is a new process. `report` gets models of three kinds: Dense layers only,
    convolutions (for which Keras' NumPy backend loads JAX), and attention. The time is user and
    system time, the least of the runs: another program's load adds to it. With and without
    bytecode: installers compile it, and `PYTHONDONTWRITEBYTECODE` keeps Python from it. Writes
    `results/command_line.md`.
    """
    parser = described(kso)
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
    chosen(orthogonal, initializers, scores, kso)
