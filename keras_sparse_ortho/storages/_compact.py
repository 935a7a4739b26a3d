"""`"compact"`: live values and their indices in place of the dense kernel."""

from collections.abc import Mapping

import keras

from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.parametrizations import (
    CompactMask,
    refuse_unless_fixed,
    why_not_compact,
)
from keras_sparse_ortho.storages._storage_form import register_storage
from keras_sparse_ortho.storages._target import KernelChange
from keras_sparse_ortho.storages._wrapped import WrappedForm


@register_storage
class CompactForm(WrappedForm):
    """The live values of a fixed mask and their indices, `parametrizations.CompactMask`."""

    name = "compact"
    keeps_dense_kernel = False
    parametrization_class = CompactMask

    def why_not(
        self, layer: keras.layers.Layer, changes: Mapping[str, KernelChange]
    ) -> str | None:
        for change in changes.values():
            reason = why_not_compact(change.weight)
            if reason is not None:
                return reason
        return None

    def refuse_parametrization(self, weight: PrunableWeight) -> None:
        storage = weight.storage
        assert storage is not None
        refuse_unless_fixed(
            storage, f"{weight.path!r} with {type(storage).__name__}"
        )
