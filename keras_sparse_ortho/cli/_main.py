"""The command line: `kso shrink`, `kso report`, `kso export`, `kso bench`."""

import argparse
import json
import re
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from keras_sparse_ortho._files import shown
from keras_sparse_ortho._text import printable, printable_lines
from keras_sparse_ortho.cli._files import InputFileError, check_output, read_keras, read_rows

OK, FAILED, USAGE, BAD_FILE = 0, 1, 2, 3

_EPILOG = """\
exit status:
  0  done
  1  failed: conversion, verification, a missing package
  2  wrong arguments, or arguments that do not fit the model
  3  an input file is missing, damaged, or of the wrong kind

Results go to standard output, progress and warnings to standard error.
"""

# Arguments of `export_litert`, and the options that stand for them.
_NAMES = {"representative_data": "--data", "batch_size": "--batch-size", "path": "output"} | {
    name: f"--{name}" for name in ("mode", "sample", "tolerance")
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command: `arguments` are the command line after `kso`, by default `sys.argv`.

    Returns the exit status: 0 done, 1 failed, 2 wrong arguments, 3 an unreadable input file.

    Examples:
        >>> from keras_sparse_ortho.cli import main
        >>> main(["report", "none.keras"])
        3
    """
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    from rich.console import Console  # `kso --help` does without it, in half the time

    console = Console(stderr=True)

    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if issubclass(category, UserWarning):
            _print(console, f"warning: {_in_options(str(message), options)}", "yellow")

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        try:
            options.command(options, console)
        except InputFileError as error:
            _print(console, str(error), "red")
            return BAD_FILE
        except (ValueError, RuntimeError, ImportError, OSError) as error:
            status = USAGE if isinstance(error, ValueError) else FAILED
            _print(console, _in_options(str(error), options), "red")
            return status
    return OK


def _print(console: Any, text: str, style: str) -> None:
    text = printable_lines(f"kso: {text}")
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _show(text: str) -> None:
    """Prints a result; where the terminal lacks a letter, as an escape."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _in_options(message: str, options: argparse.Namespace) -> str:
    """A message with options in place of the arguments that they stand for."""
    names: dict[str, str] = options.names
    # Quoted or before "=", but no input or output of the model that has such a name.
    found = rf"(?<!put `)\b({'|'.join(names)})(?:=(?=`)|(?=[`=]))"
    return re.sub(found, lambda match: names[match[1]], message) if names else message


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kso",
        description="Inspect sparse Keras models, export them as LiteRT files, time these.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"kso {metadata.version('keras-sparse-ortho')}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", required=True)

    shrink = commands.add_parser(
        "shrink",
        help="a trained model to the smallest LiteRT file that answers as well",
        description="Judges dense and pruned files on rows that made none of them; writes the "
        "smallest that keeps the limits; explained in keras_sparse_ortho.export.shrink.",
    )
    shrink.add_argument("model", help="a .keras file")
    shrink.add_argument("--data", required=True, metavar="FILE", help="rows: .npy, or .npz")
    shrink.add_argument("--labels", metavar="FILE", help="their labels: .npy")
    shrink.add_argument("--out", required=True, metavar="FILE", help=".tflite or .tflite.gz")
    shrink.add_argument("--max-drop", type=float, default=0.01, help="of the score (default .01)")
    shrink.add_argument("--max-bytes", type=int)
    shrink.add_argument("--max-ms", type=float, help="for one row on one thread")
    shrink.add_argument("--minutes", type=float, default=10.0, help="to try (default 10)")
    shrink.add_argument("--metric", choices=["agreement", "closeness"])
    names = {name: f"--{name.replace('_', '-')}" for name in ("max_drop", "max_bytes", "max_ms")}
    shrink.set_defaults(command=_shrink, names=names | {"data": "--data", "path": "--out"})

    report = commands.add_parser(
        "report", help="density, parameters and FLOPs of every kernel of a Keras model"
    )
    report.add_argument("model", help="a .keras file")
    report.add_argument(
        "--no-orthogonality", action="store_true", help="leave out the orthogonality errors"
    )
    report.add_argument("--json", action="store_true", help="print JSON")
    report.set_defaults(command=_report, names={})

    export = commands.add_parser(
        "export",
        help="write a LiteRT (TFLite) file that was run and compared with Keras",
        description="Writes a LiteRT file that was run and compared with Keras; the options are "
        "explained in keras_sparse_ortho.export_litert.",
    )
    export.add_argument("model", help="a .keras file")
    export.add_argument("output", help="the .tflite file to write")
    export.add_argument(
        "--mode",
        help="small, gzip, fast, or a route such as float32 (dense) or int8+blocks; "
        "default: the smallest float32 file",
    )
    export.add_argument("--batch-size", type=int, default=1, metavar="ROWS")
    export.add_argument("--sample", metavar="FILE", help="rows to compare on: .npy or .npz")
    export.add_argument("--data", metavar="FILE", help="rows to calibrate int8 on: .npy or .npz")
    export.add_argument("--tolerance", type=float)
    export.add_argument("--target", help="of --mode fast: arm64, instead of this machine")
    export.add_argument("--json", action="store_true", help="print the report as JSON")
    export.set_defaults(command=_export, names=_NAMES)

    bench = commands.add_parser(
        "bench",
        help="time LiteRT files",
        description="Times files in interleaved rounds. Prints the median time of one call.",
    )
    bench.add_argument("files", nargs="+", help=".tflite files, also compressed: .gz")
    bench.add_argument("--threads", type=int, nargs="+", default=[1])
    bench.add_argument("--seconds", type=float, default=5.0, help="for all of them (default 5)")
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.set_defaults(command=_bench, names={})
    return parser


def _report(options: argparse.Namespace, console: Any) -> None:
    from rich.console import Console

    from keras_sparse_ortho.analysis import report

    with console.status("Loading the model"):
        model = read_keras(options.model)
    try:
        found = report(model, orthogonality=not options.no_orthogonality)
    except ValueError as error:  # there is no other argument that could be wrong
        raise InputFileError(
            "The model in the file must be one that the backend can call, with names of layers "
            "that it takes. "
            f"Received: {options.model!r}, {shown(' '.join(str(error).split()))}"
        ) from error
    if options.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        table = Console()
        with table.capture() as captured:
            table.print(found)
        _show(captured.get().rstrip("\n"))


def _shrink(options: argparse.Namespace, console: Any) -> None:
    from keras_sparse_ortho.export import shrink

    inputs = {"model": options.model, "--data": options.data, "--labels": options.labels}
    check_output(options.out, inputs)
    rows, labels = read_rows(options.data), read_rows(options.labels)
    with console.status("Loading the model"):
        model = read_keras(options.model)
    names = {tensor.name for tensor in getattr(model, "inputs", None) or ()}
    if isinstance(rows, dict):
        labels = labels if "y" in names else rows.pop("y", labels)
        rows = rows.popitem()[1] if len(rows) == 1 else rows
    limits = ("max_drop", "max_bytes", "max_ms", "minutes", "metric")
    given = {name: vars(options)[name] for name in limits}
    data = rows if labels is None else (rows, labels)
    _show(str(shrink(model, data, options.out, verbose=True, **given)))


def _export(options: argparse.Namespace, console: Any) -> None:
    from keras_sparse_ortho.export import export_litert

    inputs = {"model": options.model, "--sample": options.sample, "--data": options.data}
    check_output(options.output, inputs)
    sample, data = read_rows(options.sample), read_rows(options.data)
    with console.status("Loading the model") as status:
        model = read_keras(options.model)
        status.update("Converting, running and comparing, in other processes")
        given = {k: vars(options)[k] for k in ("mode", "batch_size", "tolerance", "target")}
        report = export_litert(
            model, options.output, sample=sample, representative_data=data, **given
        )
    _show(report.to_json() if options.json else str(report))


def _bench(options: argparse.Namespace, console: Any) -> None:
    if min(options.threads) < 1 or not options.seconds > 0:
        raise ValueError(
            "`--threads` must be 1 or more and `--seconds` above 0. "
            f"Received: --threads {options.threads}, --seconds {options.seconds}"
        )
    from keras_sparse_ortho.errors import LiteRTFileError
    from keras_sparse_ortho.export import latencies, load_litert

    timings: list[dict[str, Any]] = []
    with console.status("Opening and checking the files") as status:
        opened = []
        for name in options.files:
            try:
                opened.append(load_litert(name))
            except (LiteRTFileError, FileNotFoundError) as error:
                raise InputFileError(str(error)) from error
        status.update("Timing")
        for threads in options.threads:
            times = latencies(options.files, threads, options.seconds / len(options.threads))
            for name, one, ms in zip(options.files, opened, times, strict=True):
                about = {"route": one.route, "batch_size": one.batch_size}
                timings.append({"file": name, "threads": threads, "latency_ms": ms, **about})
    if options.json:
        print(json.dumps(timings, indent=2))
        return
    for row in timings:
        _show(
            f"{row['latency_ms']:.3g} ms a call: {printable(row['file'])} "
            f"({row['route'] or 'unknown'}), {row['threads']} threads, batch {row['batch_size']}"
        )
