"""Files of sparse networks, not trained: size and time on XNNPACK, ONNX Runtime and OpenVINO.

python benchmarks/litert_files.py NAME [options]
"""

import functools
import importlib.util
import itertools
import math
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from blocks import uneven_blocks
from record import (
    RESULTS,
    groups,
    has_amx,
    last_of_each,
    machine,
    markdown,
    sentences,
)
from runner import Measurement, Run, Setting, grid, interleaved, main

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import (
    ExportReport,
    export_litert,
    latencies,
    load_litert,
)
from keras_sparse_ortho.export._worker import refuse_amx
from keras_sparse_ortho.kernels import kernel_layouts, walk
from keras_sparse_ortho.orthogonal import regular_pattern

L = keras.layers
THREADS = (1, 2)
DENSE_INTEGERS = ("dynamic_int8", "int8", "dynamic_int4", "int4")
DENSE = ["float32", "float16", *DENSE_INTEGERS]


def exported(
    model: keras.Model,
    folder: Path,
    routes: list[str],
    data: np.ndarray,
    batch: int,
) -> dict[str, ExportReport | str]:
    """A verified file for each route, or why there is none."""
    found: dict[str, ExportReport | str] = {}
    for route in routes:
        rows = {"representative_data": data} if route.startswith("int") else {}
        rows |= {"sample": data[: max(8, batch)], "batch_size": batch}
        # Untrained weights lose much in 4 bits, and take as long.
        if "int4" in route:
            rows["tolerance"] = 1.0
        try:
            found[route] = export_litert(
                model, folder / f"{route}.tflite", mode=route, **rows
            )
        except (RuntimeError, ValueError) as error:
            found[route] = str(error)
    return found


def rows_for(model: keras.Model, count: int) -> np.ndarray:
    shape = model.inputs[0].shape[1:]
    return (
        np.random.default_rng(1)
        .standard_normal((count, *shape))
        .astype("float32")
    )


def timed_files(
    model: keras.Model, routes: list[str], batch: int, seconds: float, row: dict
) -> list[dict]:
    """Lines of every route of a model, timed together."""
    data, rows, files = rows_for(model, max(32, batch)), [], []
    with tempfile.TemporaryDirectory() as folder:
        for route, report in exported(
            model, Path(folder), routes, data, batch
        ).items():
            line = row | {"batch": batch, "route": route, "machine": machine()}
            if isinstance(report, str):
                rows.append(line | {"reason": report})
                continue
            line |= {
                "bytes": report.bytes,
                "gzip_bytes": report.gzip_bytes,
                "error": report.error,
            }
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

SPARSE = ["float32+sp", "float16+sp"]


def mlp(
    inputs: int = 1024, widths: tuple[int, ...] = (2048, 2048, 1024)
) -> keras.Model:
    hidden = [
        L.Dense(n, activation="relu", name=f"dense_{n}_{k}")
        for k, n in enumerate(widths)
    ]
    return keras.Sequential(
        [keras.Input((inputs,), name="x"), *hidden, L.Dense(1000, name="head")],
        name="mlp",
    )


def cnn() -> keras.Model:
    layers: list[keras.Layer] = [
        keras.Input((96, 96, 3), name="x"),
        L.Conv2D(32, 3, strides=2, padding="same", use_bias=False, name="stem"),
        L.BatchNormalization(momentum=0.0),
        L.ReLU(),
    ]
    for k, (filters, stride) in enumerate(
        (
            (64, 1),
            (128, 2),
            (128, 1),
            (256, 2),
            (256, 1),
            (512, 2),
            (512, 1),
            (512, 1),
        )
    ):
        layers += [
            L.DepthwiseConv2D(
                3, stride, padding="same", use_bias=False, name=f"depthwise_{k}"
            ),
            L.BatchNormalization(momentum=0.0),
            L.ReLU(),
            L.Conv2D(filters, 1, use_bias=False, name=f"pointwise_{k}"),
            L.BatchNormalization(momentum=0.0),
            L.ReLU(),
        ]
    return keras.Sequential(
        [*layers, L.GlobalAveragePooling2D(), L.Dense(1000, name="head")],
        name="cnn",
    )


