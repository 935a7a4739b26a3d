"""Latency of LiteRT files of whole blocks against the best dense int8 and dense float32 ones.

    KERAS_BACKEND=tensorflow python benchmarks/bench_litert_blocks.py            # all: half an hour
    KERAS_BACKEND=tensorflow python benchmarks/bench_litert_blocks.py --network mlp --batch 1
    KERAS_BACKEND=tensorflow python benchmarks/bench_litert_blocks.py --table    # only the table
    KERAS_BACKEND=tensorflow python benchmarks/bench_litert_blocks.py --without-amx

The networks are an MLP 4 x 1024, four 3x3 convolutions of 256 channels at 14 x 14, a MobileNetV1-
like CNN at 96 x 96 and an encoder of two blocks (64 tokens, 256 wide, MultiHeadAttention). Their
kernels have one in eight blocks, those of fewer than 256 channels in the CNN one in four, so have
those with four blocks a side, where one in eight is not regular, and smaller ones stay dense. They
are not trained: latency depends on where
the zeros are, not on the values.

All files of one part, a network, block and batch, on one and two threads, are timed in interleaved
rounds of short calls, each in a process of its own, after each was run and compared with Keras
(`export_routes`). Dense int8 files are timed with and without XNNPACK, and the fastest counts. With
`--without-amx` XNNPACK does without AMX on processors that have it (`without_amx.py`), and takes
the kernels of others with AVX-512.
Finished parts are not repeated, except with `--again`.
"""

import argparse
import json
import math
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from bench_litert import cnn
from timing import RESULTS, machine, markdown, parsed, write
from without_amx import deny

from keras_sparse_ortho.export import BenchmarkCase, ExportReport, export_routes, latencies
from keras_sparse_ortho.kernels import kernel_layouts, walk
from keras_sparse_ortho.orthogonal import regular_pattern

L = keras.layers
FILE = RESULTS / "litert_blocks.json"
DENSE_INT8 = ("dynamic_int8", "int8")
BLOCKS = ("dynamic_int8+blocks", "int8+blocks")
ROUTES = ["float32", *DENSE_INT8, "dynamic_int8+1x16", "float32+blocks", *BLOCKS]


def mlp() -> keras.Model:
    layers = [L.Dense(1024, activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((1024,), name="x"), *layers], name="mlp")


def convolutions() -> keras.Model:
    layers = [L.Conv2D(256, 3, padding="same", activation="relu") for _ in range(4)]
    return keras.Sequential([keras.Input((14, 14, 256), name="x"), *layers], name="convolutions")


def encoder() -> keras.Model:
    x = inputs = keras.Input((64, 256), name="x")
    for _ in range(2):
        h = L.LayerNormalization()(x)
        x = L.Add()([x, L.MultiHeadAttention(4, 64)(h, h)])
        h = L.Dense(1024, activation="relu")(L.LayerNormalization()(x))
        x = L.Add()([x, L.Dense(256)(h)])
    return keras.Model(inputs, x, name="encoder")


NETWORKS = {"mlp": mlp, "convolutions": convolutions, "cnn": cnn, "encoder": encoder}
# Network, side of a block, batch.
PARTS = [
    *(("mlp", block, batch) for block in (32, 64) for batch in (1, 8)),
    *(("convolutions", block, 1) for block in (32, 64)),
    *(("cnn", block, batch) for block in (32, 64) for batch in (1, 8)),
    *(("encoder", block, batch) for block in (32, 64) for batch in (1, 8)),
]


