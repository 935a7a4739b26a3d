"""Draws step time and memory over density from the results of bench_blocks.py.

    python benchmarks/blocks_picture.py                                    # docs/faster.svg
    python benchmarks/blocks_picture.py --setting "tensorflow XLA" --model mlp2048 --out other.svg

Uses the results of one backend, model and batch.
"""

import argparse
from pathlib import Path

from drawing import DENSE, OTHER, OURS, PLAIN, VIOLET, new, save
from record import RESULTS, finished, parsed
from timing import middle_of_processes

DOCS = Path(__file__).resolve().parents[1] / "docs"
STYLES = {
    "dense": ("dense", DENSE, "-"),
    "masked": ("masked", PLAIN, "--"),
    "compact": ("compact", OTHER, "-."),
    "blocks 32": ("blocks of 32", OURS, "-"),
    "blocks 64": ("blocks of 64", VIOLET, "-"),
}


def last_lines(setting, model, batch):
    """`{(rival, density): line}`."""
    lines = finished(RESULTS / "blocks.jsonl")
    wanted = (setting, model, batch)
    lines = [line for line in lines if (line["setting"], line["model"], line["batch"]) == wanted]
    return middle_of_processes(lines, lambda line: (line["rival"], line["density"]), "wall_ratio")


def draw(lines, title):
    """Two panels: wall clock of a step, and state, relative to the dense model."""
    figure = new(5.6)
    panels = figure.subplots(2)
    densities = sorted({density for _, density in lines})
    for rival, (label, color, dash) in STYLES.items():
        found = [lines[rival, d] for d in densities if (rival, d) in lines]
        # Blocks are plotted at their actual density.
        x = [line["density"] if rival == "dense" else line["live"] for line in found]
        dense = [lines["dense", line["density"]]["state_mib"] for line in found]
        parts = [line["state_mib"] / base for line, base in zip(found, dense, strict=True)]
        for panel, y in zip(panels, ([line["wall_ratio"] for line in found], parts), strict=True):
            panel.plot(x, y, dash, color=color, label=label, marker="o", markersize=4)
    for panel, name in zip(
        panels, ("time of a training step", "weights and optimizer"), strict=True
    ):
        panel.set(title=f"{name}, dense = 1", ylim=(0, None))
        panel.set_xticks(densities, [f"{d:g}" for d in densities])
    panels[1].set_xlabel(f"density (live fraction)\n{title}")
    panels[1].xaxis.label.set_fontsize(9)
    panels[0].legend()
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", default="jax")
    parser.add_argument("--model", default="mlp2048")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--out", type=Path, default=DOCS / "faster.svg")
    args = parsed(parser, {"model": "mlp256", "out": RESULTS / "faster.svg"})
    lines = last_lines(args.setting, args.model, args.batch)
    if not lines:
        parser.error(f"bench_blocks.py has not measured {args.setting}, {args.model}, {args.batch}")
    places = {line["machine"] for line in lines.values()}
    about = f"{args.setting}, {args.model}, batch {args.batch}, {'; '.join(sorted(places))}"
    save(draw(lines, about), args.out, ["blocks.jsonl"])


if __name__ == "__main__":
    main()
