"""Where results go, what made them, and how they are counted and shown.

`append` adds a run as a line of `results/<name>.jsonl`, with machine and versions; `write_page`
writes `results/<name>.md`, with machine, versions, commit, command and seeds. With `--quick`, or if
the environment variable KSO_RESULTS names another folder, everything goes there: results of small
settings are never mixed with the real ones.
"""

import contextlib
import datetime
import decimal
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from decimal import Decimal
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
COMMAND = tuple(sys.argv)
"""The words of this process, with the name of the measurement, which `runner.main` removes."""
QUICK = "--quick" in COMMAND
RESULTS = pathlib.Path(
    os.environ.setdefault(
        "KSO_RESULTS", str(HERE / ("out/quick" if QUICK else "results"))
    )
)
"""The folder of this run; processes that it starts inherit it."""

_PACKAGES = (
    *(
        "keras-sparse-ortho",
        "keras",
        "numpy",
        "scipy",
        "tensorflow",
        "jax",
        "torch",
        "tf_keras",
    ),
    *("tensorflow-model-optimization", "ai-edge-litert", "ethos-u-vela"),
    *("onnxruntime", "openvino"),
)
_SETTINGS = (
    "KERAS_BACKEND",
    "XLA_FLAGS",
    "OPENBLAS_NUM_THREADS",
    "GLIBC_TUNABLES",
)


def machines_of(lines: list[dict[str, Any]]) -> str:
    """The machines that measured some lines."""
    names = {line["made"]["machine"] for line in lines}
    return "; ".join(sorted(names))


def has_amx() -> bool:
    """Whether the processor has the tiles of Intel's servers."""
    return "amx_int8" in pathlib.Path("/proc/cpuinfo").read_text()


def machine() -> str:
    """One line about where this ran."""
    model = platform.processor() or "unknown processor"
    info = pathlib.Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            model = line.split(":")[1].strip()
            break
    cores = f"{os.cpu_count()} cores"
    if hasattr(os, "sched_getaffinity"):  # not on every system
        usable = len(os.sched_getaffinity(0))
        cores = cores if usable == os.cpu_count() else f"{usable} of {cores}"
    return f"{model}, {cores}, Python {platform.python_version()}"


def versions() -> dict[str, str]:
    """Versions of the packages that may be used here."""
    installed = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def commit() -> str:
    """The commit of the repository, with a plus if the code has changed since; or "unknown"."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        process = subprocess.run(
            command, cwd=HERE, capture_output=True, text=True, check=True
        )
        return process.stdout.strip()

    try:
        changed = git(
            "status",
            "--porcelain",
            "--",
            "../keras_sparse_ortho",
            "*.py",
            "*.toml",
        )
        return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def about(seeds: Iterable[int] = (0,)) -> dict[str, Any]:
    """Everything recorded with a page."""
    return {
        "command": f"python benchmarks/{' '.join([pathlib.Path(COMMAND[0]).name, *COMMAND[1:]])}",
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "settings": {
            name: os.environ[name] for name in _SETTINGS if name in os.environ
        },
        "load": round(os.getloadavg()[0], 1),
        "seeds": sorted(set(seeds)),
    }


def append(lines: pathlib.Path, row: dict[str, Any]) -> None:
    """Writes one finished run as a line of JSON, with machine and versions."""
    installed = versions()
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    made = {
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
    }
    made |= {
        name: installed[name]
        for name in ("keras", backend)
        if name in installed
    }
    lines.parent.mkdir(parents=True, exist_ok=True)
    with lines.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row | {"made": made}) + "\n")


def finished(lines: pathlib.Path) -> list[dict[str, Any]]:
    """The runs in a file of JSON lines, without lines that a kill cut off."""
    runs = []
    for line in lines.read_text().splitlines() if lines.exists() else []:
        try:
            runs.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return runs


def write_page(
    page: pathlib.Path, text: str, seeds: Iterable[int] = (0,)
) -> None:
    """Prints a result and writes it to a page, with machine, versions and command."""
    origin = about(seeds)
    packages = ", ".join(
        f"{name} {version}" for name, version in origin["versions"].items()
    )
    seed_list = ", ".join(map(str, origin["seeds"]))
    text = f"{text.rstrip()}\n\nMade by `{origin['command']}`, commit {origin['commit']}, "
    text += f"{origin['date']}, seeds {seed_list}, load {origin['load']}: {packages}.\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    print(text)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


# --- lines and statistics -------------------------------------------------------------------------


def groups(
    lines: Iterable[dict[str, Any]], *names: str
) -> dict[Any, list[dict[str, Any]]]:
    """The lines that agree in some settings, by these; one setting is the key itself."""
    groups_by_key: dict[Any, list[dict[str, Any]]] = {}
    for line in lines:
        key = tuple(line[name] for name in names)
        groups_by_key.setdefault(key[0] if len(names) == 1 else key, []).append(
            line
        )
    return groups_by_key


def last_of_each(
    lines: Iterable[dict[str, Any]], *names: str
) -> dict[Any, dict[str, Any]]:
    """The last line of each kind, by the settings that make it one."""
    return {key: members[-1] for key, members in groups(lines, *names).items()}


def matching(
    lines: Iterable[dict[str, Any]], **which: Any
) -> list[dict[str, Any]]:
    """The lines that have these values."""
    return [line for line in lines if which.items() <= line.items()]


def column(
    lines: Iterable[dict[str, Any]], name: str, scale: float = 1.0
) -> list[float]:
    """The values of a name, times a factor."""
    return [scale * line[name] for line in lines]


def middle_of_processes(
    lines: Iterable[dict[str, Any]],
    key: Callable[[dict[str, Any]], Hashable],
    by: str,
) -> dict[Hashable, dict[str, Any]]:
    """For each kind of result, the median line of all processes of the last day and commit.

    Memory placement in a process moves a ratio by a tenth. An even number of them
    has the larger of the middle two.
    """
    kinds: dict[Hashable, list[dict[str, Any]]] = {}
    for line in lines:
        kinds.setdefault(key(line), []).append(line)
    medians = {}
    for kind, members in kinds.items():
        occasion = _occasion(members[-1])
        processes = [line for line in members if _occasion(line) == occasion]
        processes.sort(key=lambda line: line[by])
        medians[kind] = processes[len(processes) // 2] | {
            "processes": len(processes)
        }
    return medians


def _occasion(line: dict[str, Any]) -> Hashable:
    """Day and commit; a line without them is its own group."""
    made = line.get("made")
    return (made["date"], made["commit"].rstrip("+")) if made else id(line)


def mean_and_deviation(
    values: Sequence[float],
    digits: int = 2,
    sign: str = "+-",
    always: bool = False,
) -> str:
    """Mean and standard deviation as text.

    Args:
        values: Numbers, one at least.
        digits: Digits after the point.
        sign: Stands between the two.
        always: Whether a single value has a deviation of 0. Default: it stands by itself.
    """
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1 and not always:
        return mean
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{mean} {sign} {deviation:.{digits}f}"


def edge_of(rate: float, rates: Collection[float]) -> str:
    """At which edge of the rates that were tried the chosen rate is: "low", "high", or "-"."""
    if len(set(rates)) < 2:
        return "-"
    if rate == min(rates):
        return "low"
    return "high" if rate == max(rates) else "-"


def ahead_and_p(values: Sequence[float], rival: Sequence[float]) -> list[str]:
    """Points ahead of a rival, and p of Welch's test, two-sided; empty with too few values."""
    if min(len(values), len(rival)) < 2:
        return ["", ""]
    from scipy import stats

    p = stats.ttest_ind(values, rival, equal_var=False).pvalue
    return [
        f"{statistics.mean(values) - statistics.mean(rival):+.1f}",
        f"{p:.3f}",
    ]