MODELS = {
    "mlp": mlp,
    "cnn": cnn,
    "small mlp": functools.partial(mlp, 256, (512, 256)),  # of --quick
}


def sparse_kernel(
    shape: tuple[int, int], density: float, seed: int
) -> np.ndarray:
    """Random live entries; columns have the norm that keeps the signal behind a ReLU."""
    rng = np.random.default_rng(seed)
    live = np.zeros(math.prod(shape), bool)
    live[rng.permutation(live.size)[: max(1, round(density * live.size))]] = (
        True
    )
    kernel = rng.standard_normal(shape) * live.reshape(shape)
    norm = np.linalg.norm(kernel, axis=0, keepdims=True)
    return np.sqrt(2) * np.divide(
        kernel, norm, out=np.zeros_like(kernel), where=norm > 0
    )


def network(name: str, density: float) -> keras.Model:
    """The network with its larger kernels sparse; stem and depthwise kernels stay dense."""
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    rng = np.random.default_rng(0)
    for k, layer in enumerate(model.layers):
        if isinstance(layer, L.Dense) or layer.name.startswith("pointwise"):
            shape = tuple(layer.kernel.shape)
            flat = (int(np.prod(shape[:-1])), int(shape[-1]))
            layer.kernel.assign(
                sparse_kernel(flat, density, seed=k).reshape(shape)
            )
        if isinstance(layer, L.Dense):
            layer.bias.assign(0.05 * rng.standard_normal(layer.bias.shape))
    # Statistics of a batch, or the signal would vanish on its way.
    if name == "cnn":
        model(
            rng.standard_normal((32, *model.inputs[0].shape[1:])), training=True
        )
    return model


class Routes(Measurement):
    """Latency and size of sparse encodings against dense float32, int8 and int4.

        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py routes  # all: 20 minutes
        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py routes --model mlp --density 0.1

    One part is one model, density and batch size. Its lines are written when it is done, so a run
    may be stopped.

    The networks are an MLP 1024-2048-2048-1024-1000 and a MobileNet-like CNN whose pointwise and
    output kernels are sparse, entry by entry. They are not trained: latency depends on where the
    zeros are, not on the values. All routes of one part, on 1 and 2 threads, are timed in
    interleaved rounds, each file in a process of its own (LiteRT's kernels disturb each other
    within one, see `bench` in `export/_worker.py`).
    """

    page = lines = "litert"
    settings = {
        "model": Setting(["mlp", "cnn"], choices=MODELS, quick=["small mlp"]),
        "density": Setting([0.1, 0.05, 0.02], quick=[0.1]),
        "batch": Setting([1, 8], quick=[1]),
        "seconds": Setting(60.0, "of timing in one part", quick=2.0),
        "routes": Setting(
            [*DENSE, *SPARSE], quick=["float32", "dynamic_int8", "float32+sp"]
        ),
    }

    def runs(self) -> list[Run]:
        given = self.given
        return grid(model=given.model, density=given.density, batch=given.batch)

    def run(self, which: Run) -> list[Run]:
        model = network(which["model"], which["density"])
        routes, seconds = self.given.routes, self.given.seconds
        return timed_files(model, routes, which["batch"], seconds, which)

    def report(self, lines: list[Run]) -> str:
        """One table for each network and density; ratios above 1 are faster than the dense file."""
        timed = [line for line in lines if "ms" in line]
        text = "# LiteRT: sparse encodings against dense files\n\n" + sentences(
            f"""
            {"; ".join(dict.fromkeys(line["machine"] for line in timed))}, Keras
            {keras.__version__}. Random live entries, not trained. Medians of interleaved calls;
            every file agreed with Keras before it was timed. `x int8`, `x int4`: how many times as
            fast as the faster one of the two dense files, dynamic and static, at the same threads
            and batch. `error` is max|d|/max(1, max|y|) for float32 and sqrt(mean d²)/sqrt(mean y²)
            for the others; int4 is rounded after training.
            """
        )
        by_network = groups(timed, "model", "density")
        for name, density in sorted(
            by_network, key=lambda key: (key[0] != "mlp", -key[1])
        ):
            members = by_network[name, density]
            text += f"## {name.upper()}, density {density:g}\n\n{latency_table(members)}\n"
            text += fastest(members) + "\n"
        for line in lines:
            if "reason" in line:
                reason = line["reason"][:240]
                text += f"- No file: `{line['route']}` of {line['model']}: {reason}\n"
        return text


