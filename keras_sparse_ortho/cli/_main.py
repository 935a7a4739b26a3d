"""The command line: `kso shrink`, `narrow`, `sensitivity`, `report`, `export`, `bench`."""

import argparse
import json
import re
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from keras_sparse_ortho._files import check_not_an_input, shown
from keras_sparse_ortho._interception import intercepted
from keras_sparse_ortho._text import printable, printable_lines
from keras_sparse_ortho.cli._files import (
    InputFileError,
    check_output,
    read_keras,
    read_rows,
)
from keras_sparse_ortho_command import parser

OK, FAILED, USAGE, BAD_FILE = 0, 1, 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command: `arguments` are the command line after `kso`, by default `sys.argv`.

    Returns the exit status: 0 done, 1 failed, 2 wrong arguments, 3 an unreadable input file.

    Examples:
        >>> from keras_sparse_ortho.cli import main
        >>> main(["report", "none.keras"])
        3
    """
    try:
        options = parser().parse_args(arguments)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return run(options)


def run(options: argparse.Namespace) -> int:
    """Runs the command of arguments that were read; returns the exit status."""
    console = Console(stderr=True)

    def show(
        _: Any, message: Warning | str, category: type[Warning], *place: Any
    ) -> None:
        if issubclass(category, UserWarning):
            _print(
                console,
                f"warning: {_in_options(str(message), options)}",
                "yellow",
            )

    with intercepted(warnings, "showwarning", show):
        try:
            _COMMANDS[options.command](options, console)
        except InputFileError as error:
            _print(console, str(error), "red")
            return BAD_FILE
        except (ValueError, RuntimeError, ImportError, OSError) as error:
            status = USAGE if isinstance(error, ValueError) else FAILED
            _print(console, _in_options(_text_of(error), options), "red")
            return status
        # Any: a layer, or a backend, may raise its own kinds.
        except Exception as error:
            _print(console, _text_of(error, type(error).__name__), "red")
            return FAILED
    return OK


def _print(console: Console, text: str, style: str) -> None:
    text = printable_lines(f"kso: {text}")
    console.print(
        text, style=style, markup=False, highlight=False, soft_wrap=True
    )


def _show(text: str) -> None:
    """Prints a result; where the terminal lacks a letter, as an escape."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _text_of(error: Exception, kind: str = "") -> str:
    """An error in one line, without escape codes; only that of `shrink` has a table."""
    from keras_sparse_ortho.errors import ShrinkError

    if isinstance(error, ShrinkError):
        return str(error)
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return f"{kind}: {text}" if kind else text


def _in_options(message: str, options: argparse.Namespace) -> str:
    """A message with options in place of the arguments that they stand for."""
    names: dict[str, str] = options.names
    # Quoted or before "=", but no input or output of the model that has such a name.
    pattern = rf"(?<!put `)\b({'|'.join(names)})(?:=(?=`)|(?=[`=]))"
    return (
        re.sub(pattern, lambda match: names[match[1]], message)
        if names
        else message
    )


def _report(options: argparse.Namespace, console: Console) -> None:
    """Runs `kso report`: prints the density of each kernel of a model."""
    from keras_sparse_ortho.analysis import report

    with console.status("Loading the model"):
        model = read_keras(options.model)
    try:
        figures = report(model, orthogonality=not options.no_orthogonality)
    # There is no other argument that could be wrong.
    except ValueError as error:
        raise InputFileError(
            "The model in the file must be one that the backend can call, with names of layers "
            "that it takes. "
            f"Received: {options.model!r}, {shown(' '.join(str(error).split()))}"
        ) from error
    if options.json:
        print(json.dumps(figures.to_dict(), indent=2))
    else:
        table = Console()
        with table.capture() as captured:
            table.print(figures)
        _show(captured.get().rstrip("\n"))


def _shrink(options: argparse.Namespace, console: Console) -> None:
    """Runs `kso shrink`: writes the best file, and prints the table of trials."""
    from keras_sparse_ortho.shrinking import shrink

    inputs = {
        "model": options.model,
        "--data": options.data,
        "--labels": options.labels,
    }
    check_output(options.out, inputs)
    _check_html(options, inputs)
    rows, labels = read_rows(options.data), read_rows(options.labels)
    with console.status("Loading the model"):
        # The loss says what outputs are: classes, or values.
        model = read_keras(options.model, compiled=True)
    names = {tensor.name for tensor in getattr(model, "inputs", None) or ()}
    if isinstance(rows, dict):
        labels = labels if "y" in names else rows.pop("y", labels)
    rows = _of_one_input(rows)
    arguments = (
        *("max_drop", "max_bytes", "max_ms", "minutes", "metric", "prefer"),
        *("target", "max_flash", "max_ram", "decode_code"),
    )
    settings = {name: vars(options)[name] for name in arguments}
    data = rows if labels is None else (rows, labels)
    report = shrink(model, data, options.out, verbose=True, **settings)
    _show(str(report))
    _write_page(options, {"Files": report})


