"""`kso bench`: latency of LiteRT files, side by side."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from keras_sparse_ortho.cli._files import InputFileError


@dataclasses.dataclass(frozen=True)
class Timing:
    """The median time of one call of a file."""

    file: str
    route: str | None
    xnnpack: bool
    threads: int
    batch_size: int
    latency_ms: float


def add_bench(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="time LiteRT files, with the settings that they need",
        description="Times files in interleaved rounds, each with the interpreter's settings "
        "that it needs. Prints the median time of one call.",
    )
    parser.add_argument("files", nargs="+", help=".tflite files, or their .zst or .gz sidecars")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--seconds", type=float, default=5.0, help="for all together (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=run, needs_no_backend=True)


def run(options: argparse.Namespace, console: Console) -> None:
    """Time, and print a table."""
    if min(options.threads) < 1 or not options.seconds > 0:
        raise ValueError(
            "`--threads` must be 1 or more and `--seconds` above 0. "
            f"Received: --threads {options.threads}, --seconds {options.seconds}"
        )
    with console.status("Opening and checking the files") as status:
        timings = _time(options, status)
    if options.json:
        print(json.dumps([dataclasses.asdict(one) for one in timings], indent=2))
        return
    table = Table("file", "route", "XNNPACK")
    for column in ("threads", "batch", "ms a call"):
        table.add_column(column, justify="right")
    for one in timings:
        setting = "on" if one.xnnpack else "off"
        figures = (str(one.threads), str(one.batch_size), f"{one.latency_ms:.3g}")
        table.add_row(one.file, one.route or "not ours", setting, *figures)
    Console().print(table)


def _time(options: argparse.Namespace, status: Any) -> list[Timing]:
    import numpy as np

    from keras_sparse_ortho.export import BenchmarkCase, LiteRTFileError, latencies, load_litert

    rng = np.random.default_rng(0)
    cases, timings = [], []
    for name in options.files:
        try:
            opened = load_litert(name)
        except (LiteRTFileError, FileNotFoundError) as error:
            raise InputFileError(str(error)) from error
        inputs = {
            spec.name: (
                rng.standard_normal(spec.shape)
                if spec.dtype.startswith("float")
                else np.zeros(spec.shape)  # the valid values are not known
            ).astype(spec.dtype)
            for spec in opened.inputs
        }
        for threads in options.threads:
            cases.append(BenchmarkCase(Path(name), inputs, opened.xnnpack, threads))
            timings.append(
                Timing(name, opened.route, opened.xnnpack, threads, opened.batch_size, 0.0)
            )
    status.update("Timing")
    measured = latencies(cases, rounds=200, seconds=options.seconds)
    return [
        dataclasses.replace(one, latency_ms=ms) for one, ms in zip(timings, measured, strict=True)
    ]
