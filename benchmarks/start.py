"""Starts: time before training, and what the kernels do to a signal.

python benchmarks/start.py NAME [options]
"""

import bisect
import functools
import itertools
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if {"drawing", "initializers", "spectrum"} & {*sys.argv}:
    # Otherwise BLAS threads that wait for each other on a shared machine dominate the time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import keras
import numpy as np
from networks import cnn
from record import (
    QUICK,
    RESULTS,
    groups,
    machine,
    markdown,
    matching,
    sentences,
)
from runner import (
    Measurement,
    Run,
    Setting,
    grid,
    interleaved,
    main,
    wall_and_cpu,
)
from training import crossentropy

from keras_sparse_ortho import budgets, prunable_weights, saliency, sparsify
from keras_sparse_ortho._gathers import divisor_near
from keras_sparse_ortho.analysis import critical_gain, jacobian_singular_values
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


class Orthogonal(Measurement):
    """Speed and memory of EOI against Keras' dense QR initializer and against a plain loop.

        python benchmarks/start.py orthogonal            # a few minutes
        python benchmarks/start.py orthogonal --quick    # small widths, into out/quick

    The plain loop is a copy of the published procedure: it rotates two columns of the whole matrix,
    and counts all nonzeros, once a rotation.
    """

    page = "orthogonal"
    seeds = (1,)
    settings = {
        "qr_widths": Setting([256, 1024, 2048, 4096], quick=[256, 512]),
        "loop_widths": Setting([256, 1024], quick=[256]),
        "widths": Setting([1024, 2048, 4096, 8192], quick=[512, 1024]),
        "densities": Setting([0.1, 0.5, 1.0], quick=[0.1]),
        "blocks": Setting(
            [
                f"{n}-{size}-0.1"
                for n in (1024, 2048, 4096, 8192)
                for size in (16, 32, 64, 128)
            ]
            + [f"16384-{size}-0.05" for size in (32, 64, 128)],
            "width-block-density",
            quick=["1024-16-0.1", "1024-32-0.1"],
        ),
    }

    def runs(self) -> list[Run]:
        given = self.given
        runs = grid(table=["qr"], n=given.qr_widths) + grid(
            table=["loop"], n=given.loop_widths
        )
        runs += grid(table=["write"], density=given.densities, n=given.widths)
        for case in given.blocks:
            n, size, density = case.split("-")
            which = {
                "table": "blocks",
                "n": int(n),
                "size": int(size),
                "asked": float(density),
            }
            runs.append(which)
        return runs

    def run(self, which: Run) -> Run:
        n = which["n"]
        if which["table"] == "blocks":
            size, density = which["size"], which["asked"]
            times = interleaved(
                {"draw": lambda: blocks_of(n, size, density)}, 3
            )
            drawn = blocks_of(n, size, density)
            zero = float((drawn.blocks == 0).all(axis=(-1, -2)).mean())
            results = {
                "density": drawn.density,
                "zero": zero,
                "draw": times["draw"],
            }
            peak = blocks_memory(n, size, density)
            return results | {
                "live_mib": drawn.blocks.nbytes / 2**20,
                "peak_mib": peak,
            }
        rival = {"qr": dense_qr, "loop": plain_loop, "write": allocate}[
            which["table"]
        ]
        density = which.get("density", DENSITY)
        cases = {"eoi": lambda: eoi(n, density), "rival": lambda: rival(n)}
        results = interleaved(cases, 5 if which["table"] == "qr" else 3)
        if which["table"] == "write":
            results["memory"] = peak_memory(n, density)
        return results

    def report(self, lines: list[Run]) -> str:
        text = (
            f"# EOI initialization, density {DENSITY}, float32, square kernels\n\n"
            + sentences(
                f"""
            {machine()}, Keras {keras.__version__} on {keras.backend.backend()}. Medians,
            interleaved; kernel and mask are drawn.
            """
            )
        )
        text += "Against `keras.initializers.Orthogonal` (dense QR):\n\n"
        text += faster_table(matching(lines, table="qr"), "dense QR")
        text += "\nAgainst the published procedure as a plain loop:\n\n"
        text += faster_table(matching(lines, table="loop"), "plain loop")
        text += (
            "\nAgainst allocating and writing the output, and how it grows:\n\n"
        )
        rows = []
        for line in matching(lines, table="write"):
            row = [str(line["density"]), str(line["n"])]
            row += [f"{1e3 * line['eoi']:.1f}", f"{1e3 * line['rival']:.1f}"]
            rows.append(
                [
                    *row,
                    f"{line['eoi'] / line['rival']:.1f}",
                    f"{line['memory']:.2f}",
                ]
            )
        header = [
            "density",
            "n",
            "EOI [ms]",
            "write [ms]",
            "ratio",
            "peak memory / output",
        ]
        text += markdown(header, rows)
        text += "\nRegular blocks, drawn as live blocks alone (float32, all arithmetic in "
        text += "float64):\n\n"
        rows = []
        for line in matching(lines, table="blocks"):
            row = [str(line["n"]), str(line["size"]), f"{line['density']:.4f}"]
            row += [
                f"{line['zero']:.3f}",
                f"{1e3 * line['draw']:.0f}",
                f"{line['live_mib']:.1f}",
            ]
            rows.append(
                [
                    *row,
                    f"{line['peak_mib']:.0f}",
                    f"{4 * line['n'] ** 2 / 2**20:.0f}",
                ]
            )
        header = [
            "n",
            "block",
            "density",
            "zero blocks",
            "draw [ms]",
            "live blocks [MiB]",
        ]
        return text + markdown(
            [*header, "peak [MiB]", "dense kernel [MiB]"], rows
        )