def fastest(lines: list[Run]) -> str:
    """A line for each batch and number of threads."""
    text = ""
    for (batch, threads), members in sorted(
        groups(lines, "batch", "threads").items()
    ):
        ms = {line["route"]: line["ms"] for line in members}
        sparse, dense = (
            min(ms.keys() & names, key=ms.__getitem__)
            for names in (SPARSE, DENSE)
        )
        plural = "s" if threads > 1 else ""
        text += f"- batch {batch}, {threads} thread{plural}: `{sparse}` is "
        text += f"{ms[dense] / ms[sparse]:.2f} times as fast as the fastest dense file, `{dense}`\n"
    return text


def latency_table(lines: list[Run]) -> str:
    """A row for each route, columns for each batch and number of threads."""
    by_column = groups(lines, "batch", "threads")
    columns = sorted(by_column)
    header = ["route", "MB", "gzip MB", "zstd MB", "error"]
    for batch, threads in columns:
        header += [f"b{batch} t{threads} ms", "x int8", "x int4"]
    rows = []
    for route, members in groups(lines, "route").items():
        sizes = [
            members[0][key] for key in ("bytes", "gzip_bytes", "zstd_bytes")
        ]
        row = [
            f"`{route}`",
            *("" if size is None else f"{size / 1e6:.2f}" for size in sizes),
        ]
        row.append(f"{max(line['error'] for line in members):.1e}")
        for column in columns:
            ms = {line["route"]: line["ms"] for line in by_column[column]}
            row.append(f"{ms[route]:.3f}")
            for kind in ("int8", "int4"):
                dense = [
                    ms[name]
                    for name in DENSE_INTEGERS
                    if name in ms and kind in name
                ]
                row.append(f"{min(dense) / ms[route]:.2f}" if dense else "")
        rows.append(row)
    return markdown(header, rows)


# --- blocks ---------------------------------------------------------------------------------------

BLOCKS = ("dynamic_int8+blocks", "int8+blocks")
ROUTES = ["float32", *DENSE_INTEGERS, "float32+blocks", *BLOCKS]


def blocks_mlp() -> keras.Model:
    layers = [L.Dense(1024, activation="relu") for _ in range(4)]
    return keras.Sequential(
        [keras.Input((1024,), name="x"), *layers], name="mlp"
    )


def convolutions() -> keras.Model:
    layers = [
        L.Conv2D(256, 3, padding="same", activation="relu") for _ in range(4)
    ]
    return keras.Sequential(
        [keras.Input((14, 14, 256), name="x"), *layers], name="convolutions"
    )


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
    *(
        (name, block, b)
        for name in ("mlp", *COMPARED)
        for block in (32, 64)
        for b in (1, 8)
    ),
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
        if (
            inputs % block
            or outputs % block
            or min(inputs, outputs) < 4 * block
        ):
            continue
        count, lines = inputs // block, outputs // block
        step = count // math.gcd(count, lines)
        fan_in = (
            max(
                count // (8 if name != "cnn" or inputs >= 256 else 4) // step, 1
            )
            * step
        )
        live = np.zeros((count, lines), bool)
        live[
            regular_pattern(count, lines, fan_in, rng),
            np.arange(lines)[:, None],
        ] = True
        if name == ANY:
            live = uneven_blocks(count, fan_in / count, int(rng.integers(100)))
        matrix *= live.repeat(block, axis=0).repeat(block, axis=1) * math.sqrt(
            count / fan_in
        )
        layer.kernel.assign(layout.from_canonical(matrix, value.shape))
    # Statistics of a batch, or the signal would vanish on its way.
    if name == "cnn":
        model(
            rng.standard_normal((32, *model.inputs[0].shape[1:])), training=True
        )
    return model


def amx_used(without: bool) -> bool:
    """Whether XNNPACK uses the tiles of the processor."""
    return not without and has_amx()