def sentences(text: str) -> str:
    """One paragraph of a text that stands in several lines, with an empty line after it."""
    return " ".join(text.split()) + "\n\n"


# --- cells of pages, the source of all figures and pictures ---------------------------------------


class FigureError(ValueError):
    """A figure is missing, or not where it should be."""


def tables(text: str) -> list[dict[str, Any]]:
    """The tables of a Markdown text: `section`, the heading above, and `rows` by column.

    A second and third column of one name are called "name 2" and "name 3".
    """
    all_tables: list[dict[str, Any]] = []
    section = ""
    header: list[str] = []
    for line in text.splitlines():
        texts = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|"):
            header = []
            if line.startswith("#"):
                section = line.lstrip("#").strip()
        elif not header:
            for k, name in enumerate(texts):
                before = texts[:k].count(name)
                header.append(f"{name} {before + 1}" if before else name)
            all_tables.append({"section": section, "rows": []})
        elif any(cell.strip(":-") for cell in texts):
            all_tables[-1]["rows"].append(
                dict(zip(header, texts, strict=False))
            )
    return all_tables


def cells(source: str, results: pathlib.Path) -> list[str]:
    """The cells that `"page#section | column=value; other column | column"` names.

    A section is named by the beginning of its title, unless another has exactly that title. A
    condition without a value selects tables that have this column.
    """
    place, where, column_name = (part.strip() for part in source.split("|"))
    page, _, title = (part.strip() for part in place.partition("#"))
    file = results / f"{page}.md"
    if not file.exists():
        raise FigureError(
            f"There is no {file.name} in benchmarks/results. Received: {source!r}"
        )
    page_tables = tables(file.read_text(encoding="utf-8"))
    chosen = [table for table in page_tables if table["section"] == title]
    if not chosen:
        chosen = [
            table for table in page_tables if table["section"].startswith(title)
        ]
    conditions = [
        condition.partition("=")
        for condition in re.split(r"; *", where)
        if condition
    ]

    def fits(row: dict[str, str]) -> bool:
        for name, sign, value in conditions:
            if row.get(name) != value if sign else name not in row:
                return False
        return column_name in row

    texts = [
        row[column_name]
        for table in chosen
        for row in table["rows"]
        if fits(row)
    ]
    if not texts:
        raise FigureError(
            f"No cell of benchmarks/results is like this. Received: {source!r}"
        )
    return texts


def one_cell(source: str, results: pathlib.Path) -> str:
    """The only cell of that kind."""
    texts = cells(source, results)
    if len(texts) != 1:
        raise FigureError(
            f"One cell must be meant, not {len(texts)}. Received: {source!r}"
        )
    return texts[0]


def number(text: str) -> Decimal:
    """The first number of a cell, with all its digits."""
    match = re.search(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?", text)
    if match is None:
        raise FigureError(f"A cell must hold a number. Received: {text!r}")
    return Decimal(match.group().replace(",", ""))


def rounded(value: Decimal, form: str) -> str:
    """A number as text; halves are rounded up."""
    with decimal.localcontext(decimal.Context(rounding=decimal.ROUND_HALF_UP)):
        return format(
            value.normalize() if form == "g" else value,
            "f" if form == "g" else form,
        )


def digest(names: Iterable[str], results: pathlib.Path) -> str:
    """The mark of a picture that is drawn from these files of results."""
    sha = hashlib.sha256()
    for name in names:
        sha.update((results / name).read_bytes())
    return sha.hexdigest()[:16]
