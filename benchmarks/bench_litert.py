"""Latency and size of every LiteRT route against dense float32 and dense int8.

    KERAS_BACKEND=tensorflow python benchmarks/bench_litert.py                 # all: about an hour
    KERAS_BACKEND=tensorflow python benchmarks/bench_litert.py --model mlp --batch 1 --density 0.1
    KERAS_BACKEND=tensorflow python benchmarks/bench_litert.py --table         # only the table

One part is one model, density and batch size. Its figures go to `results/litert.json` when it is
done, and finished parts are not repeated (except with `--again`), so a run may be stopped.
The table is `results/litert.md`.

The networks are an MLP 1024-2048-2048-1024-1000 and a MobileNet-like CNN whose pointwise and
output kernels are sparse: element by element, in blocks of 4x1 and of 16x1 (in x out). They are
not trained: latency depends on where the zeros are, not on the values.
All routes of one part, on 1 and 2 threads, are timed in interleaved rounds, each file in a
process of its own (LiteRT's kernels disturb each other within one, see `bench` in
`export/_worker.py`), with and without XNNPACK where both agreed with Keras before; the faster one
counts and the table says which. Each file has run and agreed with Keras before (`export_routes`).
"""

import argparse
import functools
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from timing import RESULTS, machine, markdown, parsed, write

from keras_sparse_ortho.export import BenchmarkCase, ExportReport, export_routes, latencies

L = keras.layers
THREADS = (1, 2)
STRUCTURES = {"elements": 1, "blocks 4x1": 4, "blocks 16x1": 16}
FILE = RESULTS / "litert.json"


def mlp(inputs: int = 1024, widths: tuple[int, ...] = (2048, 2048, 1024)) -> keras.Model:
    hidden = [L.Dense(n, activation="relu", name=f"dense_{n}_{k}") for k, n in enumerate(widths)]
    return keras.Sequential(
        [keras.Input((inputs,), name="x"), *hidden, L.Dense(1000, name="head")], name="mlp"
    )


def cnn() -> keras.Model:
    layers: list[keras.Layer] = [
        keras.Input((96, 96, 3), name="x"),
        L.Conv2D(32, 3, strides=2, padding="same", use_bias=False, name="stem"),
        L.BatchNormalization(momentum=0.0),
        L.ReLU(),
    ]
    for k, (filters, stride) in enumerate(
        ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1), (512, 1))
    ):
        layers += [
            L.DepthwiseConv2D(3, stride, padding="same", use_bias=False, name=f"depthwise_{k}"),
            L.BatchNormalization(momentum=0.0),
            L.ReLU(),
            L.Conv2D(filters, 1, use_bias=False, name=f"pointwise_{k}"),
            L.BatchNormalization(momentum=0.0),
            L.ReLU(),
        ]
    return keras.Sequential(
        [*layers, L.GlobalAveragePooling2D(), L.Dense(1000, name="head")], name="cnn"
    )


MODELS = {
    "mlp": mlp,
    "cnn": cnn,
    "small mlp": functools.partial(mlp, 256, (512, 256)),  # of --quick
}


def block_sparse(shape: tuple[int, int], rows: int, density: float, seed: int) -> np.ndarray:
    """A kernel whose live entries come in blocks of `rows` x 1, with columns of one length.

    An exactly orthogonal kernel has such a mask; latency does not depend on the values.
    """
    rng = np.random.default_rng(seed)
    inputs, outputs = shape
    count = inputs // rows
    live = np.zeros(count * outputs, bool)
    live[rng.permutation(live.size)[: max(1, round(density * live.size))]] = True
    mask = np.repeat(live.reshape(count, outputs), rows, axis=0)
    kernel = rng.standard_normal((count * rows, outputs)) * mask
    norm = np.linalg.norm(kernel, axis=0, keepdims=True)
    kernel = np.divide(kernel, norm, out=np.zeros_like(kernel), where=norm > 0)
    return np.sqrt(2) * np.concatenate([kernel, np.zeros((inputs - len(kernel), outputs))])


def network(name: str, structure: str, density: float) -> keras.Model:
    """The network with its larger kernels sparse; stem and depthwise kernels stay dense."""
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    rng = np.random.default_rng(0)
    for k, layer in enumerate(model.layers):
        if isinstance(layer, L.Dense) or layer.name.startswith("pointwise"):
            shape = tuple(layer.kernel.shape)
            flat = (int(np.prod(shape[:-1])), int(shape[-1]))
            value = block_sparse(flat, STRUCTURES[structure], density, seed=k)
            layer.kernel.assign(value.reshape(shape))
        if isinstance(layer, L.Dense):
            layer.bias.assign(0.05 * rng.standard_normal(layer.bias.shape))
    if name == "cnn":  # statistics of a batch, or the signal would vanish on its way
        model(rng.standard_normal((32, *model.inputs[0].shape[1:])), training=True)
    return model


