"""Draws step time and memory on live blocks from the results of bench_blocks.py.

    python benchmarks/blocks_picture.py                                    # docs/faster.svg
    python benchmarks/blocks_picture.py --setting "tensorflow XLA" --model mlp2048 --out other.svg
    python benchmarks/blocks_picture.py --growth                           # docs/growth.svg

Over density, from the results of one backend, model and batch; or, with `--growth`, the time of
4-layer networks on blocks of 64 over width, density and batch, beside their live fraction, which is
the time that they would take if it were that of the products alone.
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


GROWTH = {"jax": ("JAX", OURS), "tensorflow XLA": ("TensorFlow XLA", OTHER)}
"""By backend the label and colour."""


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


def growth(rival="blocks 64"):
    """Three panels: the step over width, density and batch, the other two held, and its floor."""
    kind = ("setting", "model", "batch", "density", "rival")
    lines = finished(RESULTS / "blocks.jsonl")
    found = middle_of_processes(lines, lambda line: tuple(line[k] for k in kind), "wall_ratio")
    panels = {
        "width, density 0.1, batch 128": {w: (w, 128, 0.1) for w in (1024, 2048, 4096)},
        "density, width 4096, batch 128": {d: (4096, 128, d) for d in (0.05, 0.1, 0.2)},
        "batch, width 4096, density 0.1": {n: (4096, n, 0.1) for n in (32, 128, 512)},
    }
    figure = new(7.6)
    for panel, (title, points) in zip(figure.subplots(3), panels.items(), strict=True):
        for setting, (label, color) in GROWTH.items():
            each = {
                x: found[setting, f"mlp{width}", batch, density, rival]
                for x, (width, batch, density) in points.items()
            }
            ratios = [line["wall_ratio"] for line in each.values()]
            panel.plot([*each], ratios, color=color, label=label, marker="o", markersize=4)
        floor = [line["live"] for line in each.values()]
        panel.plot([*each], floor, "--", color=DENSE, label="floor: live fraction")
        panel.set(title=f"step over {title}, dense = 1", ylim=(0, None), xscale="log")
        panel.set_xticks([*points], [f"{x:g}" for x in points])
        panel.minorticks_off()
    figure.axes[0].legend()
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", default="jax")
    parser.add_argument("--model", default="mlp2048")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--growth", action="store_true", help="over width, density and batch")
    parser.add_argument("--out", type=Path)
    args = parsed(parser, {"model": "mlp256", "out": RESULTS / "faster.svg"})
    if args.growth:
        save(growth(), args.out or DOCS / "growth.svg", ["blocks.jsonl"])
        return
    lines = last_lines(args.setting, args.model, args.batch)
    if not lines:
        parser.error(f"bench_blocks.py has not measured {args.setting}, {args.model}, {args.batch}")
    places = {line["machine"] for line in lines.values()}
    about = f"{args.setting}, {args.model}, batch {args.batch}, {'; '.join(sorted(places))}"
    save(draw(lines, about), args.out or DOCS / "faster.svg", ["blocks.jsonl"])


if __name__ == "__main__":
    main()
