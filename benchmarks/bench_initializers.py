"""All sparse initializers at width 1024, and AI against the loop of its reference.

    export KERAS_BACKEND=tensorflow OPENBLAS_NUM_THREADS=1
    taskset -c 0 python benchmarks/bench_initializers.py          # one core, some minutes
    python benchmarks/bench_initializers.py --quick               # small widths

Writes `results/initializers.md`. The reference's loop is a copy in NumPy, float32, with its
gradient written out: SGD or Adam at a rate of 0.1 on `||W W^T - I||_F`, as published. It gets
`STEPS` steps; then ours must reach its smallest error, from the same start and mask.
"""

import argparse
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Otherwise BLAS threads that wait for each other on a shared machine dominate the time.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import keras
import numpy as np
from timing import interleaved, machine, markdown, parsed, write

from keras_sparse_ortho.initializers import (
    ApproximateIsometry,
    ExactOrthogonal,
    RamanujanOrthogonal,
    RandomSparse,
)
from keras_sparse_ortho.orthogonal import Block, NByM, approximate_isometry

STEPS, RATE = 1000, 0.1
AI_ITERATIONS = 100
DENSITY = 0.125


def plain_loop(start: np.ndarray, mask: np.ndarray, rule: str, steps: int) -> tuple[float, float]:
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
                error, loop = plain_loop(start, mask, rule, steps)
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
        "EOI": ExactOrthogonal(DENSITY, seed=1),
        "EOI, Block(16, 1)": ExactOrthogonal(DENSITY, seed=1, structure=Block(16, 1)),
        "EOI, 2:4": ExactOrthogonal(DENSITY, seed=1, structure=NByM(2, 4)),
        "EOI, 2:4, full": ExactOrthogonal(0.5, seed=1, structure=NByM(2, 4)),
        "RandomSparse of glorot_uniform": RandomSparse(DENSITY, "glorot_uniform", seed=1),
        "SAO (RamanujanOrthogonal)": RamanujanOrthogonal(round(DENSITY * width), seed=1),
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

    slow = ApproximateIsometry(
        DENSITY, seed=1, max_iterations=AI_ITERATIONS, tolerance=0.0, min_decrease=0.0
    )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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


if __name__ == "__main__":
    main()
