"""Every private name of tf_keras and TFMOT that the wing uses, in one place.

Private are: `Layer._flatten_layers`, `Layer._call_spec`, `Layer._autocast`, the two attributes in
which a layer remembers how it was called for SavedModel, and the modules of TFMOT under `python`.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tensorflow_model_optimization.python.core.keras.utils import smart_cond
from tensorflow_model_optimization.python.core.sparsity.keras.prune_registry import PruneRegistry
from tensorflow_model_optimization.python.core.sparsity.keras.pruning_wrapper import (
    PruneLowMagnitude,
)

__all__ = [
    "PruneLowMagnitude",
    "PruneRegistry",
    "attribute_overrides",
    "forget_calls",
    "keep_inputs_uncast",
    "smart_cond",
    "sublayers",
    "takes",
]


def sublayers(layer: Any) -> list[Any]:
    """The layers that a tf_keras layer or model itself holds, in the order of their creation."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def takes(layer: Any, argument: str) -> bool:
    """Whether the call of a layer takes `training` or `mask`."""
    return bool(getattr(layer._call_spec, f"expects_{argument}_arg"))


def keep_inputs_uncast(layer: Any) -> None:
    """Leaves the casting of inputs to the layers inside `layer`."""
    layer._autocast = False


def forget_calls(layer: Any) -> None:
    """Makes SavedModel trace the inside of `layer` as a part of its wrapper, not by itself.

    A trace of its own would read its variables, not the effective weights.
    """
    for inner in layer._flatten_layers():
        inner._saved_model_inputs_spec = None
        inner._saved_model_arg_spec = None


@contextmanager
def attribute_overrides(overrides: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Lets attributes that hold variables answer with tensors.

    Past `Layer.__setattr__`, which would take the variable off the layer's list of weights.

    Args:
        overrides: `(owner, attribute, tensor)` triples.

    Raises:
        RuntimeError: If something else has been put there in the meantime, such as another
            replica of a MirroredStrategy whose threads take turns inside the layer.
    """
    overrides = list(overrides)
    before = [vars(owner)[name] for owner, name, _ in overrides]
    for owner, name, tensor in overrides:
        vars(owner)[name] = tensor
    try:
        yield
        for owner, name, tensor in overrides:
            if vars(owner)[name] is not tensor:
                raise RuntimeError(
                    f"The weight '{name}' of '{owner.name}' was replaced while the layer ran: a "
                    "replica of MirroredStrategy took its turn inside it, as BatchNormalization "
                    "makes it do. Wrap the layers inside one by one. "
                    f"Received: owner={type(owner).__name__}"
                )
    finally:
        for (owner, name, _), variable in zip(overrides, before, strict=True):
            vars(owner)[name] = variable
