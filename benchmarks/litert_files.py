"""LiteRT files of sparse networks: size and time on XNNPACK.

    python benchmarks/litert_files.py NAME [options]

The measurements:

- `routes`: latency and size of sparse encodings against dense float32, int8 and int4.
- `blocks`: latency of LiteRT files of whole blocks against the best dense int8, int4 and float32
  ones.
- `arm64`: instructions of these files on emulated Arm processors.
"""

import functools
import itertools
import json
import math
import os
import subprocess
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from blocks import uneven_blocks
from record import RESULTS, chosen, described, finished, machine, markdown, parsed, write

from keras_sparse_ortho.export import ExportReport, export_litert, latencies, load_litert
from keras_sparse_ortho.export._worker import refuse_amx
from keras_sparse_ortho.kernels import kernel_layouts, walk
from keras_sparse_ortho.orthogonal import regular_pattern

THREADS = (1, 2)


def exported(
    model: keras.Model, folder: Path, routes: list[str], data: np.ndarray, batch: int
) -> dict[str, ExportReport | str]:
    """A verified file for each route, or why there is none."""
    found: dict[str, ExportReport | str] = {}
    for route in routes:
        rows = {"representative_data": data} if route.startswith("int") else {}
        rows |= {"sample": data[: max(8, batch)], "batch_size": batch}
        if "int4" in route:  # untrained weights lose much in 4 bits, and take as long
            rows["tolerance"] = 1.0
        try:
            found[route] = export_litert(model, folder / f"{route}.tflite", mode=route, **rows)
        except (RuntimeError, ValueError) as error:
            found[route] = str(error)
    return found


def rows_for(model: keras.Model, count: int) -> np.ndarray:
    shape = model.inputs[0].shape[1:]
    return np.random.default_rng(1).standard_normal((count, *shape)).astype("float32")


def timed_files(
    model: keras.Model, routes: list[str], batch: int, seconds: float, row: dict
) -> list[dict]:
    """Lines of every route of a model, timed together."""
    data, rows, files = rows_for(model, max(32, batch)), [], []
    with tempfile.TemporaryDirectory() as folder:
        for route, report in exported(model, Path(folder), routes, data, batch).items():
            line = row | {"batch": batch, "route": route, "machine": machine()}
            if isinstance(report, str):
                rows.append(line | {"reason": report})
                continue
            line |= {"bytes": report.bytes, "gzip_bytes": report.gzip_bytes, "error": report.error}
            line |= {"zstd_bytes": _zstd(Path(report.path).read_bytes())}
            rows += [line | {"threads": threads} for threads in THREADS]
            files.append(report.path)
        for threads in THREADS:
            times = iter(latencies(files, threads, seconds / len(THREADS)))
            for line in rows:
                if line.get("threads") == threads:
                    line["ms"] = next(times)
    return rows


def _zstd(content: bytes) -> int | None:
    """Bytes under zstandard, level 12, if it is installed."""
    try:
        import zstandard
    except ImportError:
        return None
    return len(zstandard.ZstdCompressor(level=12).compress(content))


# --- routes ---------------------------------------------------------------------------------------


L = keras.layers
DENSE_INTEGERS = ("dynamic_int8", "int8", "dynamic_int4", "int4")
DENSE = ["float32", "float16", *DENSE_INTEGERS]
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


def sparse_kernel(shape: tuple[int, int], density: float, seed: int) -> np.ndarray:
    """Random live entries; columns have the norm that keeps the signal behind a ReLU."""
    rng = np.random.default_rng(seed)
    live = np.zeros(math.prod(shape), bool)
    live[rng.permutation(live.size)[: max(1, round(density * live.size))]] = True
    kernel = rng.standard_normal(shape) * live.reshape(shape)
    norm = np.linalg.norm(kernel, axis=0, keepdims=True)
    return np.sqrt(2) * np.divide(kernel, norm, out=np.zeros_like(kernel), where=norm > 0)