def part(
    name: str,
    density: float,
    batch: int,
    seconds: float,
    structures: list[str],
    chosen: list[str] | None,
) -> list[dict]:
    """Every route of the three structures, timed together."""
    rng = np.random.default_rng(1)
    rows: list[dict] = []
    cases: list[BenchmarkCase] = []
    with tempfile.TemporaryDirectory() as scratch:
        for structure in structures:
            model = network(name, structure, density)
            shape = model.inputs[0].shape[1:]
            data = rng.standard_normal((max(32, batch), *shape)).astype("float32")
            folder = Path(scratch) / structure
            folder.mkdir()
            routes = chosen
            if (
                routes is None and structure != "elements"
            ):  # what is dense does not depend on where the zeros are
                routes = {
                    4: ["float32+csr", "float32+sp"],
                    16: [
                        "dynamic_int8+1x16",
                        "dynamic_int8+sp",
                        "float32+csr",
                        "dynamic_int8",
                        "int8",
                    ],
                }[STRUCTURES[structure]]
            needs = routes is None or any(route.startswith("int8") for route in routes)
            found = export_routes(
                model,
                folder,
                routes,
                batch_size=batch,
                sample=data[: max(8, batch)],
                representative_data=data if needs else None,
            )
            for route, result in found.items():
                row = {
                    "model": name,
                    "density": density,
                    "batch": batch,
                    "structure": structure,
                    "route": route,
                }
                if not isinstance(result, ExportReport):
                    rows.append(row | {"reason": result.reason})
                    continue
                row |= {
                    "bytes": result.bytes,
                    "zstd_bytes": result.zstd_bytes,
                    "load_bytes": result.load_bytes,
                    "error": result.error,
                    "measure": result.measure,
                    "max_abs_diff": result.max_abs_diff,
                    "xnnpack": result.xnnpack,
                }
                (outcome,) = result.routes
                settings = [True] * outcome.xnnpack + [False] * outcome.without_xnnpack
                for threads in THREADS:
                    rows.append(row | {"threads": threads, "settings": settings})
                    path = folder / f"{route}.tflite"
                    cases += [
                        BenchmarkCase(path, {"x": data[:batch]}, s, threads) for s in settings
                    ]
            print(f"  {structure}: {len(found)} routes", flush=True)
        times = iter(latencies(cases, rounds=100, seconds=seconds))
        for row in rows:
            if "reason" not in row:
                found_ms = {setting: next(times) for setting in row.pop("settings")}
                row["ms"] = min(found_ms.values())
                row["faster_without_xnnpack"] = row["ms"] < 0.95 * found_ms.get(True, np.inf)
                row["default_ms"] = found_ms.get(True)
    return rows


def table(rows: list[dict]) -> str:
    """One table for each network and density; ratios above 1 are faster than the dense file."""
    text = "# LiteRT: every route against dense float32 and dense int8\n\n"
    text += f"{machine()}, Keras {keras.__version__}. Medians of interleaved calls; every file "
    text += "agreed with Keras before it was timed. A `°` is without "
    text += "XNNPACK, which was faster there by 5% or more (`load_litert` sets it). "
    text += "`x f32` and `x int8`: how many times faster "
    text += "than dense float32 and than the faster of the dense int8 files, at the same threads "
    text += "and batch. `error` is max|d|/max(1, max|y|) for float32 and sqrt(mean d²)/sqrt(mean "
    text += "y²) for the others.\n\n"
    keys = sorted({(r["model"], r["density"]) for r in rows}, key=lambda k: (k[0] != "mlp", -k[1]))
    for name, density in keys:
        mine = [r for r in rows if (r["model"], r["density"]) == (name, density)]
        text += f"## {name.upper()}, density {density:g}\n\n" + _summary(mine)
        text += _latency_table(mine) + "\n"
        failed = sorted({(r["structure"], r["route"], r["reason"]) for r in mine if "reason" in r})
        for structure, route, reason in failed:
            text += f"- No file: `{route}` on {structure}: {reason.splitlines()[0][:240]}\n"
        text += "\n"
    return text


