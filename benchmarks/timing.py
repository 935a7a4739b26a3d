"""Timing rivals side by side: warmed up, interleaved, medians."""

import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Mapping

RESULTS = pathlib.Path(__file__).parent / "results"


def interleaved(
    rivals: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1
) -> dict[str, float]:
    """Median seconds of each rival, run in turn, so that noise meets all of them alike."""
    return {name: wall for name, (wall, _) in wall_and_cpu(rivals, rounds, warm_up).items()}


def wall_and_cpu(
    rivals: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1
) -> dict[str, tuple[float, float]]:
    """As `interleaved`; with the seconds by the clock those that all cores have worked."""
    for run in rivals.values():
        for _ in range(warm_up):
            run()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, run in rivals.items():
            start, worked = time.perf_counter(), time.process_time()
            run()
            times[name].append((time.perf_counter() - start, time.process_time() - worked))
    return {
        name: (statistics.median(w for w, _ in pairs), statistics.median(c for _, c in pairs))
        for name, pairs in times.items()
    }


def machine() -> str:
    """One line about where this ran."""
    model = "unknown processor"
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":")[1].strip()
            break
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def write(name: str, text: str) -> None:
    """Prints a result and writes it to `results/<name>.md`."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