def network(name: str, density: float) -> keras.Model:
    """The network with its larger kernels sparse; stem and depthwise kernels stay dense."""
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    rng = np.random.default_rng(0)
    for k, layer in enumerate(model.layers):
        if isinstance(layer, L.Dense) or layer.name.startswith("pointwise"):
            shape = tuple(layer.kernel.shape)
            flat = (int(np.prod(shape[:-1])), int(shape[-1]))
            layer.kernel.assign(sparse_kernel(flat, density, seed=k).reshape(shape))
        if isinstance(layer, L.Dense):
            layer.bias.assign(0.05 * rng.standard_normal(layer.bias.shape))
    if name == "cnn":  # statistics of a batch, or the signal would vanish on its way
        model(rng.standard_normal((32, *model.inputs[0].shape[1:])), training=True)
    return model


def table(rows: list[dict]) -> str:
    """One table for each network and density; ratios above 1 are faster than the dense file."""
    good = [row for row in rows if "ms" in row]
    text = "# LiteRT: sparse encodings against dense files\n\n"
    text += f"{'; '.join(dict.fromkeys(row['machine'] for row in good))}, Keras "
    text += f"{keras.__version__}. Random live entries, not trained. Medians of interleaved calls; "
    text += "every file agreed with Keras before it was timed. `x int8`, `x int4`: how many times "
    text += "as fast as the faster one of the two dense files, dynamic and static, at the same "
    text += "threads and batch. `error` is max|d|/max(1, max|y|) for float32 and sqrt(mean "
    text += "d²)/sqrt(mean y²) for the others; int4 is rounded after training.\n\n"
    keys = sorted({(r["model"], r["density"]) for r in good}, key=lambda k: (k[0] != "mlp", -k[1]))
    for name, density in keys:
        mine = [r for r in good if (r["model"], r["density"]) == (name, density)]
        text += f"## {name.upper()}, density {density:g}\n\n{_latency_table(mine)}\n"
        text += _fastest(mine) + "\n"
    for row in rows:
        if "reason" in row:
            text += f"- No file: `{row['route']}` of {row['model']}: {row['reason'][:240]}\n"
    return text


def _fastest(mine: list[dict]) -> str:
    """A line for each batch and number of threads."""
    text = ""
    for batch, threads in sorted({(r["batch"], r["threads"]) for r in mine}):
        ms = {r["route"]: r["ms"] for r in mine if (r["batch"], r["threads"]) == (batch, threads)}
        first, best = (min(ms.keys() & names, key=ms.__getitem__) for names in (SPARSE, DENSE))
        text += f"- batch {batch}, {threads} thread{'s' * (threads > 1)}: `{first}` is "
        text += f"{ms[best] / ms[first]:.2f} times as fast as the fastest dense file, `{best}`\n"
    return text


def _latency_table(mine: list[dict]) -> str:
    columns = sorted({(r["batch"], r["threads"]) for r in mine})
    header = ["route", "MB", "gzip MB", "zstd MB", "error"]
    for batch, threads in columns:
        header += [f"b{batch} t{threads} ms", "x int8", "x int4"]
    lines = []
    for route in dict.fromkeys(r["route"] for r in mine):
        these = [r for r in mine if r["route"] == route]
        sizes = (these[0][key] for key in ("bytes", "gzip_bytes", "zstd_bytes"))
        line = [f"`{route}`", *("" if size is None else f"{size / 1e6:.2f}" for size in sizes)]
        line.append(f"{max(r['error'] for r in these):.1e}")
        for column in columns:
            ms = {r["route"]: r["ms"] for r in mine if (r["batch"], r["threads"]) == column}
            line.append(f"{ms[route]:.3f}")
            for kind in ("int8", "int4"):
                dense = [ms[one] for one in DENSE_INTEGERS if one in ms and kind in one]
                line.append(f"{min(dense) / ms[route]:.2f}" if dense else "")
        lines.append(line)
    return markdown(header, lines)


