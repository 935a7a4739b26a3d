"""`vela_report`: what Arm's compiler for Ethos-U estimates for a LiteRT file."""

import csv
import dataclasses
import os
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from keras_sparse_ortho._files import path_of
from keras_sparse_ortho.export._candidates import ExportConversionError
from keras_sparse_ortho.export._flatbuffer import LiteRTFileError, flat, read_weights
from keras_sparse_ortho.export._load_litert import read_packed
from keras_sparse_ortho.export._process import require, run_python
from keras_sparse_ortho.export._record import read_record
from keras_sparse_ortho.export._report import Figures

ACCELERATORS = (
    *("ethos-u55-32", "ethos-u55-64", "ethos-u55-128", "ethos-u55-256"),
    *("ethos-u65-256", "ethos-u65-512"),
    *("ethos-u85-128", "ethos-u85-256", "ethos-u85-512", "ethos-u85-1024", "ethos-u85-2048"),
)
"""The Ethos-U that Vela compiles for; the last number is that of its multipliers."""

# Vela's columns, in KiB.
_MEMORIES = {
    "SRAM": "sram_memory_used",
    "DRAM": "dram_memory_used",
    "on-chip flash": "on_chip_flash_memory_used",
    "off-chip flash": "off_chip_flash_memory_used",
}
_NAME = "model"


@dataclasses.dataclass(frozen=True)
class VelaReport(Figures):
    """What Vela estimates for one file; no figure was measured on a device.

    Attributes:
        path: The file.
        accelerator: Such as "ethos-u55-128".
        system_config: Clock and memories that Vela reckons with.
        memory_mode: Which memory holds weights and activations.
        ms: Time of one call on the Ethos-U. Operators on the CPU are not in it.
        cycles: The same in clock cycles.
        weight_bytes: Weights of the operators on the Ethos-U, as int8.
        encoded_bytes: The same as Vela stores them: zeros take nearly no space.
        memory: Bytes by memory, such as "SRAM" and "off-chip flash".
        npu_operators: Number of operators on the Ethos-U.
        cpu_operators: Types of the operators that fell to the CPU, one for each. A file of
            `export_litert` has float32 inputs and outputs, so "Quantize" and "Dequantize" are
            among them.
        vela: Version of the compiler.
    """

    path: str
    accelerator: str
    system_config: str
    memory_mode: str
    ms: float
    cycles: int
    weight_bytes: int
    encoded_bytes: int
    memory: dict[str, int]
    npu_operators: int
    cpu_operators: tuple[str, ...]
    vela: str

    def __rich__(self) -> Group:
        """A table of the figures."""
        title = f"{self.path} on {self.accelerator}"
        table = Table(box=SIMPLE_HEAD, show_header=False, pad_edge=False)
        table.add_column()
        table.add_column(overflow="fold")
        table.add_row("time of a call", f"{self.ms:.3g} ms, {self.cycles:,} cycles")
        encoded = f"{self.encoded_bytes:,} bytes, before encoding {self.weight_bytes:,}"
        table.add_row("weights", encoded)
        for name, size in self.memory.items():
            table.add_row(name, f"{size:,} bytes")
        table.add_row("on the Ethos-U", f"{self.npu_operators} operators")
        table.add_row("on the CPU, not timed", ", ".join(self.cpu_operators) or "none")
        table.add_row("estimated by", f"Vela {self.vela}; nothing was measured")
        table.add_row("assumes", f"{self.system_config}, {self.memory_mode}")
        return Group(Text(title), table)