def processor(line: Run) -> str:
    """Whether AMX was used, or the name of one that lacks it."""
    if line["machine"].startswith("AMD"):
        return "EPYC"
    return "yes" if line["amx"] else "no"


class Blocks(Measurement):
    """Latency of LiteRT files of whole blocks against the best dense int8, int4 and float32 ones.

        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py blocks  # all: half an hour
        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py blocks --network mlp --batch 1
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
    others with AVX-512. Parts that were measured on such a processor are not repeated.
    """

    page = lines = "litert_blocks"
    settings = {
        "network": Setting([*NETWORKS], choices=NETWORKS, quick=["mlp"]),
        "block": Setting([32, 64], quick=[64]),
        "batch": Setting([1, 8], quick=[1]),
        "seconds": Setting(60.0, "of timing in one part", quick=2.0),
        "without_amx": Setting(False, "kernels of other processors"),
        "routes": Setting(
            ROUTES,
            quick=[
                "float32",
                "dynamic_int8",
                "float32+blocks",
                "dynamic_int8+blocks",
            ],
        ),
    }

    def measure(self) -> None:
        """Refuses AMX first, if the command says so."""
        if self.given.without_amx:
            refuse_amx()
        super().measure()

    def runs(self) -> Iterable[Run]:
        given = self.given
        for network, block, batch in PARTS:
            if (
                network in given.network
                and block in given.block
                and batch in given.batch
            ):
                yield {"network": network, "block": block, "batch": batch}

    def line_of(self, which: Run) -> Run | None:
        """The line of a part on this kind of processor."""
        here = processor(
            {"machine": machine(), "amx": amx_used(self.given.without_amx)}
        )
        for line in self.finished():
            if (
                which.items() <= line.items()
                and "machine" in line
                and processor(line) == here
            ):
                return line
        return None

    def run(self, which: Run) -> list[Run]:
        model = blocks_network(which["network"], which["block"])
        row = which | {"amx": amx_used(self.given.without_amx)}
        routes, seconds = self.given.routes, self.given.seconds
        return timed_files(model, routes, which["batch"], seconds, row)

    def report(self, lines: list[Run]) -> str:
        """A line for each network, block, batch and number of threads; and instructions on Arm."""
        timed = [line for line in lines if "ms" in line]
        text = (
            "# LiteRT: whole blocks against dense int8 and int4\n\n"
            + sentences(
                f"""
            {"; ".join(dict.fromkeys(line["machine"] for line in timed))}, Keras
            {keras.__version__}. Medians of interleaved short calls in ms; every file agreed with
            Keras before. `x int8`, `x int4`: how many times as fast as the better dense file,
            dynamic or static, is the faster of the two int8 files of blocks; `x f32`: float32
            blocks against dense float32. int4: Dense kernels alone. Density 1/8 (CNN, and 256
            channels in blocks of 64: 1/8 to 1/4), in regular patterns, or in one as uneven as
            trained ones. AMX: whether XNNPACK used the tiles of the Xeon; the EPYC (Zen 4) has
            none. On a busy machine calls of more than a millisecond are interrupted, and their
            ratios high or low by chance.
            """
            )
        )
        text += blocks_table(timed) + "\n"
        for line in lines:
            if "reason" in line:
                reason = line["reason"].splitlines()[0][:200]
                text += f"- No file: `{line['route']}` of {line['network']}, blocks of "
                text += f"{line['block']}: {reason}\n"
        return text + arm_table(
            [line for line in lines if "instructions" in line]
        )


