"""How pictures of docs/ look: SVG, for phones, and in the reader's light or dark theme."""

import io
import re
from pathlib import Path

import matplotlib as mpl
from cells import digest
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from record import RESULTS

WIDTH = 5.2  # inches: on a phone of 390 pixels a label is 11 pixels high
# Each can be read on white and on black.
DENSE, PLAIN, OURS, OTHER = "#8a8f98", "#b8860b", "#d1495b", "#2e86ab"
GREEN, VIOLET = "#6a994e", "#b05fa8"
MASK = ListedColormap(["#00000000", OURS])
"""The colours of dead and live entries."""

_INK = "#010203"  # stands for the colour of text and axes
_STYLE = """<style>
svg { --ink: #24292f; }
@media (prefers-color-scheme: dark) { svg { --ink: #d8dade; } }
</style>
"""
mpl.rcParams.update(
    {
        "font.size": 11,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "legend.fontsize": 10,
        "legend.frameon": False,
        "xtick.labelsize": 10,
        "ytick.labelsize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": "none",
        "svg.fonttype": "none",  # text stays text: it can be searched and read aloud
        "svg.hashsalt": "keras_sparse_ortho",  # the same names of clip paths each time
        **dict.fromkeys(
            ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK
        ),
    }
)


def new(height: float) -> Figure:
    """An empty picture of the common width."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def mask(panel: Axes, live: object, title: str) -> None:
    """Draws a mask, with a frame."""
    panel.imshow(live, cmap=MASK, vmin=0, vmax=1, interpolation="nearest")
    panel.set(xticks=[], yticks=[])
    panel.set_title(title, fontsize=9)
    panel.spines[:].set_visible(True)


def save(figure: Figure, path: Path, sources: list[str] = ()) -> None:
    """Writes an SVG, marked with a digest of the results that it was drawn from."""
    marks = {"Date": None, "Creator": None, "Title": path.stem}
    if sources:
        marks["Source"] = digest(sources, RESULTS)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=marks, dpi=200)
    drawn = buffer.getvalue().replace(_INK, "var(--ink)")
    drawn = re.sub(r"(<svg\b[^>]*>\s*)", lambda found: found[0] + _STYLE, drawn, count=1)
    path.write_text("\n".join(line.rstrip() for line in drawn.splitlines()) + "\n", "utf-8")