def routes() -> None:
    """Latency and size of sparse encodings against dense float32, int8 and int4.

        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py routes  # all: 20 minutes
        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py routes --model mlp --density 0.1
        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py routes --table  # only the table

    One part is one model, density and batch size. Its figures go to `results/litert.jsonl` when it
    is done, and finished parts are not repeated (except with `--again`), so a run may be stopped.
    The table is `results/litert.md`.

    The networks are an MLP 1024-2048-2048-1024-1000 and a MobileNet-like CNN whose pointwise and
    output kernels are sparse, entry by entry. They are not trained: latency depends on where the
    zeros are, not on the values. All routes of one part, on 1 and 2 threads, are timed in
    interleaved rounds, each file in a process of its own (LiteRT's kernels disturb each other
    within one, see `bench` in `export/_worker.py`).
    """
    parser = described(routes)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--density", type=float, action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing in one part")
    parser.add_argument("--again", action="store_true", help="measure parts that stand already")
    parser.add_argument("--table", action="store_true", help="write the table only")
    parser.add_argument("--routes", nargs="+", default=[*DENSE, *SPARSE])
    quick = {"model": ["small mlp"], "density": [0.1], "batch": [1], "seconds": 2.0}
    quick |= {"routes": ["float32", "dynamic_int8", "float32+sp"]}
    options = parsed(parser, quick)
    RESULTS.mkdir(parents=True, exist_ok=True)
    rows = finished(FILE)
    parts = [
        (name, density, batch)
        for name in options.model or ("mlp", "cnn")
        for density in options.density or (0.1, 0.05, 0.02)
        for batch in options.batch or (1, 8)
    ]
    for one in [] if options.table else parts:
        there = {(r["model"], r["density"], r["batch"]) for r in rows}
        if one in there and not options.again:
            continue
        print("{}, density {:g}, batch {}".format(*one), flush=True)
        name, density, batch = one
        row = {"model": name, "density": density}
        found = timed_files(network(name, density), options.routes, batch, options.seconds, row)
        rows = [r for r in rows if (r["model"], r["density"], r["batch"]) != one] + found
        FILE.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not rows:
        parser.error("nothing is measured yet")
    write("litert", table(rows))


# --- blocks ---------------------------------------------------------------------------------------

BLOCKS_FILE = RESULTS / "litert_blocks.jsonl"
BLOCKS = ("dynamic_int8+blocks", "int8+blocks")
ROUTES = ["float32", *DENSE_INTEGERS, "float32+blocks", *BLOCKS]


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


def _key(row: dict) -> tuple:
    where = processor(row["machine"], row["amx"])
    return row["network"], row["block"], row["batch"], where


def processor(machine: str, amx: bool) -> str:
    """Whether AMX was used, or the name of one that lacks it."""
    return "EPYC" if machine.startswith("AMD") else "yes" if amx else "no"


def blocks_table(rows: list[dict]) -> str:
    """A line for each network, block, batch and number of threads; and instructions on Arm."""
    counted, good = ([row for row in rows if key in row] for key in ("instructions", "ms"))
    machines = "; ".join(dict.fromkeys(row["machine"] for row in good))
    text = "# LiteRT: whole blocks against dense int8 and int4\n\n"
    text += f"{machines}, Keras {keras.__version__}. Medians of interleaved short calls in ms; "
    text += "every file agreed with Keras before. `x int8`, `x int4`: how many times as fast as "
    text += "the better dense file, dynamic or static, is the faster of the two int8 files of "
    text += "blocks; `x f32`: float32 blocks against dense float32. int4: Dense kernels alone. "
    text += "Density 1/8 (CNN, and 256 channels in blocks of 64: 1/8 to 1/4), in regular patterns, "
    text += "or in one as uneven as trained ones. AMX: whether XNNPACK used the tiles of the "
    text += "Xeon; the EPYC (Zen 4) has none. On a busy machine calls of more than a millisecond "
    text += "are interrupted, and their ratios high or low by chance.\n\n"
    header = ["network", "block", "batch", "AMX", "threads", "f32", "int8", "int4", "f32+blocks"]
    header += ["dynamic+blocks", "int8+blocks", "x int8", "x int4", "x f32"]
    header += ["int8 kB", "int4 kB", "kB"]
    lines = []
    for key in dict.fromkeys((*_key(r), r["threads"]) for r in good):
        of = {r["route"]: r for r in good if (*_key(r), r["threads"]) == key}
        ms = {route: row["ms"] for route, row in of.items()}
        groups = (DENSE_INTEGERS[:2], DENSE_INTEGERS[2:], BLOCKS)
        int8, int4, best = (min(ms.keys() & set(g), key=ms.get, default=None) for g in groups)
        cells = [ms.get(route) for route in ("float32", int8, int4, "float32+blocks", *BLOCKS)]
        pairs = ((int8, best), (int4, best), ("float32", "float32+blocks"))
        ratios = [ms[a] / ms[b] if a in ms and b in ms else None for a, b in pairs]
        line = [*map(str, key), *("" if cell is None else f"{cell:.3f}" for cell in cells)]
        line += ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        sizes = (of[route]["bytes"] if route else None for route in (int8, int4, best))
        lines.append([*line, *("" if size is None else f"{size / 1e3:.0f}" for size in sizes)])
    text += markdown(header, lines) + "\n"
    for row in rows:
        if "reason" in row:
            text += f"- No file: `{row['route']}` of {row['network']}, blocks of {row['block']}: "
            text += f"{row['reason'].splitlines()[0][:200]}\n"
    if not counted:
        return text
    text += "\n## Arm\n\nInstructions of a call, in millions, of LiteRT's package for Arm under "
    text += "QEMU: no times. Blocks of 32, batch 1, one thread. `apart`: the largest difference of "
    text += "these files' outputs from this machine's, as a part of their root mean square.\n\n"
    lines = []
    for name, cpu in dict.fromkeys((row["network"], row["cpu"]) for row in counted):
        mine = [row for row in counted if (row["network"], row["cpu"]) == (name, cpu)]
        of = {row["route"]: f"{row['instructions'] / 1e6:.2f}" for row in mine}
        apart = max(row["apart"] / row["rms"] for row in mine)
        lines.append([name, cpu, *(of.get(route, "") for route in ROUTES), f"{apart:.0e}"])
    return text + markdown(["network", "processor", *ROUTES, "apart"], lines)


