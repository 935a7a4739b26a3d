"""Arguments of the commands, and what a failure returns to the shell."""

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from keras_sparse_ortho.cli._bench import add_bench
from keras_sparse_ortho.cli._export import add_export
from keras_sparse_ortho.cli._files import InputFileError
from keras_sparse_ortho.cli._report import add_report

OK, FAILED, USAGE, BAD_FILE = 0, 1, 2, 3

_EPILOG = """\
exit status:
  0  done
  1  it could not be done: conversion, verification, a missing package
  2  wrong arguments, or arguments that do not fit the model
  3  a file to read is missing, damaged, or not of the kind that is needed

Results go to standard output, progress and warnings to standard error.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What stands after `kso` on the command line; None: `sys.argv`.

    Returns:
        The exit status: 0 done, 1 failed, 2 wrong arguments, 3 a file that cannot be read.

    Example:
    >>> from keras_sparse_ortho.cli import main
    >>> main(["report", "none.keras"])
    3
    """
    options = parsed(arguments)
    return options if isinstance(options, int) else run(options)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace | int:
    """The options of a command line; the exit status, if that is all there is to say."""
    try:
        return _parser().parse_args(arguments)
    except SystemExit as leaving:  # argparse has said why
        return int(leaving.code or 0)


def run(options: argparse.Namespace, otherwise: Callable[[], int] | None = None) -> int:
    """Run the command of some options; the exit status.

    Args:
        options: What `parsed` has returned.
        otherwise: What to do instead of saying what went wrong.
    """
    console = Console(stderr=True)
    command: Callable[[Any, Console], None] = options.command
    with warnings.catch_warnings():
        warnings.showwarning = _printer(console)
        try:
            command(options, console)
        except Exception as error:
            return otherwise() if otherwise is not None else _said(console, error)
    return OK


def _said(console: Console, error: Exception) -> int:
    """Says what an error is about; the exit status."""
    match error:
        case InputFileError():
            return _say(console, error, BAD_FILE)
        case ValueError():
            return _say(console, error, USAGE)
        case RuntimeError() | ImportError() | OSError():
            return _say(console, error, FAILED)
    raise error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kso",
        description="Look at sparse Keras models, ship them as LiteRT files, time these.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True)
    for add in (add_report, add_export, add_bench):
        add(commands)
    return parser


def _say(console: Console, error: Exception, status: int) -> int:
    console.print(f"kso: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
    return status


def _printer(console: Console) -> Any:
    def show(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if issubclass(category, UserWarning):
            text = f"kso: warning: {message}"
            console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)

    return show


if __name__ == "__main__":
    sys.exit(main())
