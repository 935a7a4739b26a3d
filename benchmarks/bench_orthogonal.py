"""Speed and memory of EOI against Keras' dense QR initializer and against a plain loop.

    python benchmarks/bench_orthogonal.py            # a few minutes
    python benchmarks/bench_orthogonal.py --quick    # small widths only

Writes `results/orthogonal.md`. The plain loop is a copy of the published procedure: it rotates
two columns of the whole matrix, and counts all nonzeros, once a rotation.
"""

import argparse
import os
import subprocess
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from timing import interleaved, machine, markdown, write

from keras_sparse_ortho.orthogonal import exact_orthogonal

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="widths up to 2048 only")
    quick = parser.parse_args().quick
    rows = []
    for n in [256, 1024, 2048] if quick else [256, 1024, 2048, 4096]:
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
    for n in (256, 1024):
        rivals = {"eoi": lambda n=n: eoi(n), "loop": lambda n=n: plain_loop(n, DENSITY, 1)}
        times = interleaved(rivals, 3)
        ratio = times["loop"] / times["eoi"]
        rows.append(
            [str(n), f"{1e3 * times['eoi']:.1f}", f"{1e3 * times['loop']:.0f}", f"{ratio:.0f}"]
        )
    text += "\nAgainst the published procedure as a plain loop:\n\n"
    text += markdown(["n", "EOI [ms]", "plain loop [ms]", "times faster"], rows)

    rows = []
    for density in (0.1,) if quick else (0.1, 0.5, 1.0):
        for n in (1024, 2048) if quick else (1024, 2048, 4096, 8192):
            rivals = {
                "eoi": lambda n=n, d=density: eoi(n, d),
                "write": lambda n=n: allocate(n),
            }
            times = interleaved(rivals, 3)
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
    write("orthogonal", text)


if __name__ == "__main__":
    main()