def blocks() -> None:
    """Latency of LiteRT files of whole blocks against the best dense int8, int4 and float32 ones.

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
    calls, each in a process of its own, after each was run and compared with Keras. With
    `--without-amx` XNNPACK does without AMX on processors that have it, and takes the kernels of
    others with AVX-512. Finished parts are not repeated, except with `--again`.
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
        refuse_amx()
    rows = finished(BLOCKS_FILE)
    for one in [] if options.table else PARTS:
        chosen = (options.network, options.block, options.batch)
        if any(wanted and value not in wanted for wanted, value in zip(chosen, one, strict=True)):
            continue
        own = (*one, processor(machine(), amx))
        if own in (_key(r) for r in rows if "machine" in r) and not options.again:
            continue
        print("{}, blocks of {}, batch {}".format(*one), flush=True)
        model, row = blocks_network(*one[:2]), {"network": one[0], "block": one[1], "amx": amx}
        found = timed_files(model, options.routes, one[2], options.seconds, row)
        rows = [r for r in rows if "machine" not in r or _key(r) != own] + found
        BLOCKS_FILE.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not rows:
        parser.error("nothing is measured yet")
    write("litert_blocks", blocks_table(rows))


# --- arm64 ----------------------------------------------------------------------------------------

# Code of the part, and the features that Linux lists.
CPUS = {
    "cortex-a72": ("0xd08", "fp asimd crc32 cpuid"),
    "cortex-a76": ("0xd0b", "fp asimd crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc asimddp"),
}
PLUGIN = """
#include <inttypes.h>
#include <stdio.h>
typedef uint64_t u;
int qemu_plugin_version = 1;
void qemu_plugin_register_vcpu_tb_trans_cb(u, void (*)(u, void *));
void qemu_plugin_register_vcpu_tb_exec_inline(void *, int, void *, u);
unsigned long qemu_plugin_tb_n_insns(void *);
void qemu_plugin_register_vcpu_syscall_cb(u,
  void (*)(u, unsigned, int64_t, u, u, u, u, u, u, u, u));
static u total;
static void block(u id, void *b) {
  qemu_plugin_register_vcpu_tb_exec_inline(b, 0, &total, qemu_plugin_tb_n_insns(b));
}
static void call(u id, unsigned cpu, int64_t number, u a, u b, u c, u d, u e, u f, u g, u h) {
  if (number == 173) fprintf(stderr, "\\nTOTAL %" PRIu64 "\\n", total);
}
int qemu_plugin_install(u id, void *about, int count, char **names) {
  qemu_plugin_register_vcpu_tb_trans_cb(id, block);
  qemu_plugin_register_vcpu_syscall_cb(id, call);
  return 0;
}
"""
CALLED = """
import os, sys
import numpy as np
from ai_edge_litert.interpreter import Interpreter
interpreter = Interpreter(sys.argv[1], num_threads=1)
interpreter.allocate_tensors()
(x,), (y,) = interpreter.get_input_details(), interpreter.get_output_details()
interpreter.set_tensor(x["index"], np.load(sys.argv[2]))
for _ in range(2):
    interpreter.invoke()
