"""`StorageForm`: how layers hold sparse kernels; the registry of all forms by name."""

import abc
from collections.abc import Mapping
from typing import ClassVar, TypeVar

import keras

from keras_sparse_ortho._foreign_names import for_value
from keras_sparse_ortho.kernels import PrunableWeight, Storage
from keras_sparse_ortho.storages._target import KernelChange

FormClass = TypeVar("FormClass", bound="type[StorageForm]")

FORMS: dict[str, "StorageForm"] = {}


class StorageForm(abc.ABC):
    """How a layer holds its kernels: with masks, compactly, on live blocks, or dense.

    `storage=` of `sparsify`, `prune`, `apply_masks` and `convert` is the `name` of a form. A new
    one is a subclass with `form`, registered by `@register_storage`:

    - a kernel in a wrapper: subclass `WrappedForm` and name the parametrization that holds it;
    - a layer of its own, such as `layers.BlockSparseDense`: implement `form`.

    A `kernels.Storage` holds one kernel in the new layer. Its `form_name` is this `name`.
    """

    name: ClassVar[str]
    """The value of `storage=` that chooses the form."""

    is_choice: ClassVar[bool] = True
    """Whether `storage=` takes the name. Plans alone use the others."""

    keeps_dense_kernel: ClassVar[bool] = True
    """Whether a variable of the kernel's shape stays, so that new values can wait as tensors."""

    fallback: ClassVar[str | None] = None
    """The form of kernels that cannot have this one. A warning names them."""

    def why_not(
        self, layer: keras.layers.Layer, changes: Mapping[str, KernelChange]
    ) -> str | None:
        """Says why a layer cannot have this form.

        Args:
            layer: Layer of the given model, plain, wrapped or on blocks.
            changes: dict from the name of a kernel below the layer to its `KernelChange`.

        Returns:
            A sentence for an error, or `None` where it can.
        """
        return None

    @abc.abstractmethod
    def form(
        self, layer: keras.layers.Layer, changes: Mapping[str, KernelChange]
    ) -> keras.layers.Layer | None:
        """Returns the built layer that takes the place of `layer`.

        Args:
            layer: Layer in the copy of the model. Its state may be moved into the new layer.
            changes: dict from the name of a kernel below the layer to its `KernelChange`.

        Returns:
            A new layer, or `None` where the layer stays as it is.
        """

    def replaces(self, storage: Storage) -> bool:
        """Whether `convert` gives a kernel in this storage the form."""
        return storage.form_name != self.name

    def refuse_parametrization(self, weight: PrunableWeight) -> None:  # noqa: B027
        """Raises NotPrunableError where `convert` cannot take a kernel over as it is now."""


def register_storage(kind: FormClass) -> FormClass:
    """Registers a storage form by its `name`; a class decorator."""
    FORMS[kind.name] = kind()
    return kind


def storage_form(name: str) -> StorageForm:
    """Returns the form of a name; raises ValueError for an unknown one."""
    form = FORMS.get(name) if isinstance(name, str) else None
    if form is None:
        raise _unknown_storage(name)
    return form


def check_storage(storage: str) -> StorageForm:
    """Returns the form that a user's `storage=` names; raises ValueError for another value."""
    form = FORMS.get(storage) if isinstance(storage, str) else None
    if form is None or not form.is_choice:
        raise _unknown_storage(storage)
    return form


def _unknown_storage(storage: object) -> ValueError:
    choices = sorted(name for name, form in FORMS.items() if form.is_choice)
    return ValueError(
        f"`storage` must be one of {choices}.{for_value('storage', storage)} Received: {storage=}"
    )
