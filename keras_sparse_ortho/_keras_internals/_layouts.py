"""On which devices the variables of a model lie, as `keras.distribution` says on JAX."""

from typing import Any

import keras


def layout_of(variable: Any) -> Any:
    """The `jax.sharding.Sharding` of a variable; `None` where it lies on one device."""
    if keras.backend.backend() != "jax":
        return None
    layout = getattr(variable, "_layout", None)
    return getattr(layout, "backend_layout", layout)
