"""`WrappedForm`: kernels that parametrizations of a `PrunableLayer` hold; `"masked"`."""

from collections.abc import Mapping
from typing import ClassVar

import keras

from keras_sparse_ortho._keras_internals import body_of
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import is_sparse_layer
from keras_sparse_ortho.layers import PrunableLayer, plain_layer
from keras_sparse_ortho.parametrizations import FixedMask, Parametrization
from keras_sparse_ortho.storages._storage_form import (
    StorageForm,
    register_storage,
    storage_form,
)
from keras_sparse_ortho.storages._target import KernelChange, quantizer_of


class WrappedForm(StorageForm):
    """The layer inside a `PrunableLayer`, with a parametrization for each of its kernels."""

    parametrization_class: ClassVar[type[FixedMask]]
    """Holds a kernel with a fixed mask."""

    def form(
        self, layer: keras.layers.Layer, changes: Mapping[str, KernelChange]
    ) -> keras.layers.Layer:
        return wrap(layer, changes)

    def parametrization(self, change: KernelChange) -> Parametrization:
        """The unbuilt parametrization for a kernel: the target's own, or a fixed mask."""
        if change.target.parametrization is not None:
            return change.target.parametrization
        draw = change.mask_draw
        return self.parametrization_class.awaiting_values(
            draw.mask, draw.initializer
        )


def form_layer(
    layer: keras.layers.Layer, changes: Mapping[str, KernelChange]
) -> keras.layers.Layer | None:
    """Returns the new layer for one whose kernels change; its kernels may have several forms.

    Args:
        layer: Layer in the copy of the model.
        changes: dict from the name of a kernel below the layer to its `KernelChange`.

    Raises NotPrunableError for forms that one layer cannot have together.
    """
    names = {change.target.storage for change in changes.values()}
    forms = [storage_form(name) for name in sorted(names)]
    if len(forms) == 1:
        return forms[0].form(layer, changes)
    if all(isinstance(form, WrappedForm) for form in forms):
        return wrap(layer, changes)
    planned = ", ".join(
        f"{name!r} {change.target.storage}" for name, change in changes.items()
    )
    raise NotPrunableError(
        f"The kernels of the layer {layer.name!r} must have one storage, or storages in a wrapper, "
        f"such as masked and compact: others replace the whole layer. Received: {planned}"
    )


def wrap(
    layer: keras.layers.Layer, changes: Mapping[str, KernelChange]
) -> PrunableLayer:
    """Wraps a layer whose kernels have wrapped forms, which may differ.

    Args:
        layer: Layer in the copy of the model.
        changes: dict from the name of a kernel below the layer to its `KernelChange`.

    Returns:
        The built wrapper, with the masks and values of the changes.
    """
    parametrizations = {}
    for name, change in changes.items():
        form = storage_form(change.target.storage)
        assert isinstance(form, WrappedForm)
        parametrizations[name] = form.parametrization(change)
    body = plain_layer(layer) if is_sparse_layer(layer) else body_of(layer)
    wrapper = PrunableLayer(
        body,
        parametrizations,
        name=layer.name,
        trainable=layer.trainable,
        quantizer=quantizer_of(changes),
    )
    wrapper.build()
    for name, parametrization in wrapper.parametrizations.items():
        _set_values(parametrization, changes[name])
    return wrapper


def _set_values(parametrization: Parametrization, change: KernelChange) -> None:
    """Gives a parametrization that was just built the values of its kernel."""
    draw = change.draw
    variable = change.weight.variable
    is_plain = change.weight.storage is None
    new_kernel = None if draw is None else draw.kernel
    if new_kernel is not None:
        parametrization.assign_raw(new_kernel)
    elif (
        is_plain
        and parametrization.compact
        and parametrization.layer_variable is not variable
    ):
        # The variable of a copied layer has no value where it will not be stored.
        parametrization.assign_raw(variable.value)
    if new_kernel is None or not parametrization.movable:
        parametrization.settle()  # a new kernel is zero where its fixed mask is dead
    if draw is not None and draw.fresh:
        parametrization.mark_as_drawn(new_kernel)


@register_storage
class MaskedForm(WrappedForm):
    """A dense kernel with its mask, `parametrizations.FixedMask`; training moves both forward."""

    name = "masked"
    parametrization_class = FixedMask
