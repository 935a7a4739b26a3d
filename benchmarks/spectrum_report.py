"""Tables, picture and conclusions of `spectrum.py`."""

import itertools

import numpy as np
from timing import RESULTS, markdown

ACTIVATIONS = ("linear", "tanh", "hard_tanh", "relu")
BUDGETS = ("uniform", "erk", "snip", "grasp", "synflow")
STARTS = ("base", "AI", "SAO", "EOI")
# What counts as kept: both singular values within this factor of the dense network's.
KEPT = 2.0


def kinds(rows: list[dict]) -> tuple[list[str], list[float]]:
    """The measured budgets and densities."""
    names = {r["budget"] for r in rows}
    return [name for name in BUDGETS if name in names], sorted({r["asked"] for r in rows})


def dense_values(rows: list[dict]) -> dict[str, tuple[float, float]]:
    """Largest and mean of the dense orthogonal network of every activation."""
    return {
        r["activation"]: (r["largest"], r["mean"])
        for r in rows
        if (r["asked"], r["budget"], r["start"]) == (1.0, "uniform", "base")
    }


def shares(rows: list[dict], start: str, activation: str | None = None) -> np.ndarray:
    """`(largest, mean)` relative to the dense network, at densities under .2."""
    dense = dense_values(rows)
    return np.array(
        [
            (r["largest"] / dense[r["activation"]][0], r["mean"] / dense[r["activation"]][1])
            for r in rows
            if r["asked"] < 0.2 and r["start"] == start and activation in (None, r["activation"])
        ]
    )


def verdict(rows: list[dict]) -> str:
    """Who keeps both values, and whether it is only EOI."""
    keeps: dict[str, list[str]] = {}
    for start in STARTS:
        for activation in ACTIVATIONS:
            found = shares(rows, start, activation)
            if len(found):
                kept = bool(((found < KEPT) & (found > 1 / KEPT)).all())
                keeps.setdefault(start, []).extend([activation] if kept else [])
    who = "; ".join(f"{start}: {', '.join(found) or 'none'}" for start, found in keeps.items())
    others = [start for start in keeps if start != "EOI" and set(keeps[start]) & set(keeps["EOI"])]
    if not keeps["EOI"]:
        answer = "EOI does not"
    else:
        answer = f"Not only EOI does, {' and '.join(others)} too" if others else "Only EOI does"
        lost = [activation for activation in ACTIVATIONS if activation not in keeps["EOI"]]
        answer += f"; under {', '.join(lost)} EOI does not" if lost else ""
    return (
        "At every density under .2 and under every budget, both the largest and the mean singular "
        f"value stay within a factor {KEPT:g} of the dense orthogonal network's for: {who}. "
        f"{answer}."
    )


def picture(rows: list[dict]) -> None:
    from drawing import DENSE, GREEN, OTHER, OURS, PLAIN, new, save

    colors = {"base": DENSE, "AI": OTHER, "SAO": GREEN, "EOI": OURS}
    figure = new(8.4)
    axes = figure.subplots(len(ACTIVATIONS), 2, sharex=True)
    dense = dense_values(rows)
    budgets, densities = kinds(rows)
    for row, activation in enumerate(ACTIVATIONS):
        for column, key in enumerate(("mean", "largest")):
            ax, top = axes[row, column], 0.0
            for k, start in enumerate(STARTS):
                lines = np.array(
                    [
                        [
                            r[key]
                            for r in rows
                            if (r["activation"], r["budget"], r["start"])
                            == (activation, name, start)
                        ]
                        for name in budgets
                    ]
                )
                style = {"color": colors[start], "zorder": 3 + k}
                ax.plot(densities, np.median(lines, axis=0), "o-", ms=3, label=start, **style)
                ax.fill_between(
                    densities, lines.min(axis=0), lines.max(axis=0), alpha=0.18, lw=0, **style
                )
                if start != "base":  # which GraSP takes far out of the picture
                    top = max(top, lines.max())
            value = dense[activation][0 if key == "largest" else 1]
            ax.axhline(value, color=PLAIN, lw=1, ls=":", label="dense orthogonal")
            ax.set(xscale="log", ylim=(0, 1.2 * top), title=f"{activation}: {key}")
            shown = densities[::2]  # all would touch each other
            ax.set_xticks(shown, [f"{d:g}" for d in shown], minor=False)
            ax.minorticks_off()
            ax.grid(alpha=0.25)
    for ax in axes[-1]:
        ax.set_xlabel("density asked for")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=3)
    save(figure, RESULTS / "spectrum.svg")


def table(rows: list[dict]) -> str:
    """A line for each activation, budget and density: largest / mean of each start."""
    cells = {(r["activation"], r["budget"], r["asked"], r["start"]): r for r in rows}
    starts = [start for start in STARTS if any(r["start"] == start for r in rows)]
    lines = []
    budgets, densities = kinds(rows)
    for activation in ACTIVATIONS:
        for name in budgets:
            for density in densities:
                found = {s: cells[activation, name, density, s] for s in starts}
                values = [f"{r['largest']:.3g} / {r['mean']:.3g}" for r in found.values()]
                actual = [f"{found['SAO']['density']:.3g}"] if "SAO" in found else []
                lines.append([activation, name, f"{density:g}", *values, *actual])
    header = ["activation", "budget", "density", *starts]
    return markdown([*header, "density of SAO"] if "SAO" in starts else header, lines)


def ranges(rows: list[dict]) -> str:
    lines = []
    for activation, start in itertools.product(ACTIVATIONS, STARTS):
        found = shares(rows, start, activation)
        if len(found):
            low, high = found.min(axis=0), found.max(axis=0)
            cells = [f"{a:.3g} to {b:.3g}" for a, b in zip(low, high, strict=True)]
            lines.append([activation, start, *cells])
    return markdown(["activation", "start", "largest", "mean"], lines)
