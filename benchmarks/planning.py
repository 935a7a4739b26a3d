"""What training takes on 1, 8 and 256 accelerators, from measured constants: `docs/planning.md`.

    python benchmarks/planning.py

Prints the tables of the page. Nothing is run: bytes per weight come from `results/memory.jsonl`,
bytes exchanged in a step from `results/traffic.jsonl`, time and bytes of an update from
`results/updates.jsonl`. What an accelerator and its links can do is assumed, below.
"""

import math
from collections.abc import Iterator

from record import RESULTS, finished, markdown

# Assumed: an accelerator of today, and what of its memory and links a program gets.
MEMORY = 60e9  # bytes for weights and optimizer, of 80e9; the rest is for activations
READS = 2.5e12  # bytes per second from its memory
HOST_LINK = 25e9  # bytes per second between an accelerator and its host
LINKS = {8: 300e9, 256: 40e9}  # bytes per second of each to the others: one machine, a network
FREQUENCY = 100  # steps between updates
# Read off the program of an update on a device (`keras_sparse_ortho/_ranking.py`): passes over
# weights of 4 bytes, for the counts of two ranks, ties and masks; and weights and two moments,
# each read and written once.
PASSES = 2 * 18 + 4 + 6
NETWORKS = (1e9, 10e9)
ACCELERATORS = (1, 8, 256)
FORMS = {"dense": "dense", "masked": "masked", "compact": "compact", "blocks": "blocks 32"}
# What moves masks by the dense gradient, in each form; nothing does in a dense network.
UPDATES = {"masked": "RigL", "compact": "RigL, compact", "blocks": "RigL, blocks 25"}


def read(name: str) -> list[dict]:
    return finished(RESULTS / f"{name}.jsonl")


def stored() -> dict[str, float]:
    """Measured: bytes of weights, masks, places and Adam's moments per weight of the network."""
    lines = {line["form"]: line for line in read("memory") if line["backend"] == "jax"}
    found = {}
    for form, title in FORMS.items():
        line = lines[title]
        weights = 4 * line["width"] ** 2
        found[form] = 2**20 * (line["weights"] + line["optimizer"]) / weights
    return found


def exchanged() -> dict[str, float]:
    """Measured: bytes that workers add up in a step, per weight of the network."""
    return {
        line["form"]: sum(n for kind, n in line.items() if "-" in kind) / (4 * line["width"] ** 2)
        for line in read("traffic")
    }


def updates() -> dict[str, tuple[float, float]]:
    """Measured: bytes to and from the host, and seconds of cores, per weight, of one update."""
    most = max(line["millions"] for line in read("updates"))
    lines = {
        line["update"]: line
        for line in read("updates")
        if line["millions"] == most and line["ranked"] == "host"
    }
    found = {}
    for form, name in UPDATES.items():
        line = lines[name]
        moved = (line["host_mb"] + line["device_mb"]) / most
        found[form] = moved, line["cpu"] / (most * 1e6)
    return found


def constants() -> str:
    """The table of what was measured."""
    kept, sent, moved = stored(), exchanged(), updates()
    rows = []
    for form in FORMS:
        update = [f"{moved[form][0]:.2f}", f"{moved[form][1] * 1e9:.0f}"] if form in moved else []
        rows.append([form, f"{kept[form]:.2f}", f"{sent[form]:.2f}", *(update or ["", ""])])
    header = ["form", "stored [bytes]", "added up in a step [bytes]"]
    header += ["RigL on the host: moved [bytes]", "work of the host [ns]"]
    return markdown(header, rows)


def memory() -> str:
    """Bytes on each accelerator, and how many hold the network at least."""
    rows = []
    for size in NETWORKS:
        for form, each in stored().items():
            whole = size * each
            shared = [f"{whole / n / 1e9:.2f}" for n in ACCELERATORS]
            rows.append([f"{size / 1e9:.0f}", form, *shared, str(math.ceil(whole / MEMORY))])
    header = ["billion weights", "form", "on one [GB]", "shared by 8 [GB]", "shared by 256 [GB]"]
    return markdown([*header, f"least, of {MEMORY / 1e9:.0f} GB"], rows)


def traffic() -> str:
    """Seconds in which a ring adds up the gradients of a step."""
    rows = []
    for size in NETWORKS:
        for form, each in exchanged().items():
            whole = size * each
            times = [f"{1e3 * 2 * (n - 1) / n * whole / rate:.1f}" for n, rate in LINKS.items()]
            rows.append([f"{size / 1e9:.0f}", form, f"{whole / 1e9:.2f}", "0", *times])
    header = ["billion weights", "form", "added up [GB]", "1 [ms]", "8 [ms]", "256 [ms]"]
    return markdown(header, rows)


def cost_of_updates() -> str:
    """Seconds of an update, on the host and on the devices, in a step's share."""
    return markdown(
        ["billion weights", "form", "ranked", "1 [ms]", "8 [ms]", "256 [ms]"],
        [
            [f"{size / 1e9:.0f}", form, place, *(f"{1e3 * s / FREQUENCY:.2f}" for s in seconds)]
            for size in NETWORKS
            for form, place, seconds in _seconds(size)
        ],
    )


def _seconds(size: float) -> Iterator[tuple[str, str, list[float]]]:
    for form, (moved, work) in updates().items():
        # All hosts rank the whole network.
        on_host = size * (moved / HOST_LINK + work)
        yield form, "host", [on_host for _ in ACCELERATORS]
        if form == "masked":
            yield form, "device", [size * 4 * PASSES / READS / n for n in ACCELERATORS]


def main() -> None:
    for part in (constants, memory, traffic, cost_of_updates):
        print(f"<!-- {part.__name__} -->\n{part()}")


if __name__ == "__main__":
    main()