def network(name: str, block: int) -> keras.Model:
    """The network with one in eight, or four, blocks of each large kernel."""
    keras.utils.set_random_seed(0)
    model, rng = NETWORKS[name](), np.random.default_rng(0)
    for layer in (inner for inner, _ in walk(model, "")):
        if not isinstance(layer, L.Dense | L.EinsumDense | L.Conv2D):
            continue
        layout = kernel_layouts(layer)["kernel"]
        value = keras.ops.convert_to_numpy(layer.kernel)
        matrix = layout.to_canonical(np.array(value))
        inputs, outputs = matrix.shape[-2:]
        if inputs % block or outputs % block or min(inputs, outputs) < 4 * block:
            continue
        count, lines = inputs // block, outputs // block
        step = count // math.gcd(count, lines)
        fan_in = max(count // (8 if name != "cnn" or inputs >= 256 else 4) // step, 1) * step
        live = np.zeros((count, lines), bool)
        live[regular_pattern(count, lines, fan_in, rng), np.arange(lines)[:, None]] = True
        matrix *= live.repeat(block, axis=0).repeat(block, axis=1) * math.sqrt(count / fan_in)
        layer.kernel.assign(layout.from_canonical(matrix, value.shape))
    if name == "cnn":  # statistics of a batch, or the signal would vanish on its way
        model(rng.standard_normal((32, *model.inputs[0].shape[1:])), training=True)
    return model


def part(name: str, block: int, batch: int, seconds: float, routes: list[str]) -> list[dict]:
    """Every route of one network, timed together."""
    model = network(name, block)
    shape = model.inputs[0].shape[1:]
    data = np.random.default_rng(1).standard_normal((max(24, batch), *shape)).astype("float32")
    rows, cases, owners = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        found = export_routes(
            model, folder, routes, batch_size=batch, sample=data[:16], representative_data=data
        )
        for route, report in found.items():
            row = {"network": name, "block": block, "batch": batch, "route": route}
            if not isinstance(report, ExportReport):
                rows.append(row | {"reason": report.reason})
                continue
            row |= {"bytes": report.bytes, "error": report.error, "machine": machine()}
            (outcome,) = report.routes
            for threads in (1, 2):
                rows.append(row | {"threads": threads})
                settings = [True] * outcome.xnnpack
                settings += [False] * (route in DENSE_INT8 and outcome.without_xnnpack)
                path = Path(folder) / f"{route}.tflite"
                for xnnpack in settings:
                    cases.append(BenchmarkCase(path, {"x": data[:batch]}, xnnpack, threads))
                    owners.append(rows[-1])
        for row, ms in zip(owners, latencies(cases, rounds=200, seconds=seconds), strict=True):
            row["ms"] = min(ms, row.get("ms", math.inf))
    return rows


def _key(row: dict) -> tuple:
    """Network, block, batch and whether AMX was used."""
    return row["network"], row["block"], row["batch"], row["amx"]


def table(rows: list[dict]) -> str:
    """A line for each network, block, batch and number of threads."""
    good = [row for row in rows if "ms" in row]
    machines = "; ".join(dict.fromkeys(row["machine"] for row in good))
    text = "# LiteRT: whole blocks against dense int8\n\n"
    text += f"{machines}, Keras {keras.__version__}. Medians of interleaved short calls in ms; "
    text += "every file agreed with Keras before. `x int8`: how many times as fast as the best "
    text += "dense int8 file, dynamic or static, is the faster of the two int8 files of blocks; "
    text += "`x f32`: float32 blocks against dense float32. Density 1/8 (CNN, and 256 channels in "
    text += "blocks of 64: 1/8 to 1/4). AMX: whether XNNPACK used the processor's tiles. On a "
    text += "busy machine calls of more than a millisecond are interrupted, and their ratios high "
    text += "or low by chance.\n\n"
    header = ["network", "block", "batch", "AMX", "threads", "f32", "int8", "int8 1x16"]
    header += ["f32+blocks", "dynamic+blocks", "int8+blocks", "x int8", "x f32", "int8 kB", "kB"]
    lines = []
    keys = dict.fromkeys((*_key(r), r["threads"]) for r in good)
    for key in keys:
        of = {r["route"]: r for r in good if (*_key(r), r["threads"]) == key}
        ms = {route: row["ms"] for route, row in of.items()}
        dense = min((route for route in DENSE_INT8 if route in ms), key=ms.__getitem__)
        best = min((route for route in BLOCKS if route in ms), key=ms.__getitem__)
        cells = [ms.get(r) for r in ("float32", dense, "dynamic_int8+1x16", "float32+blocks")]
        cells += [ms.get(route) for route in BLOCKS]
        ratios = [ms[dense] / ms[best]]
        if "float32+blocks" in ms:
            ratios.append(ms["float32"] / ms["float32+blocks"])
        lines.append(
            [
                *map(str, (*key[:3], "yes" if key[3] else "no", key[4])),
                *("" if cell is None else f"{cell:.3f}" for cell in cells),
                *(f"{ratio:.2f}" for ratio in ratios),
                *[""] * (2 - len(ratios)),
                *(f"{of[route]['bytes'] / 1e3:.0f}" for route in (dense, best)),
            ]
        )
    text += markdown(header, lines) + "\n"
    for row in rows:
        if "reason" in row:
            text += f"- No file: `{row['route']}` of {row['network']}, blocks of {row['block']}: "
            text += f"{row['reason'].splitlines()[0][:200]}\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=NETWORKS, action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--block", type=int, action="append")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing in one part")
    parser.add_argument("--without-amx", action="store_true", help="kernels of other processors")
    parser.add_argument("--again", action="store_true", help="measure parts that stand already")
    parser.add_argument("--table", action="store_true", help="write the table only")
    parser.add_argument("--routes", nargs="+", default=ROUTES)
    quick = {"network": ["mlp"], "batch": [1], "block": [64], "seconds": 2.0}
    quick |= {"routes": ["float32", "dynamic_int8", "float32+blocks", "dynamic_int8+blocks"]}
    options = parsed(parser, quick)
    RESULTS.mkdir(parents=True, exist_ok=True)
    amx = not options.without_amx and "amx_int8" in Path("/proc/cpuinfo").read_text()
    if options.without_amx:
        deny()
    rows = json.loads(FILE.read_text()) if FILE.exists() else []
    for one in [] if options.table else PARTS:
        chosen = (options.network, options.block, options.batch)
        if any(wanted and value not in wanted for wanted, value in zip(chosen, one, strict=True)):
            continue
        if (*one, amx) in map(_key, rows) and not options.again:
            continue
        print("{}, blocks of {}, batch {}".format(*one), flush=True)
        found = [r | {"amx": amx} for r in part(*one, options.seconds, options.routes)]
        rows = [r for r in rows if _key(r) != (*one, amx)] + found
        FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    if not rows:
        parser.error("nothing is measured yet")
    write("litert_blocks", table(rows))


if __name__ == "__main__":
    main()
