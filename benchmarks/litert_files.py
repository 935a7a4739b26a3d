"""LiteRT files of sparse networks: size and time on XNNPACK.

    python benchmarks/litert_files.py NAME [options]

The measurements:

- `routes`: latency and size of every LiteRT route against dense float32 and dense int8.
- `blocks`: latency of LiteRT files of whole blocks against the best dense int8 and dense float32
  ones.
"""

import ctypes
import functools
import json
import math
import os
import struct
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from blocks import uneven_blocks
from record import RESULTS, chosen, described, finished, machine, markdown, parsed, write

from keras_sparse_ortho.export import ExportReport, export_litert, latencies
from keras_sparse_ortho.kernels import kernel_layouts, walk
from keras_sparse_ortho.orthogonal import regular_pattern


def exported(
    model: keras.Model, folder: Path, routes: list[str], data: np.ndarray, batch: int
) -> dict[str, ExportReport | str]:
    """A verified file for each route, or why there is none."""
    found: dict[str, ExportReport | str] = {}
    for route in routes:
        rows = {"representative_data": data} if route.startswith("int8") else {}
        rows |= {"sample": data[: max(8, batch)], "batch_size": batch}
        try:
            found[route] = export_litert(model, folder / f"{route}.tflite", mode=route, **rows)
        except (RuntimeError, ValueError) as error:
            found[route] = str(error)
    return found


# --- routes ---------------------------------------------------------------------------------------


L = keras.layers
THREADS = (1, 2)
STRUCTURES = {"elements": 1, "blocks 4x1": 4, "blocks 16x1": 16}
DENSE = ["float32", "float16", "dynamic_int8", "int8"]
SPARSE = ["float32+sp", "float16+sp"]
FILE = RESULTS / "litert.jsonl"


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
    files: list[Path] = []
    with tempfile.TemporaryDirectory() as scratch:
        for structure in structures:
            model = network(name, structure, density)
            shape = model.inputs[0].shape[1:]
            data = rng.standard_normal((max(32, batch), *shape)).astype("float32")
            folder = Path(scratch) / structure
            folder.mkdir()
            # The dense files do not depend on where the zeros are.
            routes = chosen or [*(DENSE if structure == "elements" else DENSE[2:]), *SPARSE]
            found = exported(model, folder, routes, data, batch)
            for route, result in found.items():
                row = {
                    "model": name,
                    "density": density,
                    "batch": batch,
                    "structure": structure,
                    "route": route,
                }
                if isinstance(result, str):
                    rows.append(row | {"reason": result})
                    continue
                path = folder / f"{route}.tflite"
                row |= {
                    "bytes": result.bytes,
                    "zstd_bytes": _zstd(path.read_bytes()),
                    "error": result.error,
                    "measure": "max" if route.startswith("float32") else "rms",
                    "max_abs_diff": result.max_abs_diff,
                }
                rows += [row | {"threads": threads} for threads in THREADS]
                files.append(path)
            print(f"  {structure}: {len(found)} routes", flush=True)
        for threads in THREADS:
            times = iter(latencies(files, threads, seconds / len(THREADS)))
            for row in rows:
                if row.get("threads") == threads:
                    row["ms"] = next(times)
    return rows


def _zstd(content: bytes) -> int | None:
    """Bytes under zstandard, level 12, if it is installed."""
    try:
        import zstandard
    except ImportError:
        return None
    return len(zstandard.ZstdCompressor(level=12).compress(content))


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
            f"`{route}`" + ("" if first.get("xnnpack", True) else " (crashes with XNNPACK)"),
            f"{first['bytes'] / 1e6:.2f}",
            "" if first["zstd_bytes"] is None else f"{first['zstd_bytes'] / 1e6:.2f}",
            "" if first.get("load_bytes") is None else f"{first['load_bytes'] / 1e6:.1f}",
            f"{max(r['error'] for r in these):.1e}",
        ]
        for batch, threads in columns:
            cell = [r["ms"] for r in these if (r["batch"], r["threads"]) == (batch, threads)]
            if not cell:
                line += ["", "", ""]
                continue
            off = next(
                r.get("faster_without_xnnpack", False)
                for r in these
                if (r["batch"], r["threads"]) == (batch, threads)
            )
            line.append(f"{cell[0]:.3f}" + "°" * off)
            line.append(f"{_dense(good, ('float32',), batch, threads) / cell[0]:.2f}")
            int8 = _dense(good, ("dynamic_int8", "int8"), batch, threads)
            line.append(f"{int8 / cell[0]:.2f}")
        lines.append(line)
    return markdown(header, lines)