def blocks_table(lines: list[Run]) -> str:
    """Times of dense files and those of blocks."""
    by_row: dict[tuple, dict[str, Run]] = {}
    for line in lines:
        row = (
            line["network"],
            line["block"],
            line["batch"],
            processor(line),
            line["threads"],
        )
        by_row.setdefault(row, {})[line["route"]] = line
    rows = []
    for row, of_route in by_row.items():
        ms = {route: line["ms"] for route, line in of_route.items()}
        kinds = (DENSE_INTEGERS[:2], DENSE_INTEGERS[2:], BLOCKS)
        int8, int4, best = (
            min(ms.keys() & {*kind}, key=ms.get, default=None) for kind in kinds
        )
        times = [
            ms.get(route)
            for route in ("float32", int8, int4, "float32+blocks", *BLOCKS)
        ]
        cells = ["" if time is None else f"{time:.3f}" for time in times]
        for dense, sparse in (
            (int8, best),
            (int4, best),
            ("float32", "float32+blocks"),
        ):
            both = dense in ms and sparse in ms
            cells.append(f"{ms[dense] / ms[sparse]:.2f}" if both else "")
        for route in (int8, int4, best):
            cells.append(
                f"{of_route[route]['bytes'] / 1e3:.0f}" if route else ""
            )
        rows.append([*map(str, row), *cells])
    header = [
        "network",
        "block",
        "batch",
        "AMX",
        "threads",
        "f32",
        "int8",
        "int4",
        "f32+blocks",
    ]
    header += ["dynamic+blocks", "int8+blocks", "x int8", "x int4", "x f32"]
    return markdown([*header, "int8 kB", "int4 kB", "kB"], rows)


def arm_table(lines: list[Run]) -> str:
    """The section on Arm, if instructions were counted; the last of each file."""
    if not lines:
        return ""
    rows = []
    latest = last_of_each(lines, "network", "cpu", "route").values()
    for (name, cpu), members in groups(latest, "network", "cpu").items():
        of_route = {
            line["route"]: f"{line['instructions'] / 1e6:.2f}"
            for line in members
        }
        apart = max(line["apart"] / line["rms"] for line in members)
        rows.append(
            [
                name,
                cpu,
                *(of_route.get(route, "") for route in ROUTES),
                f"{apart:.0e}",
            ]
        )
    about = sentences(
        """
        Instructions of a call, in millions, of LiteRT's package for Arm under QEMU: no times.
        Blocks of 32, batch 1, one thread. `apart`: the largest difference of these files' outputs
        from this machine's, as a part of their root mean square.
        """
    )
    return (
        "\n## Arm\n\n"
        + about
        + markdown(["network", "processor", *ROUTES, "apart"], rows)
    )


# --- arm64 ----------------------------------------------------------------------------------------

# Code of the part, and the features that Linux lists.
CPUS = {
    "cortex-a72": ("0xd08", "fp asimd crc32 cpuid"),
    "cortex-a76": (
        "0xd0b",
        "fp asimd crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc asimddp",
    ),
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
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O2", "-o", plugin, source], check=True
    )
    return plugin


def emulated(
    root: Path, cpu: str, plugin: str, file: str, row: np.ndarray
) -> tuple[int, np.ndarray]:
    """Instructions of one call of a file, and its output."""
    part, features = CPUS[cpu]
    text = f"Features\t: {features}\nCPU implementer\t: 0x41\nCPU architecture: 8\n"
    text += f"CPU variant\t: 0x1\nCPU part\t: {part}\nCPU revision\t: 1\n\n"
    system = {"proc/cpuinfo": f"processor\t: 0\n{text}"}
    system |= {
        f"sys/devices/system/cpu/{name}": "0\n"
        for name in ("possible", "present")
    }
    for name, content in system.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    with tempfile.TemporaryDirectory() as folder:
        given, answer = f"{folder}/x.npy", f"{folder}/y.npy"
        np.save(given, row)
        python = [
            f"{root}/usr/bin/python3.11",
            "-c",
            CALLED,
            file,
            given,
            answer,
        ]
        command = [
            "qemu-aarch64",
            "-cpu",
            cpu,
            "-plugin",
            plugin,
            "-L",
            f"{root}",
            *python,
        ]
        environment = os.environ | {"PYTHONPATH": f"{root}/site"}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, check=True
        )
        first, last = (
            int(line[6:]) for line in done.stderr.split("\n") if "TOTAL" in line
        )
        return last - first, np.load(answer)


