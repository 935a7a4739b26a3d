"""`kso`, the console command: it reads its arguments first, and only then loads Keras.

A module beside the package: importing any part of that loads Keras, which takes seconds.
"""

import argparse
import os
import sys
from importlib import metadata

_EPILOG = """\
exit status:
  0  done
  1  failed: conversion, verification, a missing package
  2  wrong arguments, or arguments that do not fit the model
  3  an input file is missing, damaged, or of the wrong kind

Results go to standard output, progress and warnings to standard error.
"""

# Arguments of `export_litert`, and the options that stand for them.
_NAMES = {
    "representative_data": "--data",
    "batch_size": "--batch-size",
    "path": "output",
} | {name: f"--{name}" for name in ("mode", "sample", "tolerance")}


def main() -> int:
    """Runs `kso` as a shell does; returns its exit status."""
    try:
        options = parser().parse_args()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    silence_libraries()
    from keras_sparse_ortho.cli import run

    return run(options)


def silence_libraries() -> None:
    """Keeps standard error for Python, and drops what TensorFlow's C++ code writes to it.

    TensorFlow logs several lines when it is imported, whatever its variables for that say. Other
    processes that are started from here inherit this.
    """
    sys.stderr.flush()
    terminal = os.dup(2)
    sys.stderr = os.fdopen(
        terminal, "w", 1, sys.stderr.encoding, "backslashreplace"
    )
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def limits_by_output(text: str) -> float | dict[str, float]:
    """A limit, as `0.01`, or limits by the names of outputs, as `class=0.01,box=0.05`."""
    try:
        if "=" not in text:
            return float(text)
        limits = {}
        for pair in text.split(","):
            name, _, limit = pair.rpartition("=")
            limits[name.strip()] = float(limit)
    except ValueError:
        raise argparse.ArgumentTypeError(
            "give a number, as 0.01, or one for each output, as class=0.01,box=0.05. "
            f"Received: {text!r}"
        ) from None
    return limits