def routes() -> None:
    """Latency and size of every LiteRT route against dense float32 and dense int8.

        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py routes  # all: about an hour
        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py routes --model mlp --density 0.1
        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py routes --table  # only the table

    One part is one model, density and batch size. Its figures go to `results/litert.jsonl` when it
    is done, and finished parts are not repeated (except with `--again`), so a run may be stopped.
    The table is `results/litert.md`.

    The networks are an MLP 1024-2048-2048-1024-1000 and a MobileNet-like CNN whose pointwise and
    output kernels are sparse: element by element, in blocks of 4x1 and of 16x1 (in x out). They
    are not trained: latency depends on where the zeros are, not on the values. All routes of one
    part, on 1 and 2 threads, are timed in interleaved rounds, each file in a process of its own
    (LiteRT's kernels disturb each other within one, see `bench` in `export/_worker.py`). Each file
    has run and agreed with Keras before. The lines of `+csr` and `+1x16`, the memory of loading and
    times without XNNPACK (`°`) were measured with commit 936aadd, which had them.
    """
    parser = described(routes)
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
    quick |= {"routes": ["float32", "dynamic_int8", "float32+sp"]}
    options = parsed(parser, quick)
    RESULTS.mkdir(parents=True, exist_ok=True)
    rows = finished(FILE)
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
        FILE.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not rows:
        parser.error("nothing is measured yet")
    write("litert", table(rows))


# --- - --------------------------------------------------------------------------------------------


_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # of Berkeley packet filters
_NUMBER, _FIRST_ARGUMENT = 0, 16  # offsets in seccomp_data
_FAIL, _ALLOW = 0x00050000 | 22, 0x7FFF0000  # with EINVAL
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # of prctl


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def deny() -> None:
    """Refuses AMX to this process, for good. OSError where that is not possible."""
    steps = [
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 3, _ARCH_PRCTL),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 0, 1, _REQUEST_PERMISSION),
        (_RETURN, 0, 0, _FAIL),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(steps), ctypes.addressof(held))
    system = ctypes.CDLL(None, use_errno=True)
    if system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or system.prctl(
        _SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "The system takes no seccomp filter")
    if system.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        raise OSError("AMX was allowed in spite of the filter")


# --- blocks ---------------------------------------------------------------------------------------

BLOCKS_FILE = RESULTS / "litert_blocks.jsonl"
DENSE_INT8 = ("dynamic_int8", "int8")
BLOCKS = ("dynamic_int8+blocks", "int8+blocks")
ROUTES = ["float32", *DENSE_INT8, "float32+blocks", *BLOCKS]


def blocks_mlp() -> keras.Model:
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


ANY = "mlp, any pattern"
COMPARED = ("mlp, regular pattern", ANY)  # of one run
NETWORKS = {"mlp": blocks_mlp, **dict.fromkeys(COMPARED, blocks_mlp)}
NETWORKS |= {"convolutions": convolutions, "cnn": cnn, "encoder": encoder}
# Network, side of a block, batch.
PARTS = [
    *((name, block, b) for name in ("mlp", *COMPARED) for block in (32, 64) for b in (1, 8)),
    *(("convolutions", block, 1) for block in (32, 64)),
    *(("cnn", block, batch) for block in (32, 64) for batch in (1, 8)),
    *(("encoder", block, batch) for block in (32, 64) for batch in (1, 8)),
]


def blocks_network(name: str, block: int) -> keras.Model:
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
        if name == ANY:
            live = uneven_blocks(count, fan_in / count, int(rng.integers(100)))
        matrix *= live.repeat(block, axis=0).repeat(block, axis=1) * math.sqrt(count / fan_in)
        layer.kernel.assign(layout.from_canonical(matrix, value.shape))
    if name == "cnn":  # statistics of a batch, or the signal would vanish on its way
        model(rng.standard_normal((32, *model.inputs[0].shape[1:])), training=True)
    return model


