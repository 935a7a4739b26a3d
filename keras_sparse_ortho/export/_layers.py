"""Every layer of a model, however deep."""

from collections.abc import Iterator
from typing import Any

import keras


def all_layers(root: keras.Layer) -> Iterator[keras.Layer]:
    """A layer and everything in it: layers of models, inner layers of wrappers, attributes.

    `model.layers` does not reach into wrappers and custom layers.
    """
    seen: set[int] = set()
    todo: list[Any] = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, keras.Layer):
            yield item
            todo.extend(vars(item).values())
        elif isinstance(item, (list, tuple)):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