def _add_model_and_rows(command: argparse.ArgumentParser) -> None:
    """The two files that a command reads which measures on rows."""
    command.add_argument("model", help="a .keras file")
    command.add_argument(
        "--data", required=True, metavar="FILE", help="rows: .npy, or .npz"
    )


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    whole = argparse.ArgumentParser(
        prog="kso",
        description="Shrink and inspect Keras models, export them as LiteRT files, time these.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"kso {metadata.version('keras-sparse-ortho')}"
    whole.add_argument("--version", action="version", version=version)
    commands = whole.add_subparsers(title="commands", required=True)

    shrink = commands.add_parser(
        "shrink",
        help="a trained model to the smallest LiteRT file that answers as well",
        description="Judges dense and pruned files on rows that made none of them; writes the "
        "smallest that keeps the limits; explained in keras_sparse_ortho.shrinking.shrink.",
    )
    _add_model_and_rows(shrink)
    shrink.add_argument("--labels", metavar="FILE", help="their labels: .npy")
    shrink.add_argument(
        "--out",
        required=True,
        metavar="FILE",
        help=".tflite or .tflite.gz; with --target micro also .h",
    )
    shrink.add_argument(
        "--max-drop",
        type=limits_by_output,
        metavar="LIMIT",
        help="of the score (default .01), or of each output's: class=.01,box=.05",
    )
    shrink.add_argument("--max-bytes", type=int)
    shrink.add_argument(
        "--max-ms", type=float, help="for one row on one thread"
    )
    shrink.add_argument(
        "--target",
        choices=["arm64", "micro"],
        help="arm64: files are timed without AMX; micro: for microcontrollers, --out is a C header "
        "(.h) or .tflite, and the limits are the next two",
    )
    shrink.add_argument(
        "--max-flash", type=int, metavar="BYTES", help="of the C array"
    )
    shrink.add_argument(
        "--max-ram",
        type=int,
        metavar="BYTES",
        help="of the arena, as tflite-micro reports it",
    )
    shrink.add_argument(
        "--decode-code",
        type=int,
        default=0,
        metavar="BYTES",
        help="of code that count with packed zeros (11100 on a Cortex-M4; default 0)",
    )
    shrink.add_argument(
        "--minutes", type=float, default=10.0, help="to try (default 10)"
    )
    shrink.add_argument(
        "--metric", choices=["expected accuracy", "agreement", "closeness"]
    )
    shrink.add_argument(
        "--prefer", choices=["both", "bytes", "ms"], default="both"
    )
    shrink.add_argument(
        "--html", metavar="FILE", help="the report with its picture, too"
    )
    limits = (
        *("max_drop", "max_bytes", "max_ms", "minutes", "target"),
        *("max_flash", "max_ram", "decode_code"),
    )
    names = {name: f"--{name.replace('_', '-')}" for name in limits}
    shrink.set_defaults(
        command="shrink",
        names=names | {"data": "--data", "path": "--out", "html": "--html"},
    )

    narrow = commands.add_parser(
        "narrow",
        help="a trained model with fewer channels, to train further",
        description="Takes out the channels that cost least on the rows, refits what reads them, "
        "and writes a plain Keras model; explained in keras_sparse_ortho.narrow.",
    )
    _add_model_and_rows(narrow)
    narrow.add_argument(
        "share", type=float, help="of the parameters that may stay, as 0.5"
    )
    narrow.add_argument(
        "--out", required=True, metavar="FILE", help="the .keras file to write"
    )
    narrow.add_argument(
        "--cost",
        choices=["parameters", "flops", "bytes"],
        default="parameters",
        help="what the share is of (default parameters)",
    )
    narrow.add_argument("--minutes", type=float, help="for the table of widths")
    narrow.add_argument(
        "--html", metavar="FILE", help="the table of widths with its picture"
    )
    narrow.set_defaults(
        command="narrow",
        names={
            "data": "--data",
            "path": "--out",
            "minutes": "--minutes",
            "target": "share",
            "html": "--html",
        },
    )

    sensitivity = commands.add_parser(
        "sensitivity",
        help="what each layer of a trained model loses when it is pruned or rounded",
        description="Measures the error of each kernel at several densities, in int8 and in int4; "
        "explained in keras_sparse_ortho.sensitivity.",
    )
    _add_model_and_rows(sensitivity)
    sensitivity.add_argument(
        "--densities",
        type=float,
        nargs="+",
        default=[0.5, 0.3, 0.2, 0.1, 0.05],
        metavar="DENSITY",
    )
    sensitivity.add_argument(
        "--html", metavar="FILE", help="the table with its picture, too"
    )
    sensitivity.set_defaults(
        command="sensitivity",
        names={
            "data": "--data",
            "densities": "--densities",
            "density": "--densities",
            "html": "--html",
        },
    )

    report = commands.add_parser(
        "report",
        help="density, parameters and FLOPs of every kernel of a Keras model",
    )
    report.add_argument("model", help="a .keras file")
    report.add_argument(
        "--no-orthogonality",
        action="store_true",
        help="leave out the orthogonality errors",
    )
    report.add_argument("--json", action="store_true", help="print JSON")
    report.set_defaults(command="report", names={})

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
    export.add_argument(
        "--sample", metavar="FILE", help="rows to compare on: .npy or .npz"
    )
    export.add_argument(
        "--data", metavar="FILE", help="rows to calibrate int8 on: .npy or .npz"
    )
    export.add_argument("--tolerance", type=float)
    export.add_argument(
        "--target", help="of --mode fast: arm64, instead of this machine"
    )
    export.add_argument(
        "--json", action="store_true", help="print the report as JSON"
    )
    export.set_defaults(command="export", names=_NAMES)

    bench = commands.add_parser(
        "bench",
        help="time LiteRT files",
        description="Times files in interleaved rounds. Prints the median time of one call.",
    )
    bench.add_argument(
        "files", nargs="+", help=".tflite files, also compressed: .gz"
    )
    bench.add_argument("--threads", type=int, nargs="+", default=[1])
    bench.add_argument(
        "--seconds", type=float, default=5.0, help="for all of them (default 5)"
    )
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.set_defaults(command="bench", names={})
    return whole


if __name__ == "__main__":
    sys.exit(main())
