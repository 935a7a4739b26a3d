"""Checks of arguments, shared by all rooms: integers, seeds, densities, steps, and keywords."""

import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeGuard, TypeVar

import numpy as np

from keras_sparse_ortho._foreign_names import step_for
from keras_sparse_ortho.errors import DensityError

P = ParamSpec("P")
R = TypeVar("R")

_DENSITIES = {  # by sparsity: the first of these that a function has takes 1 - sparsity
    "sparsity": ("density", "schedule"),
    "final_sparsity": ("density",),
    "target_sparsity": ("density",),
    "initial_sparsity": ("initial_density",),
}
_RENAMED = {"quantization": "mode"}  # arguments by their names of before
_LONGEST = 200  # characters of a value that an error message shows


def check_density(density: object, name: str = "density") -> float:
    """Returns `density` as a float; raises DensityError unless it is in (0, 1]."""
    value = as_float(density)
    if 0.0 < value <= 1.0:
        return value
    percent = value
    hint = ""
    if isinstance(density, str):
        hint = " Give a number, not text."
        if re.fullmatch(r"\d+(\.\d+)?%", density):
            percent = float(density[:-1])
    if 2.0 <= percent < 100.0:
        hint += (
            f" It is the live fraction, not a percentage: {name}={percent / 100:.6g} keeps "
            f"{percent:g}%, {name}={1 - percent / 100:.6g} prunes {percent:g}%."
        )
    raise DensityError(
        f"`{name}` must be in (0, 1].{hint} Received: {name}={as_text(density)}"
    )


def as_float(value: Any) -> float:
    """A number as a float; NaN for anything else."""
    if isinstance(value, bool | str):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def check_number(name: str, value: object) -> float:
    """Returns `value` as a float; raises ValueError unless it is a finite number."""
    number = as_float(value)
    if not math.isfinite(number):
        raise ValueError(
            f"`{name}` must be a finite number. Received: {name}={as_text(value)}"
        )
    return number


def check_config(kind: str, config: object, *keys: str) -> None:
    """Raises ValueError unless a configuration from a file has some keys."""
    if isinstance(config, dict):
        if all(key in config for key in keys):
            return
        content: object = sorted(map(str, config))
    else:
        content = as_text(config)
    listed_keys = ", ".join(f"`{key}`" for key in keys)
    raise ValueError(
        f"The configuration of a {kind} holds {listed_keys}: the "
        f"file was written by something else, or is damaged. Received: {content}"
    )


def as_text(value: object) -> str:
    """A value for an error message, in one line: shortened, large arrays by their shape."""
    try:
        text = repr(value)
    # of too deep lists and too long integers
    except (
        RecursionError,
        ValueError,
    ):
        return f"a {type(value).__name__} that is too large to be shown"
    if len(text) <= _LONGEST and "\n" not in text:
        return text
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        kind = type(value).__name__
        return (
            f"{kind} of shape {shape} and type {getattr(value, 'dtype', None)}"
        )
    text = " ".join(text.split())
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... ({len(text)} characters)"


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer of Python or NumPy."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_integer(name: str, value: object, least: int = 1) -> int:
    """Returns `value` as an int; raises ValueError unless it is an integer of at least `least`."""
    if is_integer(value) and value >= least:
        return int(value)
    kind = "a positive integer"
    if least != 1:
        kind = f"an integer of at least {least}"
    raise ValueError(
        f"`{name}` must be {kind}. Received: {name}={as_text(value)}"
    )


def check_moment(name: str, value: object) -> int | float:
    """Returns a step as an int, or a fraction of a run in [0, 1] as a float; else ValueError."""
    if isinstance(value, float | np.floating) and 0.0 <= value <= 1.0:
        return float(value)
    if is_integer(value) and value >= 0:
        return int(value)
    raise ValueError(
        f"`{name}` must be a step, an integer of at least 0, or a fraction of the run, a "
        f"float in [0, 1]. Received: {name}={as_text(value)}"
    )


def check_seed(seed: object) -> int | None:
    """Returns a seed as an int, or `None`; raises ValueError for another value."""
    if seed is None:
        return None
    if is_integer(seed) and seed >= 0:
        return int(seed)
    raise ValueError(
        f"`seed` must be a non-negative integer or None. Received: seed={as_text(seed)}"
    )


