"""Which layers of a model have zeros that leave whole blocks; the model of their convolutions.

LiteRT cannot multiply blocks, but XNNPACK has fast grouped convolutions, in float32 and int8. Each
output block is a group of its live input blocks; blocks with other counts are other convolutions.
"""

from typing import NamedTuple

import keras
import numpy as np

from keras_sparse_ortho.export._block_convolutions import (
    ConvAsConvolution,
    DenseAsConvolution,
    canonical_kernel,
    grouped_kernels,
)
from keras_sparse_ortho.export._zero_blocks import (
    ZeroBlocks,
    zero_blocks,
)
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.layers import why_no_block_form
from keras_sparse_ortho.models import rewrite
from keras_sparse_ortho.orthogonal import einsum_axes

L = keras.layers
_ONE_PRODUCT = L.Dense | L.EinsumDense | L.Conv1D | L.Conv2D


class BlockPlan(NamedTuple):
    """Which kernels of a plain model become grouped convolutions, and why the others do not."""

    found: dict[str, ZeroBlocks]
    kept: dict[str, str]


def plan_of(model: keras.Model) -> BlockPlan:
    """Which kernels of a plain model have zeros that leave whole blocks."""
    plan = BlockPlan({}, {})
    for layer, _ in walk(model, ""):
        kernel = getattr(layer, "kernel", None)
        if not isinstance(kernel, keras.Variable):
            continue
        blocks = _blocks_of(layer)
        if isinstance(blocks, str):
            plan.kept[kernel.path] = blocks
        else:
            plan.found[kernel.path] = blocks
    for path in plan.found:  # a wrapper has the kernel of its layer
        plan.kept.pop(path, None)
    return plan


def as_convolutions(model: keras.Model, rows_apart: bool) -> keras.Model:
    """A copy of a plain model in which the layers of its plan are grouped convolutions.

    Args:
        model: The plain model.
        rows_apart: bool. Whether each row of the batch is an image that is quantized by itself.
            Else rows of Dense layers are pixels of one image: a fifth of the time at batch 64.
    """

    def replace(
        layer: keras.layers.Layer, path: str, body: keras.layers.Layer
    ) -> keras.layers.Layer | None:
        blocks = _blocks_of(layer)
        if isinstance(blocks, str):
            return None
        if isinstance(layer, L.Conv1D | L.Conv2D):
            return ConvAsConvolution(body, blocks, rows_apart)
        return DenseAsConvolution(body, blocks, rows_apart)

    return rewrite(model, replace)


def kernels_of_blocks(
    model: keras.Model, plan: BlockPlan
) -> dict[str, list[np.ndarray]]:
    """The kernels of the grouped convolutions of a plain model, by path of its kernel."""
    kernels = {}
    for layer, _ in walk(model, ""):
        # A wrapper has the kernel of its layer.
        if not isinstance(layer, _ONE_PRODUCT):
            continue
        path = layer.kernel.path
        if path in plan.found:
            kernel = canonical_kernel(layer)
            kernels[path] = grouped_kernels(kernel, plan.found[path])
    return kernels


def _blocks_of(layer: keras.layers.Layer) -> ZeroBlocks | str:
    """The blocks of a plain layer, or why it has no form as a grouped convolution."""
    if isinstance(layer, L.Conv3D):
        return "LiteRT has no grouped convolutions of volumes"
    if not isinstance(layer, _ONE_PRODUCT):
        return f"a {type(layer).__name__} is not one product"
    if not layer.built:
        return "it was never called"
    if getattr(layer, "data_format", None) == "channels_first":
        return "its channels come first"
    if getattr(layer, "groups", 1) != 1:
        return f"it has groups={layer.groups}"
    if isinstance(layer, L.EinsumDense):
        data, _, output = einsum_axes(layer.equation, layer.input_spec.ndim)
        if output[0] != data[0]:
            return f"in {layer.equation!r} the first axis of input and output differ"
    blocks = zero_blocks(canonical_kernel(layer))
    if isinstance(blocks, str):
        return blocks
    return why_no_block_form(layer) or blocks