def faster_table(lines: list[Run], rival: str) -> str:
    """A table of times beside a rival."""
    rows = []
    for line in lines:
        row = [
            str(line["n"]),
            f"{1e3 * line['eoi']:.1f}",
            f"{1e3 * line['rival']:.0f}",
        ]
        rows.append([*row, f"{line['rival'] / line['eoi']:.0f}"])
    return markdown(["n", "EOI [ms]", f"{rival} [ms]", "times faster"], rows)


def plain_loop(n: int, density: float = DENSITY, seed: int = 1) -> np.ndarray:
    """The reference's procedure: rotate, copy, count the nonzeros, stop at the density."""
    rng = np.random.default_rng(seed)
    matrix = np.eye(n, dtype=np.float32)
    while np.count_nonzero(matrix) < density * n * n:
        i, j = rng.choice(n, 2, replace=False)
        angle = rng.uniform(0.0, 2.0 * np.pi)
        rotated = matrix.copy()
        rotated[:, i] = (
            np.cos(angle) * matrix[:, i] + np.sin(angle) * matrix[:, j]
        )
        rotated[:, j] = (
            -np.sin(angle) * matrix[:, i] + np.cos(angle) * matrix[:, j]
        )
        matrix = rotated
    return matrix


def allocate(n: int) -> np.ndarray:
    output = np.empty((n, n), dtype=np.float32)
    output.fill(1.0)
    return output


def dense_qr(n: int) -> np.ndarray:
    return keras.ops.convert_to_numpy(
        keras.initializers.Orthogonal(seed=1)((n, n))
    )


def eoi(n: int, density: float = DENSITY) -> None:
    exact_orthogonal((n, n), density, seed=1)


def memory_of(draw: str, small: str, *sizes: float) -> int:
    """Bytes of peak memory above that of an idle process (VmHWM).

    Args:
        draw: Code that defines a function `draw`.
        small: The call that loads everything first.
        *sizes: The arguments of the measured call.
    """
    code = f"""
import re
import numpy as np
from keras_sparse_ortho.orthogonal import Block, exact_orthogonal, regular_blocks
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
{draw}
{small}
idle = peak()
draw{sizes}
print((peak() - idle) * 1024)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True
    )
    return int(process.stdout)


def peak_memory(n: int, density: float) -> float:
    """Peak memory of EOI, in sizes of the float32 output."""
    draw = "def draw(n, density): exact_orthogonal((n, n), density, seed=1)"
    return memory_of(draw, "draw(300, 0.5)", n, density) / (4 * n * n)


def blocks_of(n: int, size: int, density: float) -> RegularBlocks:
    """Regular live blocks."""
    structure = Block(size, size, regular=True)
    return regular_blocks((n, n), density, structure, seed=1, dtype=np.float32)


def blocks_memory(n: int, size: int, density: float) -> float:
    """Peak memory of drawing live blocks, in MiB."""
    draw = """
def draw(n, size, density):
    structure = Block(size, size, regular=True)
    regular_blocks((n, n), density, structure, seed=1, dtype=np.float32)
