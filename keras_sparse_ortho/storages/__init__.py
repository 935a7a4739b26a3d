"""How layers hold sparse kernels: masked, compact, on live blocks, dense; a form by its name."""

from keras_sparse_ortho.storages._blocks import BlockForm
from keras_sparse_ortho.storages._compact import CompactForm
from keras_sparse_ortho.storages._dense import (
    DenseForm,
    RoundedForm,
    ThinForm,
    factored_kernel,
    forget_sparse_initializers,
)
from keras_sparse_ortho.storages._storage_form import (
    FORMS,
    StorageForm,
    check_storage,
    register_storage,
    storage_form,
)
from keras_sparse_ortho.storages._target import KernelChange, Target, mask_of
from keras_sparse_ortho.storages._wrapped import (
    MaskedForm,
    WrappedForm,
    form_layer,
)

__all__ = [
    "KernelChange",
    "StorageForm",
    "Target",
    "WrappedForm",
    "register_storage",
]