def _narrow(options: argparse.Namespace, console: Console) -> None:
    """Runs `kso narrow`: writes a narrower Keras model, and prints its widths."""
    from keras_sparse_ortho.calibration import widths
    from keras_sparse_ortho.pruning import narrow

    inputs = {"model": options.model, "--data": options.data}
    check_output(options.out, inputs)
    _check_html(options, inputs)
    if not options.out.endswith(".keras"):
        raise ValueError(
            f"The name of a Keras model must end in .keras. Received: --out {options.out}"
        )
    rows = _of_one_input(read_rows(options.data))
    with console.status("Loading the model") as status:
        model = read_keras(options.model)
        status.update("Measuring the errors of widths")
        table = widths(model, rows, minutes=options.minutes)
        choice = table.search(options.share, cost=options.cost)
        status.update("Refitting")
        small = narrow(model, choice, data=rows, table=table)
        small.save(options.out)
    _show(str(table))
    for name, width in choice.items():
        _show(f"{name}: {width} of {table.groups[name].width} channels")
    _show(
        f"{small.count_params():,} of {model.count_params():,} parameters; "
        f"predicted error {table.predicted(choice):.2g}"
    )
    _write_page(options, {"Widths": table})


def _sensitivity(options: argparse.Namespace, console: Console) -> None:
    """Runs `kso sensitivity`: prints what each kernel of a model loses."""
    from keras_sparse_ortho.analysis import sensitivity

    inputs = {"model": options.model, "--data": options.data}
    _check_html(options, inputs)
    rows = _of_one_input(read_rows(options.data))
    with console.status("Loading the model") as status:
        model = read_keras(options.model)
        status.update("Measuring")
        table = sensitivity(model, rows, densities=options.densities)
    _show(str(table))
    _write_page(options, {"Sensitivity": table})


def _of_one_input(rows: Any) -> Any:
    """Rows, without the name of the only array of a file."""
    if isinstance(rows, dict) and len(rows) == 1:
        return next(iter(rows.values()))
    return rows


def _check_html(
    options: argparse.Namespace, inputs: dict[str, str | None]
) -> None:
    """Raises ValueError, before the work, if the page would replace a file of the command."""
    if options.html is None:
        return
    page = Path(options.html)
    check_not_an_input("html", page, inputs)
    output = vars(options).get("out")
    if output is not None and page.resolve() == Path(output).resolve():
        raise ValueError(
            f"`html` must name another file than `--out`. Received: html={options.html!r}"
        )


def _write_page(
    options: argparse.Namespace, reports: dict[str, object]
) -> None:
    """Writes the page of `--html`, if it was asked for."""
    if options.html is not None:
        from keras_sparse_ortho.analysis import write_html

        write_html(options.html, reports, title=options.model)


def _export(options: argparse.Namespace, console: Console) -> None:
    """Runs `kso export`: writes a verified LiteRT file, and prints its report."""
    from keras_sparse_ortho.export import export_litert

    inputs = {
        "model": options.model,
        "--sample": options.sample,
        "--data": options.data,
    }
    check_output(options.output, inputs)
    sample, data = read_rows(options.sample), read_rows(options.data)
    with console.status("Loading the model") as status:
        model = read_keras(options.model)
        status.update("Converting, running and comparing, in other processes")
        settings = {
            k: vars(options)[k]
            for k in ("mode", "batch_size", "tolerance", "target")
        }
        report = export_litert(
            model,
            options.output,
            sample=sample,
            representative_data=data,
            **settings,
        )
    _show(report.to_json() if options.json else str(report))


def _bench(options: argparse.Namespace, console: Console) -> None:
    """Runs `kso bench`: prints the median time of a call of each file."""
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
            times = latencies(
                options.files, threads, options.seconds / len(options.threads)
            )
            for name, model, ms in zip(
                options.files, opened, times, strict=True
            ):
                about = {"route": model.route, "batch_size": model.batch_size}
                timings.append(
                    {
                        "file": name,
                        "threads": threads,
                        "latency_ms": ms,
                        **about,
                    }
                )
    if options.json:
        print(json.dumps(timings, indent=2))
        return
    for row in timings:
        _show(
            f"{row['latency_ms']:.3g} ms a call: {printable(row['file'])} "
            f"({row['route'] or 'unknown'}), {row['threads']} threads, batch {row['batch_size']}"
        )


_COMMANDS = {
    "shrink": _shrink,
    "narrow": _narrow,
    "sensitivity": _sensitivity,
    "report": _report,
    "export": _export,
    "bench": _bench,
}