def vela_report(
    path: str | os.PathLike[str],
    accelerator: str = "ethos-u55-128",
    *,
    system_config: str | None = None,
    memory_mode: str | None = None,
    timeout: float = 600.0,
) -> VelaReport:
    """Compile a LiteRT file for an Ethos-U with Arm's Vela, and tell what Vela estimates.

    Ethos-U are accelerators beside microcontrollers. They read weights in a compressed form, in
    which zeros take nearly no space, so single zeros save time where reading weights takes most of
    it; U85 also skips half of the products where 2 of 4 weights along the inputs are zero,
    `NByM(2, 4)`. The file is compiled in a subprocess and a temporary folder; the compiled file
    is not kept. (`vela FILE --accelerator-config ...` writes it.)

    Args:
        path: A dense `int8` file (`export_litert(quantization="int8", ...)`), also compressed.
        accelerator: One of `ethos-u55-32`, `-64`, `-128`, `-256`; `ethos-u65-256`, `-512`;
            `ethos-u85-128`, `-256`, `-512`, `-1024`, `-2048`.
        system_config: A section of Vela's `Arm/vela.ini`, such as `"Ethos_U55_Deep_Embedded"`.
            Default: Vela's own choice for the accelerator, named in the report.
        memory_mode: Likewise, such as `"Sram_Only"`.
        timeout: Seconds that Vela may take.

    Returns:
        The `VelaReport`. Equal files give equal figures.

    Raises:
        ImportError: if ethos-u-vela is not installed; it is in the extra `ethos-u`.
        ValueError: if the accelerator is unknown, or the file is not static int8, or its weights
            are in a sparse encoding, which Vela reads wrongly.
        LiteRTFileError: (a ValueError) if the file is damaged or no LiteRT file.
        ExportConversionError: if Vela fails, with its last line, or takes too long.
        FileNotFoundError: if there is no such file.

    Limits: Vela's time is an estimate of a model of the hardware, not a measurement, and
    operators that run on the CPU beside the Ethos-U are not in it. Untrained dense weights
    compress worse than trained ones: compare trained networks.

    Example:
    >>> from keras_sparse_ortho.export import vela_report
    >>> vela_report("model.tflite", "ethos-u54")
    Traceback (most recent call last):
        ...
    ValueError: `accelerator` must be one of ethos-u55-32, ... Received: accelerator='ethos-u54'

    Reference:
        [Vela, the compiler of Arm Ethos-U](https://gitlab.arm.com/artificial-intelligence/ethos-u/ethos-u-vela)
    """
    if accelerator not in ACCELERATORS:
        raise ValueError(
            f"`accelerator` must be one of {', '.join(ACCELERATORS)}. "
            f"Received: accelerator={accelerator!r}"
        )
    require(
        ("ethosu", "ai_edge_litert"),
        "Estimates for Ethos-U need Arm's compiler Vela",
        '"keras-sparse-ortho[ethos-u]"',
    )
    name = str(path_of("path", path))
    content = read_packed(Path(name))
    read_record(content, name)  # refuses a file that was changed since it was written
    content = flat(content, name)  # Vela reads no weights behind the flatbuffer
    chosen = {"--system-config": system_config, "--memory-mode": memory_mode}
    options = [text for option, value in chosen.items() if value for text in (option, value)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, f"{_NAME}.tflite").write_bytes(content)
        # Verbose, as otherwise there is no table of the operators.
        options += ["--accelerator-config", accelerator, "--verbose-performance"]
        _compile(name, folder, options, timeout)
        layers = _rows(Path(folder, f"{_NAME}_per-layer.csv"))
        # Its name ends in that of the system configuration.
        [summary] = _rows(next(Path(folder).glob(f"{_NAME}_summary_*.csv")))
    encoded = [one.name for one in read_weights(content) if one.encoding != "dense"]
    if encoded:
        raise ValueError(
            "Vela reads sparsely encoded weights as if they were dense, so that its file computes "
            'something else; export by the route "int8", which Vela compresses itself. '
            f"Received: {name!r} with {len(encoded)} encoded weights, such as {encoded[0]!r}"
        )
    on_cpu = tuple(row["Original Operator"] for row in layers if row["Target"] == "CPU")
    if len(on_cpu) == len(layers):
        raise ValueError(
            "An Ethos-U runs operators on integers, so the file must be static int8, as of "
            'export_litert(quantization="int8", representative_data=...). '
            f"Received: {name!r}, of whose {len(layers)} operators none can run there"
        )
    return VelaReport(
        path=name,
        accelerator=accelerator,
        system_config=summary["system_config"],
        memory_mode=summary["memory_mode"],
        ms=1e3 * float(summary["inference_time"]),
        cycles=round(float(summary["cycles_total"])),
        weight_bytes=round(float(summary["total_original_weights"])),
        encoded_bytes=round(float(summary["total_npu_encoded_weights"])),
        memory={
            memory: size
            for memory, column in _MEMORIES.items()
            if (size := round(1024 * float(summary[column])))
        },
        npu_operators=len(layers) - len(on_cpu),
        cpu_operators=on_cpu,
        vela=metadata.version("ethos-u-vela"),
    )


def _compile(path: str, folder: str, options: list[str], timeout: float) -> None:
    """Run Vela's own command in the folder."""
    command = ["-m", "ethosu.vela", f"{_NAME}.tflite", "--output-dir", ".", *options]
    try:
        status, lines = run_python(command, timeout, folder)
    except subprocess.TimeoutExpired:
        raise ExportConversionError(
            f"Vela must compile the file within {timeout:g} seconds; see `timeout`. "
            f"Received: {path!r}"
        ) from None
    if status == 0:
        return
    if lines[-1].startswith("Failed to load TfLite model"):
        raise LiteRTFileError(f"Vela cannot read the file. Received: {path!r}; {lines[-1]}")
    raise ExportConversionError(f"Vela must compile the file. Received: {path!r}; {lines[-1]}")


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))
