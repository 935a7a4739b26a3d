"""Speed and memory of EOI against Keras' dense QR initializer and against a plain loop.

    python benchmarks/bench_orthogonal.py            # a few minutes
    python benchmarks/bench_orthogonal.py --quick    # small widths, into out/quick

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
from timing import interleaved, machine, markdown, parsed, write

from keras_sparse_ortho.orthogonal import Block, RegularBlocks, exact_orthogonal, regular_blocks

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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


if __name__ == "__main__":
    main()
