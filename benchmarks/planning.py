"""Memory and traffic of training on 1, 8 and 256 accelerators: the tables of `docs/planning.md`.

    python benchmarks/planning.py

Nothing is run: bytes per weight come from `results/memory.jsonl`, bytes exchanged per step, and
time and bytes of an update, from `results/updates.jsonl`. The speeds of accelerators and links are
assumed, below.
"""

import math
from collections.abc import Iterator

from record import RESULTS, finished, markdown

# Assumed: an accelerator of today, and the part of its memory and links that a program gets.
MEMORY = 60e9  # bytes for weights and optimizer, of 80e9; the rest is for activations
READS = 2.5e12  # bytes per second from its memory
HOST_LINK = 25e9  # bytes per second between an accelerator and its host
LINKS = {8: 300e9, 256: 40e9}  # bytes per second of each to the others: one machine, a network
FREQUENCY = 100  # steps between updates
# From the program of a mask update on a device: passes over weights of 4 bytes,
# for the counts of two ranks, ties and masks; and weights and two moments, each read and written.
PASSES = 2 * 18 + 4 + 6
NETWORKS = (1e9, 10e9)
ACCELERATORS = (1, 8, 256)
FORMS = {"dense": "dense", "masked": "masked", "compact": "compact", "blocks": "blocks 32"}
# The callback that updates masks by the dense gradient, in each form.
UPDATES = {"masked": "RigL", "compact": "RigL, compact", "blocks": "RigL, blocks 25"}


def read(name: str) -> list[dict]:
    return finished(RESULTS / f"{name}.jsonl")


def stored() -> dict[str, float]:
    """Measured: bytes of weights, masks, indices and Adam's moments per weight of the network."""
    runs = [run for run in read("memory") if (run["backend"], run["width"]) == ("jax", 4096)]
    found, lines = {}, {run["form"]: run for run in runs}
    for form, title in FORMS.items():
        line = lines[title]
        weights = 4 * line["width"] ** 2
        found[form] = 2**20 * (line["weights"] + line["optimizer"]) / weights
    return found


def exchanged() -> dict[str, float]:
    """Measured: bytes all-reduced per step, per weight of the network."""
    return {
        line["form"]: sum(n for kind, n in line.items() if "-" in kind) / (4 * line["width"] ** 2)
        for line in read("updates")
        if "form" in line
    }


def updates() -> dict[str, tuple[float, float]]:
    """Measured: bytes to and from the host, and seconds of cores, per weight, of one update."""
    found_lines = [line for line in read("updates") if "update" in line]
    most = max(line["millions"] for line in found_lines)
    lines = {
        line["update"]: line
        for line in found_lines
        if line["millions"] == most and line["ranked"] == "host"
    }
    found = {}
    for form, name in UPDATES.items():
        line = lines[name]
        moved = (line["host_mb"] + line["device_mb"]) / most
        found[form] = moved, line["cpu"] / (most * 1e6)
    return found


def constants() -> str:
    """The table of measured constants."""
    kept, sent, moved = stored(), exchanged(), updates()
    rows = []
    for form in FORMS:
        update = [f"{moved[form][0]:.2f}", f"{moved[form][1] * 1e9:.0f}"] if form in moved else []
        rows.append([form, f"{kept[form]:.2f}", f"{sent[form]:.2f}", *(update or ["", ""])])
    header = ["form", "stored [bytes]", "all-reduced per step [bytes]"]
    header += ["RigL update on the host: transferred [bytes]", "CPU time [ns]"]
    return markdown(header, rows)


def memory() -> str:
    """Bytes on each accelerator, and the smallest number of accelerators that holds the network."""
    rows = []
    for size in NETWORKS:
        for form, each in stored().items():
            whole = size * each
            shared = [f"{whole / n / 1e9:.2f}" for n in ACCELERATORS]
            rows.append([f"{size / 1e9:.0f}", form, *shared, str(math.ceil(whole / MEMORY))])
    header = [
        "billion weights",
        "form",
        "on 1 [GB]",
        "sharded over 8 [GB]",
        "sharded over 256 [GB]",
    ]
    return markdown([*header, f"accelerators of {MEMORY / 1e9:.0f} GB"], rows)


def traffic() -> str:
    """Time of a ring all-reduce of the gradients of a step."""
    rows = []
    for size in NETWORKS:
        for form, each in exchanged().items():
            whole = size * each
            times = [f"{1e3 * 2 * (n - 1) / n * whole / rate:.1f}" for n, rate in LINKS.items()]
            rows.append([f"{size / 1e9:.0f}", form, f"{whole / 1e9:.2f}", "0", *times])
    header = ["billion weights", "form", "all-reduced [GB]", "1 [ms]", "8 [ms]", "256 [ms]"]
    return markdown(header, rows)


def cost_of_updates() -> str:
    """Time of a mask update on the host and on the devices, divided by the steps between two."""
    return markdown(
        ["billion weights", "form", "ranked on", "1 [ms]", "8 [ms]", "256 [ms]"],
        [
            [f"{size / 1e9:.0f}", form, place, *(f"{1e3 * s / FREQUENCY:.2f}" for s in seconds)]
            for size in NETWORKS
            for form, place, seconds in _seconds(size)
        ],
    )


def _seconds(size: float) -> Iterator[tuple[str, str, list[float]]]:
    for form, (moved, work) in updates().items():
        # Every host ranks the whole network.
        on_host = size * (moved / HOST_LINK + work)
        yield form, "host", [on_host for _ in ACCELERATORS]
        if form == "masked":
            yield form, "device", [size * 4 * PASSES / READS / n for n in ACCELERATORS]


def main() -> None:
    for part in (constants, memory, traffic, cost_of_updates):
        print(f"<!-- {part.__name__} -->\n{part()}")


if __name__ == "__main__":
    main()