class Arm64(Blocks):
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

    resumes = False
    settings = {
        "root": Setting(RESULTS.parent / "out" / "arm64"),
        "network": Setting(
            ["mlp", "convolutions", "cnn", "encoder"], quick=["mlp"]
        ),
        "cpu": Setting([*CPUS], choices=CPUS, quick=["cortex-a76"]),
        "routes": Setting(ROUTES, quick=["float32"]),
    }

    def measure(self) -> None:
        """Looks for the folder first."""
        if not self.given.root.exists():
            raise SystemExit(
                f"there is no {self.given.root}; --help says how to make it"
            )
        Measurement.measure(self)

    def runs(self) -> list[Run]:
        return grid(network=self.given.network, block=[32])

    def run(self, which: Run) -> Iterator[Run]:
        given = self.given
        model = blocks_network(which["network"], which["block"])
        data = rows_for(model, 32)
        with tempfile.TemporaryDirectory() as folder:
            plugin = compiled(folder)
            reports = exported(model, Path(folder), given.routes, data, 1)
            files = {
                name: r.path
                for name, r in reports.items()
                if not isinstance(r, str)
            }
            for cpu, (route, file) in itertools.product(
                given.cpu, files.items()
            ):
                count, output = emulated(
                    given.root, cpu, plugin, file, data[:1]
                )
                here = load_litert(file).predict(data[:1])
                apart = float(np.abs(output - here).max())
                rms = float(np.sqrt(np.mean(here**2)))
                line = {"cpu": cpu, "route": route, "instructions": count}
                yield line | {"apart": apart, "rms": rms}


# --- runtimes -------------------------------------------------------------------------------------

NEEDED = ("onnxruntime", "openvino", "tf2onnx")
RUNTIMES_DENSITY = 1 / 8


def networks(width: int, blocks: list[int]) -> dict[str, keras.Model]:
    """The dense MLP, and that of each size of blocks."""
    keras.utils.set_random_seed(0)
    hidden = [
        L.Dense(width, activation="relu", name=f"dense_{k}") for k in range(4)
    ]
    dense = keras.Sequential([keras.Input((width,), name="x"), *hidden])
    found = {"dense": dense}
    for side in blocks:
        structure = kso.Block(side, side, regular=True)
        options = {"structure": structure, "storage": "blocks", "seed": 0}
        found[f"blocks of {side}"] = kso.sparsify(
            dense, RUNTIMES_DENSITY, **options
        )
    return found


def onnx_file(model: keras.Model, x: np.ndarray, folder: Path) -> str:
    """As Keras exports it."""
    path = str(folder / "model.onnx")
    spec = [keras.InputSpec(shape=x.shape, dtype="float32")]
    model.export(path, format="onnx", input_signature=spec, verbose=False)
    return path


def onnx_session(path: str, x: np.ndarray) -> Callable:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    given = {session.get_inputs()[0].name: x}
    return lambda: session.run(None, given)[0]


def onnx_runtime(model: keras.Model, x: np.ndarray, folder: Path) -> Callable:
    return onnx_session(onnx_file(model, x, folder), x)


