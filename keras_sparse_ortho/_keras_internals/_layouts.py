"""On which devices the variables of a model lie, as `keras.distribution` says on JAX."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

Axes = tuple[str | None, ...]
"""For each axis of a variable the axis of the device mesh that it is cut along; `None` for none."""


def layout_of(variable: Any) -> Any:
    """The `jax.sharding.Sharding` of a variable; `None` where it lies on one device."""
    if keras.backend.backend() != "jax":
        return None
    layout = getattr(variable, "_layout", None)
    return getattr(layout, "backend_layout", layout)


def initialize_layout(variable: Any) -> None:
    """Gives a variable on JAX that has no value yet the layout of the current distribution."""
    distribution = _distribution()
    if distribution is not None and variable._layout is None:
        layout = distribution.get_variable_layout(variable)
        variable._layout = getattr(layout, "backend_layout", layout)


def axes_of(variable: Any) -> Axes | None:
    """The axes of a variable under the current distribution; `None` where there is none."""
    distribution = _distribution()
    if distribution is None:
        return None
    layout = distribution.get_variable_layout(variable)
    given = tuple(layout.axes if hasattr(layout, "axes") else layout.spec)
    return given + (None,) * (len(variable.shape) - len(given))


def axes_at(path: str) -> Axes | None:
    """The axes that the map of the current distribution has for a path; `None` for none."""
    distribution = _distribution()
    layout = None if distribution is None else distribution.get_tensor_layout(path)
    return None if layout is None else tuple(layout.axes)


def mesh_size(axis: str) -> int:
    """The number of devices along an axis of the mesh of the current distribution."""
    mesh = keras.distribution.distribution().device_mesh
    return int(mesh.shape[list(mesh.axis_names).index(axis)])


def layout_entries(distribution: Any) -> dict[str, str]:
    """What the map of a distribution has for each pattern, and its mesh."""
    mesh = distribution.device_mesh
    entries = {"mesh": f"{tuple(mesh.shape)} {list(mesh.axis_names)}"}
    for value in vars(distribution).values():
        if isinstance(value, keras.distribution.LayoutMap):
            entries |= {pattern: str(layout.axes) for pattern, layout in value.items()}
    return entries


def create_along(create: Callable[[], Any], axes: Sequence[str | None] | None) -> Any:
    """The variable that a function creates, along given axes, whatever a map has for its path.

    Args:
        create: Creates one variable.
        axes: As of `axes_of`; with `None` it is left to the distribution.
    """
    distribution = _distribution()
    if distribution is None or axes is None:
        return create()
    layout = keras.distribution.TensorLayout(tuple(axes), distribution.device_mesh)
    with _Only(distribution, layout):
        variable = create()
    if variable._layout is None:  # one that gets its value later
        variable._layout = layout
    return variable


def stand_in_name_scope(wrapper: Any, layer: Any) -> None:
    """Gives what a layer creates the paths that it would have without the wrapper of its name.

    So what is said of variables by path, as in a `LayoutMap`, holds for the wrapped layer, too.
    """
    if layer.name != wrapper.name:
        return
    if wrapper._parent_path is None:  # around a layer that is built
        wrapper._parent_path = layer._parent_path
    elif layer._parent_path is None:
        layer._parent_path = wrapper._parent_path


def along_kernel(shape: Sequence[int], kernel: Any) -> Axes | None:
    """Axes for what belongs to a kernel, such as its mask, or a number for each channel.

    In a variable of the kernel's rank an axis of its size is cut as that of the kernel is. Anything
    else, such as a scalar, is whole on every device.
    """
    own = axes_of(kernel)
    if own is None:
        return None
    if len(shape) != len(own):
        return (None,) * len(shape)
    pairs = zip(shape, kernel.shape, own, strict=True)
    return tuple(axis if size == whole else None for size, whole, axis in pairs)


def along_mesh(size: int, kernel: Any) -> Axes | None:
    """Axes for a vector of live entries of a kernel.

    It is cut along the first axis of the mesh along which the kernel is, and whose devices divide
    it; else it is whole on every device.
    """
    own = axes_of(kernel)
    if own is None:
        return None
    fitting = [axis for axis in own if axis is not None and size % mesh_size(axis) == 0]
    return (fitting[0] if fitting else None,)


class _Only:
    """Inside, a distribution has one layout for all variables."""

    def __init__(self, distribution: Any, layout: Any) -> None:
        self._distribution = distribution
        self._layout = layout

    def __enter__(self) -> None:
        keras.distribution.set_distribution(self)

    def __exit__(self, *exception: Any) -> None:
        keras.distribution.set_distribution(self._distribution)

    def get_variable_layout(self, variable: Any) -> Any:
        return self._layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._distribution, name)


def _distribution() -> Any:
    return keras.distribution.distribution() if keras.backend.backend() == "jax" else None
