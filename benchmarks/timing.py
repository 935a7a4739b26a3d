"""Timing cases side by side: warmed up, interleaved, medians."""

import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from record import RESULTS, append, finished, machine, markdown, parsed, write

__all__ = [
    "RESULTS",
    "append",
    "finished",
    "interleaved",
    "machine",
    "markdown",
    "middle_of_processes",
    "parsed",
    "wall_and_cpu",
    "write",
]


def interleaved(
    cases: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1
) -> dict[str, float]:
    """Median seconds of each case, run in turn, so that noise affects all of them."""
    return {name: wall for name, (wall, _) in wall_and_cpu(cases, rounds, warm_up).items()}


def wall_and_cpu(
    cases: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 1
) -> dict[str, tuple[float, float]]:
    """As `interleaved`, with wall-clock and CPU seconds."""
    for run in cases.values():
        for _ in range(warm_up):
            run()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            start, worked = time.perf_counter(), time.process_time()
            run()
            times[name].append((time.perf_counter() - start, time.process_time() - worked))
    return {
        name: (statistics.median(w for w, _ in pairs), statistics.median(c for _, c in pairs))
        for name, pairs in times.items()
    }


def middle_of_processes(
    lines: Iterable[dict[str, Any]], key: Callable[[dict[str, Any]], Hashable], by: str
) -> dict[Hashable, dict[str, Any]]:
    """For each kind of result, the median line of all processes of the last day and commit.

    Memory placement in a process moves a ratio by a tenth. Of an even number the larger of the
    middle two counts.
    """
    kinds: dict[Hashable, list[dict[str, Any]]] = {}
    for line in lines:
        kinds.setdefault(key(line), []).append(line)
    found = {}
    for name, mine in kinds.items():
        same = [line for line in mine if _occasion(line) == _occasion(mine[-1])]
        found[name] = sorted(same, key=lambda line: line[by])[len(same) // 2]
        found[name] = found[name] | {"processes": len(same)}
    return found


def _occasion(line: dict[str, Any]) -> Hashable:
    """Day and commit; a line without them is its own group."""
    made = line.get("made")
    return (made["date"], made["commit"].rstrip("+")) if made else id(line)
