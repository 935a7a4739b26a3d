"""The weights of a layer that a wrapper around it may parametrize."""

from typing import Any

from keras_sparse_ortho.kernels import PrunableWeight, find_kernels, find_unregistered, walk


def wrappable_weights(layer: Any, *, unregistered: bool) -> list[PrunableWeight]:
    """The kernels in a layer but for those that wrappers inside it hold.

    Args:
        layer: The built layer.
        unregistered: Whether matrices that are not registered count as well.
    """
    held = {
        id(weight.variable)
        for wrapper, _ in walk(layer, "")
        if hasattr(wrapper, "transparent_path")
        for weight in wrapper.prunable_weights
    }
    found = find_kernels(layer, "")
    if unregistered:
        found += find_unregistered(layer, "", found)
    return [weight for weight in found if id(weight.variable) not in held]
