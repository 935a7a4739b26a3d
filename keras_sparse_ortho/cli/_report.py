"""`kso report`: density, parameters and FLOPs of a model."""

import argparse
import json
from typing import Any

from rich.console import Console

from keras_sparse_ortho.cli._files import read_keras


def add_report(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "report", help="density, parameters and FLOPs of every kernel of a Keras model"
    )
    parser.add_argument("model", help="a .keras file")
    parser.add_argument(
        "--no-orthogonality", action="store_true", help="leave out the orthogonality errors"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=run, needs_no_backend=True)


def run(options: argparse.Namespace, console: Console) -> None:
    """Print the report."""
    from keras_sparse_ortho.analysis import report

    with console.status("Loading the model"):
        model = read_keras(options.model)
    found = report(model, orthogonality=not options.no_orthogonality)
    if options.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        Console().print(found)
