"""The options of `exact_orthogonal`: what they may be, alone and together."""

import math
from typing import Any

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho.orthogonal._structure import Structure

STARTS = ("covering", "published")
NORMS = (None, "equal")
TAPS = ("center", "shift", "cascade")


def check_options(
    start: str,
    norms: str | None,
    taps: str,
    center_density: float | str | None = None,
    structure: Structure | None = None,
    rotations: Any = None,
) -> None:
    """Refuses unknown options, and those that exclude each other."""
    for name, value, known in (
        ("start", start, STARTS),
        ("norms", norms, NORMS),
        ("taps", taps, TAPS),
    ):
        if value not in known:
            *first, last = (f'"{choice}"' if choice else "None" for choice in known)
            raise ValueError(
                f"`{name}` must be {', '.join(first)} or {last}. Received: {name}={value!r}"
            )
    check_center_density(center_density)
    if center_density is not None and getattr(structure, "regular", False):
        raise ValueError(
            "Regular blocks are live at all taps alike: `center_density` must be None. "
            f"Received: structure={structure}, center_density={center_density!r}"
        )
    if structure is not None and rotations is not None:
        raise ValueError(
            "A `structure` draws its own rotations; give one of the two. "
            f"Received: structure={structure}, rotations={rotations!r}"
        )
    if norms == "equal" and (structure is not None or rotations is not None or start != "covering"):
        raise ValueError(
            'norms="equal" chooses angles itself, from a start of its own: give it no `structure`, '
            f"`rotations` or `start`. Received: structure={structure}, rotations={rotations!r}, "
            f"start={start!r}"
        )
    if taps != "center" and (structure is not None or center_density is not None):
        raise ValueError(
            'Structures and `center_density` are for taps="center". '
            f"Received: taps={taps!r}, structure={structure}, center_density={center_density!r}"
        )
    if taps == "cascade" and rotations is not None:
        raise ValueError(
            'A cascade draws its own rotations; explicit ones go with taps="center" or "shift". '
            f"Received: taps={taps!r}, rotations={rotations!r}"
        )


def check_center_density(center_density: float | str | None) -> None:
    """Refuses what is no density of the center tap."""
    if isinstance(center_density, str) and center_density != "more_nonzeros":
        raise ValueError(
            '`center_density` must be None, "more_nonzeros", or a number in (0, 1]. '
            f"Received: center_density={center_density!r}"
        )
    if center_density is not None and not isinstance(center_density, str):
        check_density(center_density, "center_density")


def density_at_center(density: float, window: int, center_density: float | str | None) -> float:
    """The density that the matrix at the center tap is meant to have, of a window of taps."""
    if center_density is None:
        return density
    if isinstance(center_density, str):
        return min(density * window, 1.0, math.sqrt(density))
    return float(center_density)