def other_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Answers keywords of other packages, and too many arguments, by the table of guesses."""
    signature = inspect.signature(function)
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    by_position = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if (
            len(args) > by_position
            and inspect.Parameter.VAR_POSITIONAL not in kinds
        ):
            raise _too_many(_name_of(function, args), signature, args)
        if not kwargs.keys() <= signature.parameters.keys():
            _translate(_name_of(function, args), signature, args, kwargs)
        return function(*args, **kwargs)

    # Keras reads the arguments of layers without following `__wrapped__`.
    checked.__signature__ = signature  # type: ignore[attr-defined]
    return checked


def _name_of(function: Callable[..., Any], args: tuple[object, ...]) -> str:
    """The name of a function as users call it: a constructor has that of its class."""
    if function.__name__ == "__init__":
        return type(args[0]).__name__
    return function.__name__


def _too_many(
    name: str, signature: inspect.Signature, args: tuple[object, ...]
) -> TypeError:
    """The error for more arguments by position than a function has."""
    names = _argument_names(signature)
    by_name = [
        argument
        for argument in names
        if signature.parameters[argument].kind is inspect.Parameter.KEYWORD_ONLY
    ]
    by_position = ", ".join(names[: len(names) - len(by_name)]) or "none"
    step = step_for(f"{name}(...)")
    if step is not None:
        remedy = f"Use {step}."
    elif by_name:
        remedy = f"Give the others by name: {', '.join(by_name)}."
    else:
        remedy = "It has no others."
    values = [as_text(value) for value in args if type(value).__name__ != name]
    return TypeError(
        f"{name}() takes these arguments by position: {by_position}. {remedy} "
        f"Received: {', '.join(values)}"
    )


def _argument_names(signature: inspect.Signature) -> list[str]:
    return [
        name
        for name in signature.parameters
        if name not in ("self", "args", "kwargs")
    ]


def _translate(
    name: str,
    signature: inspect.Signature,
    args: tuple[object, ...],
    kwargs: dict[str, Any],
) -> None:
    """Takes sparsities as densities, and raises a TypeError for other foreign keywords.

    Args:
        name: The function's name, for messages.
        signature: Its signature.
        args: Arguments by position.
        kwargs: Arguments by name; foreign ones with a counterpart are replaced in place.
    """
    parameters = signature.parameters
    takes_any = any(
        parameter.kind is parameter.VAR_KEYWORD
        for parameter in parameters.values()
    )
    given = {*list(parameters)[: len(args)], *kwargs}
    for keyword in [key for key in kwargs if key not in parameters]:
        value = kwargs.pop(keyword)
        target = _density_argument(keyword, parameters)
        renamed = _RENAMED.get(keyword, "")
        special_step = step_for(f"{name}({keyword}=)", arguments=parameters)
        if target is not None:
            if target in given:
                raise TypeError(
                    f"{name}() takes `{target}` or `{keyword}`, which is 1 - {target}. "
                    f"Received: both, {keyword}={as_text(value)}"
                )
            kwargs[target] = _density_of(keyword, value)
            given.add(target)
        elif renamed in parameters and renamed not in given:
            kwargs[renamed] = value
        elif takes_any and special_step is None:
            kwargs[keyword] = value
        else:
            hint = (
                f"Its arguments are: {', '.join(_argument_names(signature))}."
            )
            step = special_step or step_for(f"{keyword}=", arguments=parameters)
            if step is not None:
                hint = f"Use {step}."
            raise TypeError(
                f"{name}() has no argument `{keyword}`. {hint} Received: {keyword}={as_text(value)}"
            )


def _density_argument(keyword: str, parameters: Collection[str]) -> str | None:
    """The parameter that takes `1 - sparsity` for a keyword, or `None`."""
    for candidate in _DENSITIES.get(keyword, ()):
        if candidate in parameters:
            return candidate
    return None


def _density_of(name: str, sparsity: Any) -> Any:
    """`1 - sparsity`, for each entry of a dict or list as well."""
    if isinstance(sparsity, Mapping):
        return {
            key: _density_of(name, value) for key, value in sparsity.items()
        }
    if isinstance(sparsity, list | tuple) or getattr(sparsity, "ndim", 0) == 1:
        return [_density_of(name, value) for value in sparsity]
    value = as_float(sparsity)
    if 0.0 <= value < 1.0:
        density = 1.0 - value
        return float(f"{density:.12g}")  # 0.1 for 0.9, not 0.0999...
    hint = ""
    if 1.0 < value < 100.0:
        hint = f" It is a fraction, not a percentage: {name}={value / 100:g} prunes {value:g}%."
    raise DensityError(
        f"`{name}` must be a number in [0, 1).{hint} Received: {name}={as_text(sparsity)}"
    )