def _dense(mine: list[dict], routes: tuple[str, ...], batch: int, threads: int) -> float:
    return min(
        r["ms"]
        for r in mine
        if r["route"] in routes and (r["batch"], r.get("threads")) == (batch, threads)
    )


def _summary(mine: list[dict]) -> str:
    good = [r for r in mine if "ms" in r]
    lines = []
    for batch in sorted({r["batch"] for r in good}):
        for threads in THREADS:
            here = [r for r in good if (r["batch"], r["threads"]) == (batch, threads)]
            best = min(here, key=lambda r: r["ms"])
            ratio = _dense(good, ("dynamic_int8", "int8"), batch, threads) / best["ms"]
            verdict = f"{ratio:.2f} times as fast as dense int8"
            if best["route"] in ("dynamic_int8", "int8"):
                verdict = "no sparse route beats dense int8"
            lines.append(
                f"- batch {batch}, {threads} thread{'s' * (threads > 1)}: `{best['route']}` "
                f"({best['structure']}), {verdict}"
            )
    for label, key in (("file", "bytes"), ("file under zstd", "zstd_bytes")):
        least = min(good, key=lambda r: r[key])
        lines.append(
            f"- smallest {label}: `{least['route']}` ({least['structure']}), "
            f"{least[key] / 1e6:.3f} MB"
        )
    return "\n".join(lines) + "\n\n"


def _latency_table(mine: list[dict]) -> str:
    good = [r for r in mine if "ms" in r]
    columns = sorted({(r["batch"], r["threads"]) for r in good})
    header = ["zeros", "route", "MB", "zstd MB", "load MB", "error"]
    for batch, threads in columns:
        header += [f"b{batch} t{threads} ms", "x f32", "x int8"]
    lines = []
    for structure, route in dict.fromkeys((r["structure"], r["route"]) for r in good):
        these = [r for r in good if (r["structure"], r["route"]) == (structure, route)]
        first = these[0]
        line = [
            structure,
            f"`{route}`" + ("" if first["xnnpack"] else " (crashes with XNNPACK)"),
            f"{first['bytes'] / 1e6:.2f}",
            "" if first["zstd_bytes"] is None else f"{first['zstd_bytes'] / 1e6:.2f}",
            "" if first["load_bytes"] is None else f"{first['load_bytes'] / 1e6:.1f}",
            f"{max(r['error'] for r in these):.1e}",
        ]
        for batch, threads in columns:
            cell = [r["ms"] for r in these if (r["batch"], r["threads"]) == (batch, threads)]
            if not cell:
                line += ["", "", ""]
                continue
            off = next(
                r["faster_without_xnnpack"]
                for r in these
                if (r["batch"], r["threads"]) == (batch, threads)
            )
            line.append(f"{cell[0]:.3f}" + "°" * off)
            line.append(f"{_dense(good, ('float32',), batch, threads) / cell[0]:.2f}")
            int8 = _dense(good, ("dynamic_int8", "int8"), batch, threads)
            line.append(f"{int8 / cell[0]:.2f}")
        lines.append(line)
    return markdown(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--density", type=float, action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing in one part")
    parser.add_argument("--again", action="store_true", help="measure parts that stand already")
    parser.add_argument("--table", action="store_true", help="write the table only")
    parser.add_argument("--structures", nargs="+", choices=STRUCTURES, default=[*STRUCTURES])
    parser.add_argument("--routes", nargs="+", help="instead of all that fit")
    quick = {"model": ["small mlp"], "density": [0.1], "batch": [1], "seconds": 2.0}
    quick |= {"structures": ["blocks 16x1"]}
    quick |= {"routes": ["float32", "dynamic_int8", "dynamic_int8+1x16"]}
    options = parsed(parser, quick)
    RESULTS.mkdir(parents=True, exist_ok=True)
    rows = json.loads(FILE.read_text()) if FILE.exists() else []
    parts = [
        (name, density, batch)
        for name in options.model or ("mlp", "cnn")
        for density in options.density or (0.1, 0.05, 0.02)
        for batch in options.batch or (1, 8, 64)
    ]
    for one in [] if options.table else parts:
        there = {(r["model"], r["density"], r["batch"]) for r in rows}
        if one in there and not options.again:
            continue
        print("{}, density {:g}, batch {}".format(*one), flush=True)
        found = part(*one, options.seconds, options.structures, options.routes)
        rows = [r for r in rows if (r["model"], r["density"], r["batch"]) != one] + found
        FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    if not rows:
        parser.error("nothing is measured yet")
    write("litert", table(rows))


if __name__ == "__main__":
    main()