def blocks_part(name: str, block: int, batch: int, seconds: float, routes: list[str]) -> list[dict]:
    """Every route of one network, timed together."""
    model = blocks_network(name, block)
    shape = model.inputs[0].shape[1:]
    data = np.random.default_rng(1).standard_normal((max(24, batch), *shape)).astype("float32")
    rows, files = [], []
    with tempfile.TemporaryDirectory() as folder:
        for route, report in exported(model, Path(folder), routes, data, batch).items():
            row = {"network": name, "block": block, "batch": batch, "route": route}
            if isinstance(report, str):
                rows.append(row | {"reason": report})
                continue
            row |= {"bytes": report.bytes, "error": report.error, "machine": machine()}
            rows += [row | {"threads": threads} for threads in THREADS]
            files.append(report.path)
        for threads in THREADS:
            times = iter(latencies(files, threads, seconds / len(THREADS)))
            for row in rows:
                if row.get("threads") == threads:
                    row["ms"] = next(times)
    return rows


def _key(row: dict) -> tuple:
    """Network, block, batch and whether AMX was used."""
    return row["network"], row["block"], row["batch"], row["amx"]


def blocks_table(rows: list[dict]) -> str:
    """A line for each network, block, batch and number of threads."""
    good = [row for row in rows if "ms" in row]
    machines = "; ".join(dict.fromkeys(row["machine"] for row in good))
    text = "# LiteRT: whole blocks against dense int8\n\n"
    text += f"{machines}, Keras {keras.__version__}. Medians of interleaved short calls in ms; "
    text += "every file agreed with Keras before. `x int8`: how many times as fast as the best "
    text += "dense int8 file, dynamic or static, is the faster of the two int8 files of blocks; "
    text += "`x f32`: float32 blocks against dense float32. Density 1/8 (CNN, and 256 channels in "
    text += "blocks of 64: 1/8 to 1/4), in regular patterns, or in one as uneven as trained ones. "
    text += "AMX: whether XNNPACK used the processor's tiles. On a busy machine calls of more than "
    text += "a millisecond are interrupted, and their ratios high or low by chance.\n\n"
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


def blocks() -> None:
    """Latency of LiteRT files of whole blocks against the best dense int8 and dense float32 ones.

        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py blocks  # all: half an hour
        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py blocks --network mlp --batch 1
        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py blocks --table  # only the table
        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py blocks --without-amx

    The networks are an MLP 4 x 1024, four 3x3 convolutions of 256 channels at 14 x 14, a
    MobileNetV1- like CNN at 96 x 96 and an encoder of two blocks (64 tokens, 256 wide,
    MultiHeadAttention). Their kernels have one in eight blocks, those of fewer than 256 channels
    in the CNN one in four, so have those with four blocks a side, where one in eight is not
    regular, and smaller ones stay dense. They are not trained: latency depends on where the zeros
    are, not on the values.

    All files of one part, a network, block and batch, are timed in interleaved rounds of short
    calls, each in a process of its own, after each was run and compared with Keras. The files
    `1x16`, and dense int8 without XNNPACK, were measured with commit 936aadd. With `--without-amx`
    XNNPACK does without AMX on processors that have it (`without_amx.py`), and takes the kernels
    of others with AVX-512. Finished parts are not repeated, except with `--again`.
    """
    parser = described(blocks)
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
    rows = finished(BLOCKS_FILE)
    for one in [] if options.table else PARTS:
        chosen = (options.network, options.block, options.batch)
        if any(wanted and value not in wanted for wanted, value in zip(chosen, one, strict=True)):
            continue
        if (*one, amx) in map(_key, rows) and not options.again:
            continue
        print("{}, blocks of {}, batch {}".format(*one), flush=True)
        found = [r | {"amx": amx} for r in blocks_part(*one, options.seconds, options.routes)]
        rows = [r for r in rows if _key(r) != (*one, amx)] + found
        BLOCKS_FILE.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not rows:
        parser.error("nothing is measured yet")
    write("litert_blocks", blocks_table(rows))


if __name__ == "__main__":
    chosen(routes, blocks)
