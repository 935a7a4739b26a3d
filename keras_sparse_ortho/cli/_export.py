"""`kso export`: a Keras file to a verified LiteRT file."""

import argparse
from typing import Any

from rich.console import Console

from keras_sparse_ortho.cli._files import read_keras, read_rows


def add_export(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "export",
        help="write a LiteRT (TFLite) file that was run and compared with Keras",
        description="Writes a LiteRT file that was run and compared with Keras; see "
        "keras_sparse_ortho.export_litert for what the options mean.",
    )
    parser.add_argument("model", help="a .keras file")
    parser.add_argument("output", help="the .tflite file to write")
    parser.add_argument(
        "--mode", help="small, fast, sparse, auto, or a route such as dynamic_int8+1x16"
    )
    parser.add_argument("--quantization", choices=["float32", "float16", "dynamic_int8", "int8"])
    parser.add_argument("--batch-size", type=int, default=1, metavar="ROWS")
    parser.add_argument("--sample", metavar="FILE", help="rows to compare on: .npy or .npz")
    parser.add_argument("--data", metavar="FILE", help="rows to calibrate int8 on: .npy or .npz")
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--sidecar", choices=["gzip", "zstd"], help="write a compressed copy, too")
    parser.add_argument("--threads", type=int, default=1, help="where latency is measured")
    parser.add_argument("--picture", metavar="FILE", help="draw size and latency of the routes")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(command=run, needs_no_backend=False)


def run(options: argparse.Namespace, console: Console) -> None:
    """Export, and print the report."""
    from keras_sparse_ortho.export import export_litert

    sample, data = read_rows(options.sample), read_rows(options.data)
    with console.status("Loading the model") as status:
        model = read_keras(options.model)
        status.update("Converting, running and comparing, in other processes")
        report = export_litert(
            model,
            options.output,
            mode=options.mode,
            quantization=options.quantization,
            representative_data=data,
            batch_size=options.batch_size,
            sample=sample,
            tolerance=options.tolerance,
            sidecar=options.sidecar,
            threads=options.threads,
        )
        if options.picture is not None:
            report.plot(options.picture)
    if options.json:
        print(report.to_json())
    else:
        Console().print(report)
