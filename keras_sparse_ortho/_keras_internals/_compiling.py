"""Compiling a model as another one was compiled."""

from typing import Any

import keras


def compile_like(model: Any, other: Any) -> bool:
    """Compiles a model with the arguments that another was compiled with; `False` if it was not.

    The optimizer and metrics are new ones of the same settings; losses, which keep no state, are
    the same.
    """
    if not getattr(other, "compiled", False) or not hasattr(other, "_compile_config"):
        return False

    def copy(value: Any) -> Any:
        if isinstance(value, keras.Optimizer | keras.Metric):
            return type(value).from_config(value.get_config())
        return value

    arguments = keras.tree.map_structure(copy, dict(other._compile_config.config))
    # By its name it would be one of default settings, also where they have been changed since.
    arguments["optimizer"] = copy(other.optimizer)
    model.compile(**arguments)
    return True


def compiled_loss_waits(model: Any) -> bool:
    """Whether the loss of `compile` makes its variables only at its first call, yet to come."""
    loss = getattr(model, "_compile_loss", None)
    return loss is not None and not loss.built
