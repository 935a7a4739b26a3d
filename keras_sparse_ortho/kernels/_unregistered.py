"""Matrices in layers that are not registered: the meaning of their axes is unknown."""

from typing import Any

from keras_sparse_ortho._keras_internals import created_trainable
from keras_sparse_ortho.kernels._kernel_layouts import are_kernels_told, kernel_layouts
from keras_sparse_ortho.kernels._prunable_weight import PrunableWeight
from keras_sparse_ortho.orthogonal import KernelLayout


def own_unregistered(layer: Any, path: str) -> list[PrunableWeight]:
    """The matrices that a layer itself owns and that are no kernels for all that is known.

    A matrix is a weight that was made to be trained, with two axes at least that are longer than 1,
    and is not called `bias` or `*_bias`. Layers of Keras itself, registered ones and those of ours
    have said what their kernels are.
    """
    if are_kernels_told(layer):
        return []
    known = kernel_layouts(layer)
    return [
        PrunableWeight(
            f"{path}/{variable.name}" if path else variable.name,
            variable,
            layer,
            guessed_layout(len(variable.shape)),
            registered=False,
        )
        for variable in created_trainable(layer)
        if variable.name not in known and _is_matrix(variable)
    ]


def guessed_layout(rank: int) -> KernelLayout:
    """The likeliest meaning of the axes of a matrix: `(*batch, in, out)`."""
    return KernelLayout(inputs=(rank - 2,), outputs=(rank - 1,), batch=tuple(range(rank - 2)))


def _is_matrix(variable: Any) -> bool:
    bias = variable.name == "bias" or variable.name.endswith("_bias")
    return not bias and sum(size > 1 for size in variable.shape) >= 2
