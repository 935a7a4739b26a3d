"""Checks of single arguments, shared by all rooms: integers, seeds, densities and steps."""

import math
import re
from typing import Any

import numpy as np

from keras_sparse_ortho.errors import DensityError

_LONGEST = 200  # characters of a value that an error message shows


def check_density(density: Any, name: str = "density") -> float:
    """Returns `density` as a float; raises DensityError unless it is in (0, 1]."""
    value = as_float(density)
    if not 0.0 < value <= 1.0:  # also for NaN
        percent = float(density[:-1]) if _is_percent(density) else value
        hint = " Give a number, not text." if isinstance(density, str) else ""
        if 2.0 <= percent < 100.0:
            hint += (
                f" It is the live fraction, not a percentage: {name}={percent / 100:.6g} keeps "
                f"{percent:g}%, {name}={1 - percent / 100:.6g} prunes {percent:g}%."
            )
        raise DensityError(f"`{name}` must be in (0, 1].{hint} Received: {name}={told(density)}")
    return value


def as_float(value: Any) -> float:
    """A number as a float; NaN for anything else."""
    try:
        return math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _is_percent(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?%", value) is not None


def check_number(name: str, value: Any) -> float:
    """Returns `value` as a float; raises ValueError unless it is a finite number."""
    number = as_float(value)
    if not math.isfinite(number):
        raise ValueError(f"`{name}` must be a finite number. Received: {name}={told(value)}")
    return number


def check_config(kind: str, config: Any, *keys: str) -> None:
    """Raises ValueError unless the configuration of a class has all keys."""
    if not isinstance(config, dict) or not all(key in config for key in keys):
        found = sorted(map(str, config)) if isinstance(config, dict) else told(config)
        raise ValueError(
            f"The configuration of a {kind} holds {', '.join(f'`{key}`' for key in keys)}: the "
            f"file was written by something else, or is damaged. Received: {found}"
        )


def told(value: Any) -> str:
    """A value for an error message: short, whatever a file holds."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # of too deep lists and too long integers
        return f"a {type(value).__name__} that is too large to be shown"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def is_integer(value: Any) -> bool:
    """Whether `value` is an integer of Python or NumPy, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_integer(name: str, value: Any, least: int = 1) -> int:
    """Returns `value` as an int; raises ValueError unless it is an integer of at least `least`."""
    if not is_integer(value) or value < least:
        kind = {0: "an integer of at least 0", 1: "a positive integer"}.get(
            least, f"an integer of at least {least}"
        )
        raise ValueError(f"`{name}` must be {kind}. Received: {name}={told(value)}")
    return int(value)


def check_moment(name: str, value: Any, least: int = 0) -> int | float:
    """Returns a step as an int, or a fraction of a run in [0, 1] as a float; else ValueError."""
    if isinstance(value, float | np.floating) and 0.0 <= value <= 1.0:
        return float(value)
    if not is_integer(value) or value < least:
        raise ValueError(
            f"`{name}` must be a step, an integer of at least {least}, or a fraction of the run, a "
            f"float in [0, 1]. Received: {name}={told(value)}"
        )
    return int(value)


def check_seed(seed: Any) -> int | None:
    """Returns `seed` as an int or `None`; raises ValueError unless it is non-negative or `None`."""
    if seed is not None and (not is_integer(seed) or seed < 0):
        raise ValueError(
            f"`seed` must be a non-negative integer or None. Received: seed={told(seed)}"
        )
    return None if seed is None else int(seed)