"""
    return memory_of(draw, "draw(256, 16, 0.5)", n, size, density) / 2**20


# --- initializers ---------------------------------------------------------------------------------

STEPS, RATE = 1000, 0.1
AI_ITERATIONS = 100
MOST_ITERATIONS = 1000  # the default of `approximate_isometry`
INITIALIZERS_DENSITY = 0.125


class Initializers(Measurement):
    """All sparse initializers at width 1024, and AI against the loop of its reference.

        export KERAS_BACKEND=tensorflow OPENBLAS_NUM_THREADS=1
        taskset -c 0 python benchmarks/start.py initializers          # one core, some minutes
        python benchmarks/start.py initializers --quick               # small widths

    The reference's loop is a copy in NumPy, float32, with its gradient written out: SGD or Adam at
    a rate of 0.1 on `||W W^T - I||_F`, as published. It gets `STEPS` steps; then ours must reach
    its smallest error, from the same start and mask.
    """

    page = "initializers"
    seeds = (0, 1)
    settings = {
        "width": Setting(1024, quick=128),
        "loop_widths": Setting([128, 256, 512], quick=[64]),
        "steps": Setting(STEPS, quick=200),
    }

    def runs(self) -> list[Run]:
        loops = grid(
            n=self.given.loop_widths, density=(0.1, 0.3), rule=("SGD", "Adam")
        )
        return [{"width": self.given.width}, *loops]

    def run(self, which: Run) -> Run | Iterator[Run]:
        if "width" in which:
            return drawn_by_all(which["width"])
        n, density = which["n"], which["density"]
        rng = np.random.default_rng(0)
        mask = rng.random((n, n)) < density
        start = rng.normal(size=mask.shape, scale=1 / np.sqrt(density * n))
        error, loop = reference_loop(
            start, mask, which["rule"], self.given.steps
        )
        reached, seconds, iterations = ours(start, mask, error)
        results = {
            "error": error,
            "loop": loop,
            "reached": reached,
            "seconds": seconds,
        }
        return results | {"iterations": iterations}

    def report(self, lines: list[Run]) -> str:
        given = self.given
        drawn = sorted(
            (line for line in lines if "name" in line),
            key=lambda line: line["seconds"],
        )
        rows = []
        for line in drawn:
            cells = [f"{line['live']:.4g}", f"{1e3 * line['seconds']:.1f}"]
            rows.append([line["name"], *cells, f"{line['isometry']:.2g}"])
        place = [line["name"] for line in drawn].index("EOI") + 1
        text = f"# Initializers at width {given.width}\n\n" + sentences(
            f"""
            {machine()}, Keras {keras.__version__} on {keras.backend.backend()}.
            {len(os.sched_getaffinity(0))} core(s) used, {os.environ["OPENBLAS_NUM_THREADS"]} BLAS
            thread(s). Square float32 kernels; medians of 5, interleaved, of drawing kernel and mask
            (AI: one run). Isometry error: `||K K^T - I||_F / sqrt(n)`.
            """
        )
        text += markdown(
            ["initializer", "density", "time [ms]", "isometry error"], rows
        )
        text += f"\nEOI is number {place} of {len(rows)} in time.\n\n"
        text += "## AI against the loop of its reference\n\n" + sentences(
            f"""
            The least error of {given.steps} steps of the plain loop (float32, rate {RATE}), and the
            time that ours (L-BFGS, float64) takes to the same error from the same start.
            """
        )
        rows = []
        for line in (line for line in lines if "rule" in line):
            ratio = f"{line['loop'] / line['seconds']:.1f}"
            row = [
                str(line["n"]),
                str(line["density"]),
                line["rule"],
                f"{line['error']:.3g}",
            ]
            row += [
                f"{line['loop']:.2f}",
                f"{line['reached']:.3g}",
                f"{line['seconds']:.2f}",
            ]
            row.append(str(line["iterations"]))
            rows.append(
                [
                    *row,
                    ratio
                    if line["reached"] <= line["error"]
                    else "not reached",
                ]
            )
        header = [
            "n",
            "density",
            "loop",
            "least error",
            "[s]",
            "ours",
            "[s]",
            "iterations",
        ]
        return text + markdown([*header, "times faster"], rows)


def reference_loop(
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


def ours(
    start: np.ndarray, mask: np.ndarray, tolerance: float
) -> tuple[float, float, int]:
    """Error, seconds and iterations of ours on the way to `tolerance`."""

    def error_after(iterations: int) -> float:
        limits = {
            "max_iterations": iterations,
            "tolerance": 0.0,
            "min_decrease": 0.0,
        }
        return error_of(approximate_isometry(start, mask, **limits))

    began = time.perf_counter()
    kernel = approximate_isometry(
        start, mask, tolerance=tolerance, min_decrease=0.0
    )
    seconds = time.perf_counter() - began
    error = error_of(kernel)
    # The error never rises.
    counts = range(1, MOST_ITERATIONS)
    fewer = bisect.bisect_left(
        counts, True, key=lambda count: error_after(count) <= error
    )
    return error, seconds, fewer + 1


def error_of(kernel: np.ndarray) -> float:
    """`||K K^T - I||_F / sqrt(n)`."""
    kernel = kernel.astype(np.float64)
    return float(
        np.linalg.norm(kernel @ kernel.T - np.eye(len(kernel)))
        / np.sqrt(len(kernel))
    )


def drawn_by_all(width: int) -> Iterator[Run]:
    """Time, density and isometry of each initializer."""
    shape = (width, width)
    density = INITIALIZERS_DENSITY
    sparse = {
        "EOI": ExactOrthogonal(density, seed=1),
        "EOI, Block(16, 1)": ExactOrthogonal(
            density, seed=1, structure=Block(16, 1)
        ),
        "EOI, 2:4": ExactOrthogonal(density, seed=1, structure=NByM(2, 4)),
        "EOI, 2:4, full": ExactOrthogonal(0.5, seed=1, structure=NByM(2, 4)),
        "RandomSparse of glorot_uniform": RandomSparse(
            density, "glorot_uniform", seed=1
        ),
        "SAO (RamanujanOrthogonal)": RamanujanOrthogonal(
            round(density * width), seed=1
        ),
    }
    dense = keras.initializers.Orthogonal(seed=1)
    calls: dict[str, Callable[[], Any]] = {
        name: lambda initializer=initializer: initializer.sample(shape)
        for name, initializer in sparse.items()
    }
    calls["Keras Orthogonal, dense"] = lambda: (
        keras.ops.convert_to_numpy(dense(shape)),
        np.ones(shape, dtype=bool),
    )
    samples = {name: call() for name, call in calls.items()}
    times = interleaved(calls, 5)
    name = f"AI, {AI_ITERATIONS} iterations"
    slow = ApproximateIsometry(density, seed=1, max_iterations=AI_ITERATIONS)
    began = time.perf_counter()
    samples[name] = slow.sample(shape)
    times[name] = time.perf_counter() - began
    for name, (kernel, mask) in samples.items():
        line = {
            "name": name,
            "live": float(mask.mean()),
            "seconds": times[name],
        }
        yield line | {"isometry": error_of(kernel)}


# --- drawing --------------------------------------------------------------------------------------

FEW = 10  # iterations of AI, of which 100 take ten times as long


class Drawing(Measurement):
    """Time to draw a kernel and its mask over width and density: EOI, mirrored EOI, SAO and AI.

        export KERAS_BACKEND=tensorflow OPENBLAS_NUM_THREADS=1
        python benchmarks/start.py drawing

    SAO has the degree nearest to the density. AI, which takes ten iterations here and once, is
    left out of the widest kernels.
    """

    page = lines = "drawing"
    settings = {
        "widths": Setting([512, 1024, 2048, 4096], quick=[64, 128]),
        "densities": Setting([0.125, 0.05]),
        "widest_of_ai": Setting(2048, quick=128),
        "rounds": Setting(5, quick=2),
    }

    def runs(self) -> list[Run]:
        return grid(width=self.given.widths, density=self.given.densities)

    def run(self, which: Run) -> Iterator[Run]:
        """CPU and wall-clock seconds of each start."""
        width, density = which["width"], which["density"]
        shape = width, width
        starts = drawn_starts(width, density)
        calls: dict[str, Callable[[], Any]] = {
            name: functools.partial(start.sample, shape)
            for name, start in starts.items()
        }
        times = wall_and_cpu(calls, self.given.rounds)
        if width <= self.given.widest_of_ai:
            slow = ApproximateIsometry(density, seed=1, max_iterations=FEW)
            name = f"AI, {FEW} iterations"
            starts[name] = slow
            once = {name: functools.partial(slow.sample, shape)}
            times |= wall_and_cpu(once, rounds=1, warm_up=0)
        for name, (wall, cpu) in times.items():
            _, mask = starts[name].sample(shape)
            live = float(mask.mean())
            yield {"start": name, "live": live, "wall": wall, "cpu": cpu}

    def report(self, lines: list[Run]) -> str:
        about = sentences(
            f"""
            {machine()}, {os.environ["OPENBLAS_NUM_THREADS"]} BLAS thread(s). Square float32
            kernels; CPU milliseconds on a machine with other work, medians of
            {self.given.rounds} interleaved draws of kernel and mask (AI: of one). The ratio is to
            EOI. SAO has the possible density that is nearest.
            """
        )
        rows = []
        for (width, density), members in groups(
            lines, "width", "density"
        ).items():
            by_start = {line["start"]: line for line in members}
            base = by_start["EOI"]["cpu"]
            for name, line in by_start.items():
                cells = [f"{width}", f"{density}", name, f"{line['live']:.4f}"]
                cells.append(f"{1e3 * line['cpu']:.1f}")
                rows.append([*cells, f"{line['cpu'] / base:.2f}"])
        header = ["width", "density", "start", "reached", "CPU time [ms]"]
        return (
            "# Time to draw a kernel, over width and density\n\n"
            + about
            + markdown([*header, "ratio"], rows)
        )


def drawn_starts(width: int, density: float) -> dict[str, Any]:
    """The starts of one width and density, by name."""
    degree = divisor_near(width, density * width)
    return {
        "EOI": ExactOrthogonal(density, seed=1),
        "EOI, mirrored": ExactOrthogonal(density, seed=1, mirrored=True),
        "SAO": RamanujanOrthogonal(degree, seed=1),
        "random mask": RandomSparse(density, "glorot_uniform", seed=1),
    }


# --- scores ---------------------------------------------------------------------------------------

NETWORKS = {
    "ResNet-50 (224 pixels)": lambda: keras.applications.ResNet50(weights=None),
    "a CNN 8-16-16 (28 pixels)": lambda: cnn(
        (28, 28, 1), 10, {"filters": (8, 16, 16)}
    ),
}
BIG, SMALL = NETWORKS
SCORES = ("random", "magnitude", "snip", "grasp", "synflow")


class Scores(Measurement):
    """Time of the saliencies on ResNet-50 at 224 pixels, with random weights.

        KERAS_BACKEND=tensorflow python benchmarks/start.py scores

    A single run of each, with tracing and compilation in it, since that is what a user waits for.
    """

    page = "saliency"
    settings = {
        "batch": Setting(32),
        "rounds": Setting(100, quick=10),
        "network": Setting(BIG, choices=NETWORKS, quick=SMALL),
    }

    def measure(self) -> None:
        """Builds the network once."""
        keras.utils.set_random_seed(0)
        self.model = NETWORKS[self.given.network]()
        # XLA on TensorFlow compiles longer than the few steps of a saliency take.
        jit = keras.backend.backend() == "jax"
        self.model.compile(
            loss="sparse_categorical_crossentropy", jit_compile=jit
        )
        super().measure()

    def runs(self) -> list[Run]:
        return grid(method=SCORES)

    def run(self, which: Run) -> Run:
        given, method = self.given, which["method"]
        rng = np.random.default_rng(0)
        x = rng.normal(size=(given.batch, *self.model.input_shape[1:])).astype(
            "float32"
        )
        y = rng.integers(0, self.model.output_shape[-1], given.batch)
        arguments = [(x, y)] if method in ("snip", "grasp") else []
        options: Run = {"on_collapse": "ignore"}
        if method == "random":
            options["seed"] = 0
        if method == "synflow":
            options["rounds"] = given.rounds
        start = time.perf_counter()
        try:
            result = getattr(saliency, method)(
                self.model, DENSITY, *arguments, **options
            )
            names = [path.removesuffix("/kernel") for path in result.collapsed]
            note = f"nothing left of {', '.join(names)}" if names else ""
        except ValueError as error:  # float32 overflows, which is the result
            note = str(error).split(". Received")[0]
        return {"seconds": time.perf_counter() - start, "note": note}

    def report(self, lines: list[Run]) -> str:
        given, backend = self.given, keras.backend.backend()
        text = (
            f"# Saliencies of {given.network}, random weights, on {backend}\n\n"
            + sentences(
                f"""
            {machine()}, Keras {keras.__version__}. Density {DENSITY}; one run of each, compilation
            included. `synflow` computes in float64, `synflow32` in float32.
            """
            )
        )
        if backend == "tensorflow":
            text += sentences(
                f"""
                One plain forward and backward pass of one sample for the gradient of all kernels:
                {bare_passes(self.model)}.
                """
            )
        used = {
            "synflow": f"{given.rounds} rounds",
            "snip": given.batch,
            "grasp": given.batch,
        }
        rows = []
        for line in lines:
            count = str(used.get(line["method"], 0))
            rows.append(
                [line["method"], count, f"{line['seconds']:.1f}", line["note"]]
            )
        return text + markdown(
            ["method", "samples or rounds", "seconds", "note"], rows
        )


def bare_passes(model: keras.Model) -> str:
    """Seconds of one forward and backward pass of one sample, without masks and scores."""
    import tensorflow as tf

    lines = []
    for dtype in ("float32", "float64"):
        twin = keras.models.clone_model(
            model, clone_function=lambda layer, d=dtype: cast(layer, d)
        )
        x = tf.ones((1, *model.input_shape[1:]), dtype)

        @tf.function
        def step(x, twin=twin):
            with tf.GradientTape() as tape:
                total = tf.reduce_sum(twin(x, training=False))
            kernels = [
                v.value for v in twin.trainable_variables if "kernel" in v.path
            ]
            return tape.gradient(total, kernels)

        seconds = interleaved({dtype: lambda step=step, x=x: step(x)}, 5)[dtype]
        lines.append(f"{dtype} {seconds:.2f} s")
    return ", ".join(lines)


def cast(layer: keras.layers.Layer, dtype: str) -> keras.layers.Layer:
    return type(layer).from_config({**layer.get_config(), "dtype": dtype})


# --- kso ------------------------------------------------------------------------------------------

ROOT = pathlib.Path(__file__).parents[1]
START = "import sys; from keras_sparse_ortho.cli import main; sys.argv[0] = 'kso'; sys.exit(main())"
KSO_COMMANDS = [["--help"], ["report", "--help"], ["--version"]]
KSO_COMMANDS += [
    ["report", f"{name}.keras"]
    for name in ("dense", "convolutions", "attention")
]


class Kso(Measurement):
    """CPU seconds that the command `kso` takes to answer.

        python benchmarks/start.py kso [--rounds 5]

    Every run is a new process. `report` gets models of three kinds: Dense layers only,
    convolutions (for which Keras' NumPy backend loads JAX), and attention. The time is user and
    system time, the least of the runs: another program's load adds to it. With and without
    bytecode: installers compile it, and `PYTHONDONTWRITEBYTECODE` keeps Python from it.
    """

    page = "command_line"
    settings = {"rounds": Setting(5, quick=1)}

    def measure(self) -> None:
        """Saves the models first."""
        with tempfile.TemporaryDirectory() as name:
            self.folder = pathlib.Path(name)
            save_models(self.folder)
            super().measure()

    def runs(self) -> list[Run]:
        return grid(command=KSO_COMMANDS, bytecode=(True, False))

    def run(self, which: Run) -> Run:
        rounds = self.given.rounds
        return {
            "cpu": cpu_seconds(
                which["command"], self.folder, rounds, which["bytecode"]
            )
        }

    def report(self, lines: list[Run]) -> str:
        rows = []
        for first, second in zip(lines[::2], lines[1::2], strict=True):
            command = f"`kso {' '.join(first['command'])}`"
            rows.append(
                [command, f"{first['cpu']:.2f}", f"{second['cpu']:.2f}"]
            )
        text = "# The command line: CPU seconds\n\n"
        text += (
            f"The least of {self.given.rounds} runs, user and system time.\n\n"
        )
        return text + markdown(["command", "CPU s", "without bytecode"], rows)


def save_models(folder: pathlib.Path) -> None:
    """A small sparse model of each kind."""
    layers = keras.layers
    dense = [
        keras.Input((64,)),
        layers.Dense(256, activation="relu"),
        layers.Dense(10),
    ]
    convolutions = [
        *(keras.Input((28, 28, 1)), layers.Conv2D(32, 3, activation="relu")),
        *(layers.GlobalAveragePooling2D(), layers.Dense(10)),
    ]
    x = keras.Input((16, 32))
    attention = keras.Model(
        x, layers.Dense(10)(layers.MultiHeadAttention(2, 16)(x, x))
    )
    models = {
        "dense": keras.Sequential(dense),
        "convolutions": keras.Sequential(convolutions),
        "attention": attention,
    }
    for name, model in models.items():
        sparsify(model, 0.25, seed=0).save(folder / f"{name}.keras")


def cpu_seconds(
    arguments: list[str], folder: pathlib.Path, runs: int, bytecode: bool
) -> float:
    """The least CPU time of one command."""
    hidden = ("KERAS_BACKEND", "PYTHONDONTWRITEBYTECODE")
    environment = {
        name: value for name, value in os.environ.items() if name not in hidden
    }
    environment["PYTHONPATH"] = str(ROOT)
    if bytecode:
        environment["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    else:  # in a folder where there is none, wherever the packages have theirs
        environment |= {
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPYCACHEPREFIX": str(folder / "none"),
        }
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
        taken.append(
            after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        )
    return min(taken)


# --- spectrum -------------------------------------------------------------------------------------

ACTIVATIONS = ("linear", "tanh", "hard_tanh", "relu")
BUDGETS = ("uniform", "erk", "snip", "grasp", "synflow")
STARTS = ("base", "AI", "SAO", "EOI")
# Kept: both singular values within this factor of the dense network's.
KEPT = 2.0
WIDTH, DEPTH, SAMPLES = 100, 7, 8
DENSITIES = (0.03, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
# Activation and derivative.
FUNCTIONS = {
    "linear": (lambda a: a, np.ones_like),
    "tanh": (np.tanh, lambda a: 1 - np.tanh(a) ** 2),
    "hard_tanh": (
        lambda a: np.clip(a, -1, 1),
        lambda a: (np.abs(a) < 1).astype(float),
    ),
    "relu": (lambda a: np.maximum(a, 0), lambda a: (a > 0).astype(float)),
}

Kernels = list[np.ndarray]


class Spectrum(Measurement):
    """Singular values of the input-output Jacobian of sparse MLPs: Figure 3 of the EOI paper.

        KERAS_BACKEND=tensorflow OPENBLAS_NUM_THREADS=1 python benchmarks/start.py spectrum

    An MLP of 7 layers of width 100 without biases, an activation after all but the last, kernels at
    the critical gain of the activation, standard normal inputs. The layerwise budgets are uniform,
    ERK, SNIP, GraSP and SynFlow. With the densities of each:

    - *base*: dense orthogonal kernels times a mask, the saliency's own one or a random one;
    - *AI*: the same masks, with live entries optimized towards an isometry;
    - *SAO*: permuted dense orthogonal blocks of the nearest degree that divides the width (for ReLU
      in the form made for it), so that its density is not quite the one asked for;
    - *EOI*: exactly orthogonal kernels.

    Jacobians are computed in NumPy, which for so many small networks is much faster than tracing
    each; some are compared with `kso.analysis.jacobian_singular_values`. Writes `docs/spectrum.svg`
    as well.
    """

    page = "spectrum"
    seeds = (0, 1)
    settings = {
        "seeds": Setting(2, quick=1),
        "budgets": Setting([*BUDGETS], choices=BUDGETS, quick=["uniform"]),
        "densities": Setting([*DENSITIES], quick=[0.1, 0.2, 1.0]),
    }

    def runs(self) -> list[Run]:
        return grid(inputs=(WIDTH, 784))

    def run(self, which: Run) -> list[Run]:
        given, inputs = self.given, which["inputs"]
        count = given.seeds if inputs == WIDTH else 1
        return spectra(inputs, count, given.budgets, given.densities)

    def report(self, lines: list[Run]) -> str:
        text = (
            "# Singular values of the Jacobian of sparse MLPs\n\n"
            + sentences(
                f"""
            {DEPTH} layers of width {WIDTH}, mean of {self.given.seeds} seed(s) and {SAMPLES}
            samples each, on {keras.backend.backend()}. Cells: largest / mean singular value. SAO
            has the nearest admissible degree of each layer, for ReLU in its ReLU form; the last
            column says the density that this is.
            """
            )
        )
        for inputs, rows in groups(lines, "inputs").items():
            if inputs == WIDTH:
                spectrum_picture(rows)
                text += "![spectrum](../../docs/spectrum.svg)\n\n## Square kernels\n\n"
                text += "All kernels have one shape, so ERK is uniform.\n\n"
            else:
                text += f"\n## With {inputs} inputs, as those of MNIST\n\nOne seed. The first "
                text += (
                    "kernel is not square, so that SAO has no place here.\n\n"
                )
            text += f"**{verdict(rows)}**\n\nRelative to the dense orthogonal network, at "
            text += (
                f"densities under 0.2, over all budgets:\n\n{ranges(rows)}\n"
            )
            text += spectrum_table(rows)
        return text


def kinds(rows: list[dict]) -> tuple[list[str], list[float]]:
    """The measured budgets and densities."""
    names = {r["budget"] for r in rows}
    return [name for name in BUDGETS if name in names], sorted(
        {r["asked"] for r in rows}
    )


def dense_values(rows: list[dict]) -> dict[str, tuple[float, float]]:
    """Largest and mean of the dense orthogonal network of every activation."""
    return {
        r["activation"]: (r["largest"], r["mean"])
        for r in rows
        if (r["asked"], r["budget"], r["start"]) == (1.0, "uniform", "base")
    }


def shares(
    rows: list[dict], start: str, activation: str | None = None
) -> np.ndarray:
    """`(largest, mean)` relative to the dense network, at densities under 0.2."""
    dense = dense_values(rows)
    return np.array(
        [
            (
                r["largest"] / dense[r["activation"]][0],
                r["mean"] / dense[r["activation"]][1],
            )
            for r in rows
            if r["asked"] < 0.2
            and r["start"] == start
            and activation in (None, r["activation"])
        ]
    )


def verdict(rows: list[dict]) -> str:
    """Who keeps both values, and whether it is only EOI."""
    keeps: dict[str, list[str]] = {}
    for start in STARTS:
        for activation in ACTIVATIONS:
            found = shares(rows, start, activation)
            if len(found):
                kept = bool(((found < KEPT) & (found > 1 / KEPT)).all())
                keeps.setdefault(start, []).extend([activation] if kept else [])
    who = "; ".join(
        f"{start}: {', '.join(found) or 'none'}"
        for start, found in keeps.items()
    )
    others = [
        start
        for start in keeps
        if start != "EOI" and set(keeps[start]) & set(keeps["EOI"])
    ]
    if not keeps["EOI"]:
        answer = "EOI does not"
    else:
        answer = (
            f"EOI does, and {' and '.join(others)} too"
            if others
            else "Only EOI does"
        )
        lost = [
            activation
            for activation in ACTIVATIONS
            if activation not in keeps["EOI"]
        ]
        answer += f"; under {', '.join(lost)} EOI does not" if lost else ""
    if "SAO" in keeps:
        answer += (
            ". SAO's form for ReLU has a flat spectrum there, half of its values sqrt(2) and half "
            "0, far from the dense network's uneven one"
        )
    return (
        "At every density under 0.2 and under every budget, both the largest and the mean singular "
        f"value stay within a factor {KEPT:g} of the dense orthogonal network's for: {who}. "
        f"{answer}."
    )


def spectrum_picture(rows: list[dict]) -> None:
    from pictures import DENSE, DOCS, GREEN, OTHER, OURS, PLAIN, new, save

    colors = {"base": DENSE, "AI": OTHER, "SAO": GREEN, "EOI": OURS}
    figure = new(8.4)
    axes = figure.subplots(len(ACTIVATIONS), 2, sharex=True)
    dense = dense_values(rows)
    budgets, densities = kinds(rows)
    for row, activation in enumerate(ACTIVATIONS):
        for column, key in enumerate(("mean", "largest")):
            ax, top = axes[row, column], 0.0
            for k, start in enumerate(STARTS):
                lines = np.array(
                    [
                        [
                            r[key]
                            for r in rows
                            if (r["activation"], r["budget"], r["start"])
                            == (activation, name, start)
                        ]
                        for name in budgets
                    ]
                )
                style = {"color": colors[start], "zorder": 3 + k}
                ax.plot(
                    densities,
                    np.median(lines, axis=0),
                    "o-",
                    ms=3,
                    label=start,
                    **style,
                )
                ax.fill_between(
                    densities,
                    lines.min(axis=0),
                    lines.max(axis=0),
                    alpha=0.18,
                    lw=0,
                    **style,
                )
                # Which GraSP takes far out of the spectrum_picture.
                if start != "base":
                    top = max(top, lines.max())
            value = dense[activation][0 if key == "largest" else 1]
            ax.axhline(
                value, color=PLAIN, lw=1, ls=":", label="dense orthogonal"
            )
            ax.set(
                xscale="log", ylim=(0, 1.2 * top), title=f"{activation}: {key}"
            )
            shown = densities[::2]  # all would touch each other
            ax.set_xticks(shown, [f"{d:g}" for d in shown], minor=False)
            ax.minorticks_off()
            ax.grid(alpha=0.25)
    for ax in axes[-1]:
        ax.set_xlabel("density asked for")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside lower left",
        ncols=3,
    )
    save(figure, (RESULTS if QUICK else DOCS) / "spectrum.svg")


def spectrum_table(rows: list[dict]) -> str:
    """A line for each activation, budget and density: largest / mean of each start."""
    cells = {
        (r["activation"], r["budget"], r["asked"], r["start"]): r for r in rows
    }
    starts = [
        start for start in STARTS if any(r["start"] == start for r in rows)
    ]
    lines = []
    budgets, densities = kinds(rows)
    for activation in ACTIVATIONS:
        for name in budgets:
            for density in densities:
                found = {s: cells[activation, name, density, s] for s in starts}
                values = [
                    f"{r['largest']:.3g} / {r['mean']:.3g}"
                    for r in found.values()
                ]
                actual = (
                    [f"{found['SAO']['density']:.3g}"] if "SAO" in found else []
                )
                lines.append(
                    [activation, name, f"{density:g}", *values, *actual]
                )
    header = ["activation", "budget", "density", *starts]
    return markdown(
        [*header, "density of SAO"] if "SAO" in starts else header, lines
    )


def ranges(rows: list[dict]) -> str:
    lines = []
    for activation, start in itertools.product(ACTIVATIONS, STARTS):
        found = shares(rows, start, activation)
        if len(found):
            low, high = found.min(axis=0), found.max(axis=0)
            cells = [
                f"{a:.3g} to {b:.3g}" for a, b in zip(low, high, strict=True)
            ]
            lines.append([activation, start, *cells])
    return markdown(["activation", "start", "largest", "mean"], lines)


def spectrum(activation: str, kernels: Kernels, x: np.ndarray) -> np.ndarray:
    """Singular values of the Jacobian at every sample, by the chain rule."""
    function, slope = FUNCTIONS[activation]
    jacobian = np.broadcast_to(
        np.eye(x.shape[1]), (len(x), x.shape[1], x.shape[1])
    )
    for k, kernel in enumerate(kernels):
        x, jacobian = x @ kernel, jacobian @ kernel
        if k < len(kernels) - 1:
            x, jacobian = function(x), jacobian * slope(x)[:, None]
    return np.linalg.svd(jacobian, compute_uv=False)


def spectrum_mlp(activation: str, kernels: Kernels) -> keras.Model:
    layers = [
        keras.layers.Dense(
            WIDTH,
            "linear" if k == DEPTH - 1 else activation,
            use_bias=False,
            name=f"layer_{k}",
        )
        for k in range(DEPTH)
    ]
    model = keras.Sequential([keras.Input((len(kernels[0]),)), *layers])
    model.set_weights(kernels)
    model.compile(loss=crossentropy(), jit_compile=False)
    return model


def dense_kernels(inputs: int, seed: int) -> Kernels:
    return [
        ExactOrthogonal(1.0, seed=1000 * seed + k).sample(
            (inputs if k == 0 else WIDTH, WIDTH)
        )[0]
        for k in range(DEPTH)
    ]


def gains(activation: str) -> list[float]:
    return [critical_gain(activation)] * (DEPTH - 1) + [1.0]


class Plans:
    """Densities and masks of all budgets for one initialization and activation, scored once."""

    def __init__(
        self,
        model: keras.Model,
        seed: int,
        synflow: dict[float, saliency.Saliency],
    ):
        self._model, self._seed, self._synflow = model, seed, synflow
        self._weights = prunable_weights(model)
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(256, model.input_shape[1])).astype("float32")
        y = rng.integers(0, WIDTH, 256)
        self._scores = {
            name: score(model, 1.0, (x, y), batch_size=256, seed=seed).scores
            for name, score in (
                ("snip", saliency.snip),
                ("grasp", saliency.grasp),
            )
        }

    def __call__(
        self, name: str, density: float
    ) -> tuple[list[float], Kernels]:
        """Densities for orthogonal kernels, and masks."""
        paths = [weight.path for weight in self._weights]
        if name in ("uniform", "erk"):
            plan = getattr(budgets, name)(self._model, density)
            draws = [
                RandomSparse(plan[p], seed=500 * self._seed + k)
                for k, p in enumerate(paths)
            ]
            masks = [
                d.sample(w.shape)[1]
                for d, w in zip(draws, self._weights, strict=True)
            ]
            return [plan[path] for path in paths], masks
        if name == "synflow":
            if density not in self._synflow:
                scored = saliency.synflow(
                    self._model, density, on_collapse="ignore"
                )
                self._synflow[density] = scored
            scored = self._synflow[density]
        else:
            scores = list(self._scores[name].values())
            scored = saliency.Saliency(
                name, density, self._weights, scores, "ignore"
            )
        plan = scored.orthogonal_budget
        return [plan[path] for path in paths], [
            scored.masks[path] for path in paths
        ]


def permuted_blocks(
    density: float, gain: float, seed: int, relu: bool
) -> RamanujanOrthogonal:
    """SAO of the admissible degree nearest to the wanted one, by ratio."""
    fit = [
        d
        for d in range(1, WIDTH + 1)
        if WIDTH % d == 0 and not (relu and d % 2)
    ]
    degree = min(fit, key=lambda d: abs(np.log(d / (density * WIDTH))))
    return RamanujanOrthogonal(degree, gain, seed, relu=relu)


class Drawer:
    """The kernels of the four initializations; AI, which is slow, once for each set of masks."""

    def __init__(self, dense: Kernels, seed: int) -> None:
        self._dense, self._seed = dense, seed
        self._isometries: dict[bytes, Kernels] = {}

    def __call__(
        self, activation: str, densities: list[float], masks: Kernels
    ) -> Iterator[tuple[str, Kernels]]:
        """Name and kernels of every initialization that supports these shapes."""
        gain = gains(activation)
        yield (
            "base",
            [
                g * w * m
                for g, w, m in zip(gain, self._dense, masks, strict=True)
            ],
        )
        isometries = self._isometry(masks)
        yield "AI", [g * w for g, w in zip(gain, isometries, strict=True)]
        seeds = [100 * self._seed + k for k in range(DEPTH)]
        shapes = [mask.shape for mask in masks]
        settings = list(zip(densities, gain, seeds, strict=True))
        if len(set(shapes)) == 1:  # it takes square kernels only
            sao = [
                permuted_blocks(*setting, relu=activation == "relu")
                for setting in settings
            ]
            yield "SAO", [one.sample(shapes[0])[0] for one in sao]
        eoi = [ExactOrthogonal(*setting) for setting in settings]
        yield (
            "EOI",
            [
                one.sample(shape)[0]
                for one, shape in zip(eoi, shapes, strict=True)
            ],
        )

    def _isometry(self, masks: Kernels) -> Kernels:
        """Linear in the gain, so gain 1 is enough for all activations."""
        key = b"".join(np.packbits(mask).tobytes() for mask in masks)
        if key not in self._isometries:
            self._isometries[key] = [
                # Replaces a collapsed layer, which has no live entry.
                approximate_isometry(w * _scale(m), m, max_iterations=300)
                if m.any()
                else 0.0 * w
                for w, m in zip(self._dense, masks, strict=True)
            ]
        return self._isometries[key]


def _scale(mask: np.ndarray) -> float:
    return float(np.sqrt(mask.size / mask.sum()))


def spectra(
    inputs: int, seeds: int, chosen: list[str], densities: list[float]
) -> list[dict]:
    found: dict[tuple, list[tuple[float, float, float]]] = {}
    differences = []
    for seed in range(seeds):
        dense = dense_kernels(inputs, seed)
        drawer, synflow = Drawer(dense, seed), {}
        x = np.random.default_rng(seed).normal(size=(SAMPLES, inputs))
        for activation in ACTIVATIONS:
            start = [
                g * w for g, w in zip(gains(activation), dense, strict=True)
            ]
            model = spectrum_mlp(activation, start)
            # All weights times a constant: SynFlow's masks are those of every gain.
            plans = Plans(model, seed, synflow)
            for name, density in itertools.product(chosen, densities):
                for method, kernels in drawer(
                    activation, *plans(name, density)
                ):
                    values = spectrum(activation, kernels, x)
                    live = sum(np.count_nonzero(kernel) for kernel in kernels)
                    share = live / sum(kernel.size for kernel in kernels)
                    key = (activation, name, density, method)
                    of_seed = (values.max(axis=1).mean(), values.mean(), share)
                    found.setdefault(key, []).append(of_seed)
                    if seed == 0 and (name, density) == ("uniform", 0.2):
                        differences.append(compare(model, kernels, x, values))
                        model.set_weights(start)
            print(
                f"{inputs} inputs, seed {seed}, {activation}: done", flush=True
            )
    print(
        f"Largest difference from jacobian_singular_values: {max(differences):.1e}",
        flush=True,
    )
    names = (
        "activation",
        "budget",
        "asked",
        "start",
        "largest",
        "mean",
        "density",
    )
    means = {
        key: np.mean(values, axis=0).tolist() for key, values in found.items()
    }
    return [
        dict(zip(names, (*key, *mean), strict=True))
        for key, mean in means.items()
    ]


def compare(
    model: keras.Model, kernels: Kernels, x: np.ndarray, values: np.ndarray
) -> float:
    """Largest difference from the package's own function, relative to the largest value."""
    model.set_weights(kernels)
    found = jacobian_singular_values(model, x.astype("float32"))
    difference = float(np.abs(found - values).max() / max(values.max(), 1.0))
    if difference > 1e-3:
        raise AssertionError(
            f"NumPy's Jacobian is another one: it differs by {difference:.2g}"
        )
    return difference


if __name__ == "__main__":
    main(Orthogonal, Initializers, Drawing, Scores, Kso, Spectrum)
