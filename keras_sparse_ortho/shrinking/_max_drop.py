"""`max_drop` of `shrink`: how much each output of a model may lose of its score."""

from collections.abc import Mapping, Sequence

from keras_sparse_ortho._checks import as_text, check_number

MaxDrop = float | Mapping[str, float]
"""One limit for all outputs, or one for each, by its name."""


def checked_max_drop(max_drop: object) -> MaxDrop:
    """The limits as floats; raises ValueError unless they are numbers from 0 to 1."""
    if not isinstance(max_drop, Mapping):
        return _checked_limit("max_drop", max_drop)
    limits = {}
    for name, limit in max_drop.items():
        limits[name] = _checked_limit(f"max_drop[{name!r}]", limit)
    return limits


def _checked_limit(name: str, limit: object) -> float:
    number = check_number(name, limit)
    if 0.0 <= number <= 1.0:
        return number
    hint = ""
    if 1.0 < number <= 100.0:
        hint = f" For {number:g} points give {number / 100:g}."
    raise ValueError(
        f"`{name}` must be from 0 to 1, a loss of the score: 0.01 is one point.{hint} "
        f"Received: {name}={as_text(limit)}"
    )


def check_output_names(max_drop: MaxDrop, names: Sequence[str]) -> None:
    """Raises ValueError unless limits by name are those of all outputs of the model."""
    if not isinstance(max_drop, Mapping):
        return
    unknown = [as_text(name) for name in max_drop if name not in names]
    missing = [as_text(name) for name in names if name not in max_drop]
    if not unknown and not missing:
        return
    texts = []
    if unknown:
        texts.append(f"the unknown {', '.join(unknown)}")
    if missing:
        texts.append(f"no limit for {', '.join(missing)}")
    raise ValueError(
        "`max_drop` must be one number, or a dict with a number for each output of the model: "
        f"{', '.join(map(as_text, names))}. Received: {' and '.join(texts)}"
    )


def limit_of(max_drop: MaxDrop, name: str) -> float:
    """The limit of one output."""
    if isinstance(max_drop, Mapping):
        return max_drop[name]
    return max_drop


def scaled(max_drop: MaxDrop, factor: float) -> MaxDrop:
    """A part of each limit."""
    if isinstance(max_drop, Mapping):
        return {name: factor * limit for name, limit in max_drop.items()}
    return factor * max_drop


def max_drop_as_text(max_drop: MaxDrop) -> str:
    """The limits, as a user writes them."""
    if not isinstance(max_drop, Mapping):
        return f"{max_drop:g}"
    limits = [f"{as_text(name)}: {limit:g}" for name, limit in max_drop.items()]
    return f"{{{', '.join(limits)}}}"
