"""Layouts of variables over devices, under `keras.distribution`."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import keras

from keras_sparse_ortho._interception import intercepted

Distribution: TypeAlias = Any
"""The result of `keras.distribution.distribution()`, which has no public class."""

Sharding: TypeAlias = Any
"""A `jax.sharding.Sharding`; JAX may not be there."""

Axes = tuple[str | None, ...]
"""For each axis of a variable the axis of the device mesh that it is cut along; `None` for none."""


def layout_of(variable: keras.Variable) -> Sharding | None:
    """The `jax.sharding.Sharding` of a variable; `None` where it lies on one device."""
    if keras.backend.backend() != "jax":
        return None
    layout = getattr(variable, "_layout", None)
    return getattr(layout, "backend_layout", layout)


def initialize_layout(variable: keras.Variable) -> None:
    """Gives a variable on JAX that has no value yet the layout of the current distribution."""
    distribution = _distribution()
    if distribution is not None and variable._layout is None:
        layout = distribution.get_variable_layout(variable)
        variable._layout = getattr(layout, "backend_layout", layout)


def axes_of(variable: keras.Variable) -> Axes | None:
    """The axes of a variable under the current distribution; `None` where there is none."""
    distribution = _distribution()
    if distribution is None:
        return None
    layout = distribution.get_variable_layout(variable)
    if hasattr(layout, "axes"):
        axes = layout.axes
    else:
        axes = layout.spec
    missing = len(variable.shape) - len(axes)
    return (*axes, *[None] * missing)


def axes_at(path: str) -> Axes | None:
    """The axes that the map of the current distribution has for a path; `None` for none."""
    distribution = _distribution()
    if distribution is None:
        return None
    layout = distribution.get_tensor_layout(path)
    if layout is None:
        return None
    return tuple(layout.axes)


def mesh_size(axis: str) -> int:
    """The number of devices along an axis of the current distribution's mesh."""
    mesh = keras.distribution.distribution().device_mesh
    index = list(mesh.axis_names).index(axis)
    return int(mesh.shape[index])


def layout_entries(distribution: Distribution) -> dict[str, str]:
    """The patterns and axes in the map of a distribution, and its mesh."""
    mesh = distribution.device_mesh
    entries = {"mesh": f"{tuple(mesh.shape)} {list(mesh.axis_names)}"}
    for value in vars(distribution).values():
        if isinstance(value, keras.distribution.LayoutMap):
            entries |= {
                pattern: str(layout.axes) for pattern, layout in value.items()
            }
    return entries


def create_along(
    create: Callable[[], keras.Variable],
    axes: Sequence[str | None] | None,
) -> keras.Variable:
    """The variable that `create` makes, along given axes, whatever a map has for its path.

    With `None` the axes are left to the distribution.
    """
    distribution = _distribution()
    if distribution is None or axes is None:
        return create()
    layout = keras.distribution.TensorLayout(
        tuple(axes), distribution.device_mesh
    )
    with intercepted(
        distribution, "get_variable_layout", lambda original, variable: layout
    ):
        variable = create()
    if variable._layout is None:  # one that gets its value later
        variable._layout = layout
    return variable


def along_kernel(shape: Sequence[int], kernel: keras.Variable) -> Axes | None:
    """Axes for a mask, or for a number for each channel: cut where they have a kernel's axes.

    Anything else, such as a scalar, is whole on every device.
    """
    kernel_axes = axes_of(kernel)
    if kernel_axes is None:
        return None
    axes: list[str | None] = [None] * len(shape)
    if len(shape) == len(kernel_axes):
        for number, axis in enumerate(kernel_axes):
            if shape[number] == kernel.shape[number]:
                axes[number] = axis
    return tuple(axes)


def along_mesh(size: int, kernel: keras.Variable) -> Axes | None:
    """Axes for a vector of live entries: the first of the kernel's whose devices divide it.

    Else it is whole on every device.
    """
    kernel_axes = axes_of(kernel)
    if kernel_axes is None:
        return None
    for axis in kernel_axes:
        if axis is not None and size % mesh_size(axis) == 0:
            return (axis,)
    return (None,)


def _distribution() -> Distribution | None:
    """The current distribution; `None` without one, and on other backends than JAX."""
    if keras.backend.backend() != "jax":
        return None
    return keras.distribution.distribution()
