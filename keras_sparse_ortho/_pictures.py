"""Axes to draw on; Matplotlib is an extra."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def check_matplotlib(received: str = "") -> None:
    """Raises ImportError, with the extra to install, where Matplotlib is missing.

    Args:
        received: str. The names of the pictures.
    """
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        text = (
            "Pictures need Matplotlib: pip install 'keras-sparse-ortho[plot]'"
        )
        if received:
            text += f". Received: {received}"
        raise ImportError(text) from error


def axes_or_new(
    ax: "Axes | None", size: tuple[float, float] = (6.0, 4.0)
) -> "Axes":
    """The axes of a user, or those of a new figure.

    Args:
        ax: Matplotlib axes, or `None`.
        size: Width and height of a new figure, in inches.
    """
    check_matplotlib()
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(figsize=size, layout="constrained")
    return axes
