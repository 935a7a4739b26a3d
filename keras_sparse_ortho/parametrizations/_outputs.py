"""Which axes of a weight number its outputs."""

from keras_sparse_ortho.parametrizations._prunable_weight import PrunableWeight


def outputs_shape(weight: PrunableWeight) -> tuple[int, ...]:
    """The shape of one number for each output, which broadcasts to the shape of the weight."""
    rank = len(weight.shape)
    layout = weight.layout
    axes = (-1,) if layout is None else (*layout.batch, *layout.outputs)
    own = {axis % rank for axis in axes}
    return tuple(size if k in own else 1 for k, size in enumerate(weight.shape))