os.getppid()  # 173, where the plugin prints
interpreter.invoke()
os.getppid()
np.save(sys.argv[3], interpreter.get_tensor(y["index"]))
"""


def compiled(folder: str) -> str:
    """QEMU's plugin, which counts instructions."""
    source, plugin = f"{folder}/count.c", f"{folder}/count.so"
    Path(source).write_text(PLUGIN)
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", plugin, source], check=True)
    return plugin


def emulated(
    root: Path, cpu: str, plugin: str, file: str, row: np.ndarray
) -> tuple[int, np.ndarray]:
    """Instructions of one call of a file, and its output."""
    part, features = CPUS[cpu]
    text = f"Features\t: {features}\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
    text += f"CPU variant\t: 0x1\nCPU part\t: {part}\nCPU revision\t: 1\n\n"
    system = {"proc/cpuinfo": f"processor\t: 0\n{text}"}
    system |= {f"sys/devices/system/cpu/{name}": "0\n" for name in ("possible", "present")}
    for name, content in system.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    with tempfile.TemporaryDirectory() as folder:
        given, answer = f"{folder}/x.npy", f"{folder}/y.npy"
        np.save(given, row)
        python = [f"{root}/usr/bin/python3.11", "-c", CALLED, file, given, answer]
        command = ["qemu-aarch64", "-cpu", cpu, "-plugin", plugin, "-L", f"{root}", *python]
        environment = os.environ | {"PYTHONPATH": f"{root}/site"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        first, last = (int(line[6:]) for line in done.stderr.split("\n") if "TOTAL" in line)
        return last - first, np.load(answer)


def arm64() -> None:
    r"""Instructions of a call of LiteRT files on emulated Arm processors.

        mkdir root && dpkg --add-architecture arm64 && apt-get update && apt-get install qemu-user
        for p in python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libgcc-s1 \
            libstdc++6 zlib1g libexpat1 libffi8; do apt-get download $p:arm64; done
        for d in *.deb; do dpkg -x $d root; done
        pip install --target root/site --only-binary :all: --python-version 3.11 \
            --platform manylinux_2_27_aarch64 --platform manylinux2014_aarch64 ai-edge-litert
        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py arm64 --root root

    The networks of `blocks`, in blocks of 32, batch 1. LiteRT's own package for Arm runs them under
    QEMU, whose plugin counts the instructions of the third call. They are no times: memory costs
    nothing, and all instructions cost the same. Outputs are compared with those on this machine.
    """
    parser = described(arm64)
    parser.add_argument("--root", type=Path, default=RESULTS.parent / "out" / "arm64")
    parser.add_argument("--table", action="store_true", help="write the table only")
    parser.add_argument("--network", nargs="+", default=["mlp", "convolutions", "cnn", "encoder"])
    parser.add_argument("--cpu", nargs="+", default=[*CPUS], choices=CPUS)
    parser.add_argument("--routes", nargs="+", default=ROUTES)
    options = parsed(parser, {"network": ["mlp"], "cpu": ["cortex-a76"], "routes": ["float32"]})
    if not options.table and not options.root.exists():
        parser.error(f"there is no {options.root}; --help says how to make it")
    rows = finished(BLOCKS_FILE)
    for name in [] if options.table else options.network:
        model = blocks_network(name, 32)
        data = rows_for(model, 32)
        with tempfile.TemporaryDirectory() as folder:
            plugin = compiled(folder)
            found = exported(model, Path(folder), options.routes, data, 1)
            files = {route: one.path for route, one in found.items() if not isinstance(one, str)}
            for cpu, (route, file) in itertools.product(options.cpu, files.items()):
                count, output = emulated(options.root, cpu, plugin, file, data[:1])
                here = load_litert(file).predict(data[:1])
                row = {"network": name, "block": 32, "cpu": cpu, "route": route}
                rows = [r for r in rows if not row.items() <= r.items()]
                row |= {"instructions": count, "apart": float(np.abs(output - here).max())}
                rows.append(row | {"rms": float(np.sqrt(np.mean(here**2)))})
                print(rows[-1], flush=True)
        BLOCKS_FILE.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write("litert_blocks", blocks_table(rows))


if __name__ == "__main__":
    chosen(routes, blocks, arm64)