def onnx_runtime_int8(
    model: keras.Model, x: np.ndarray, folder: Path
) -> Callable:
    """Quantized by ONNX Runtime, activations on the fly."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    path = folder / "int8.onnx"
    quantize_dynamic(
        onnx_file(model, x, folder), path, weight_type=QuantType.QInt8
    )
    return onnx_session(str(path), x)


def openvino(model: keras.Model, x: np.ndarray, folder: Path) -> Callable:
    import openvino

    path = str(folder / "model.xml")
    spec = [keras.InputSpec(shape=x.shape, dtype="float32")]
    model.export(path, format="openvino", input_signature=spec, verbose=False)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    request = (
        openvino.Core()
        .compile_model(path, "CPU", settings)
        .create_infer_request()
    )
    return lambda: request.infer([x])[0]


def litert_int8(model: keras.Model, x: np.ndarray, folder: Path) -> Callable:
    """Weights in int8, activations on the fly; blocks as `export_litert` writes them."""
    from ai_edge_litert.interpreter import Interpreter

    blocks = any(w.live < w.size for w in kso.prunable_weights(model))
    route = "dynamic_int8+blocks" if blocks else "dynamic_int8"
    path = str(folder / "model.tflite")
    kso.export_litert(model, path, mode=route, batch_size=len(x), sample=x)
    interpreter = Interpreter(path, num_threads=1)
    interpreter.allocate_tensors()
    (given,), (found,) = (
        interpreter.get_input_details(),
        interpreter.get_output_details(),
    )

    def call() -> np.ndarray:
        interpreter.set_tensor(given["index"], x)
        interpreter.invoke()
        return interpreter.get_tensor(found["index"])

    return call


RUNTIMES = {
    "ONNX Runtime": onnx_runtime,
    "OpenVINO": openvino,
    "ONNX Runtime, int8": onnx_runtime_int8,
    "LiteRT, int8": litert_int8,
}


class Runtimes(Measurement):
    """Latency of live blocks in ONNX Runtime and OpenVINO, as `model.export` of Keras writes them.

        KERAS_BACKEND=tensorflow python benchmarks/litert_files.py runtimes

    It needs the extra `formats`. An MLP 4 x 1024, dense and with one in eight blocks of 32 or 64
    (`storage="blocks"`: a gather and a batched product for each layer), in float32 (OpenVINO
    would otherwise take bfloat16 where the processor has AMX), and with weights in int8 by ONNX
    Runtime's quantization and by `export_litert`. Each file is compared with Keras; then all of
    one batch are timed in turn, on one thread: pools of threads would wait for each other.
    """

    page = "runtimes"
    settings = {
        "width": Setting(1024, quick=256),
        "blocks": Setting([32, 64], quick=[32]),
        "rounds": Setting(1000, quick=20),
    }

    def measure(self) -> None:
        """Stops where a runtime is missing."""
        missing = [
            name for name in NEEDED if importlib.util.find_spec(name) is None
        ]
        if missing:
            print(
                f"Nothing measured: {', '.join(missing)} missing; install the extra `formats`."
            )
            raise SystemExit
        self.models = networks(self.given.width, self.given.blocks)
        super().measure()

    def runs(self) -> list[Run]:
        return grid(batch=(1, 8))

    def run(self, which: Run) -> Iterator[Run]:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((which["batch"], self.given.width)).astype(
            "float32"
        )
        cases = {}
        with tempfile.TemporaryDirectory() as folder:
            for (runtime, make), (name, model) in itertools.product(
                RUNTIMES.items(), self.models.items()
            ):
                place = Path(folder, runtime, name)
                place.mkdir(parents=True)
                call = cases[runtime, name] = make(model, x, place)
                expected = keras.ops.convert_to_numpy(model(x))
                apart = np.sqrt(
                    np.mean((call() - expected) ** 2) / np.mean(expected**2)
                )
                if not apart < (0.05 if "int8" in runtime else 1e-5):
                    raise ValueError(
                        f"{runtime} is {apart:.1e} apart from Keras, on {name}"
                    )
            times = interleaved(cases, self.given.rounds, warm_up=20)
        for (runtime, name), seconds in times.items():
            ratios = {
                "to_dense": times[runtime, "dense"] / seconds,
                "to_float32": times["ONNX Runtime", "dense"] / seconds,
            }
            yield {
                "runtime": runtime,
                "network": name,
                "ms": 1e3 * seconds,
            } | ratios

    def report(self, lines: list[Run]) -> str:
        rows = []
        order = [*RUNTIMES]
        for line in sorted(
            lines, key=lambda line: order.index(line["runtime"])
        ):
            row = [
                line["runtime"],
                str(line["batch"]),
                line["network"],
                f"{line['ms']:.3f}",
            ]
            rows.append(
                [*row, f"{line['to_dense']:.2f}", f"{line['to_float32']:.2f}"]
            )
        about = sentences(
            f"""
            {machine()}, Keras {keras.__version__}. MLP of four layers of {self.given.width}, one in
            eight blocks, as `model.export` of Keras writes it: a gather and a batched product for
            each layer; for LiteRT as `export_litert` does. int8: weights; activations are quantized
            in the call. Medians of calls in turn, on one thread; every file agreed with Keras
            before. `x dense`: times as fast as the dense file of the runtime; `x float32`: as the
            dense one of ONNX Runtime.
            """
        )
        header = ["runtime", "batch", "network", "ms", "x dense", "x float32"]
        title = "# ONNX Runtime and OpenVINO: live blocks against dense networks\n\n"
        return title + about + markdown(header, rows)


if __name__ == "__main__":
    main(Routes, Blocks, Arm64, Runtimes)
