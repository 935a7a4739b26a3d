"""Nested inputs and outputs as flat, named lists, in one order on every backend and process.

A *skeleton* is the nesting of a model's inputs with the position of each tensor in place of the
tensor: `{"a": 0, "b": [1, 2]}`. It is plain JSON, so it travels to the worker processes.
"""

import re
from collections.abc import Sequence
from typing import Any

_AUTOMATIC_NAME = re.compile(r"(keras_tensor|input_layer)(_\d+)?")


def leaves(structure: Any, key: str | None = None) -> list[tuple[str | None, Any]]:
    """Each leaf with the innermost dict key above it, dict keys in sorted order."""
    if isinstance(structure, dict):
        return [pair for k in sorted(structure) for pair in leaves(structure[k], str(k))]
    if isinstance(structure, (list, tuple)):
        return [pair for item in structure for pair in leaves(item)]
    return [(key, structure)]


def skeleton(structure: Any) -> Any:
    """The nesting alone, with the position of each leaf in `leaves` in its place."""
    counter = iter(range(len(leaves(structure))))

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {k: walk(node[k]) for k in sorted(node)}
        if isinstance(node, (list, tuple)):
            return [walk(item) for item in node]
        return next(counter)

    return walk(structure)


def pack(skeleton: Any, flat: Sequence[Any]) -> Any:
    """Put a flat list back into the nesting that a skeleton describes."""
    if isinstance(skeleton, dict):
        return {k: pack(v, flat) for k, v in skeleton.items()}
    if isinstance(skeleton, list):
        return [pack(item, flat) for item in skeleton]
    return flat[skeleton]


def unique_names(names: Sequence[str | None], fallback: str) -> list[str]:
    """Names a LiteRT signature can hold: no odd characters, none twice, none made up by Keras.

    Keras numbers unnamed inputs through a session, so the same model would get other names in
    each file; those become `fallback` (or `fallback_0`, `fallback_1`... where there are several).
    """
    result: list[str] = []
    for position, name in enumerate(names):
        if name is None or _AUTOMATIC_NAME.fullmatch(name):
            name = fallback if len(names) == 1 else f"{fallback}_{position}"
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        free, number = name, 0
        while free in result:
            number += 1
            free = f"{name}_{number}"
        result.append(free)
    return result
