"""The cost of a model with narrower groups of channels: parameters, multiply-adds, bytes."""

import dataclasses
import time
from collections.abc import Mapping, Sequence

import keras
import numpy as np

from keras_sparse_ortho._checks import as_text
from keras_sparse_ortho.calibration._readers import ReaderMoments
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import (
    ChannelGroup,
    prunable_weights,
    shapes_without,
)

Array = np.ndarray

_COSTS = ("parameters", "flops", "work", "bytes")

_FLOATS_BELOW = (
    1024  # entries: LiteRT's converter leaves smaller kernels in floats
)
_FLOAT_BYTES = 4
_LANES = 16  # outputs of a kernel that runtimes compute together
_SLOWER = 1.5  # with values of some kernels than without
_OUTPUT_BYTES = 12  # scale and zero point of an output of a kernel in integers


def check_cost(cost: object) -> None:
    """Raises ValueError unless a cost is the name of one, or a callable."""
    if callable(cost) or cost in _COSTS:
        return
    raise ValueError(
        f"`cost` must be one of {', '.join(map(repr, _COSTS))}, or a callable from widths "
        f"to a number. Received: cost={as_text(cost)}"
    )


@dataclasses.dataclass(frozen=True)
class WidthCosts:
    """Exact sizes of all weights by the widths of groups.

    An axis of a weight has `size - sum_g loss_g s_g` entries, where `s_g` counts the steps of
    group `g` that are gone. The losses are read from the weights that `remove_channels` would make.

    Attributes:
        groups: list of ChannelGroup.
        sizes: int array `(weights, axes)`. Sizes of the dense model; weights with fewer axes
            have ones in front.
        losses: int array `(weights, axes, groups)`.
        positions: array `(weights,)`. How often a kernel is applied to one sample; 0 for weights
            that are not kernels, NaN where that is unknown.
        is_kernel: bool array `(weights,)`.
        is_folded: bool array `(weights,)`. Weights that files do not have.
    """

    groups: Sequence[ChannelGroup]
    sizes: Array
    losses: Array
    positions: Array
    is_kernel: Array
    is_folded: Array

    @classmethod
    def of(
        cls,
        model: keras.Model,
        groups: Sequence[ChannelGroup],
        readers: ReaderMoments,
        last_steps: Mapping[str, int],
    ) -> "WidthCosts":
        """The sizes of a model's weights, and how each group changes them.

        Args:
            model: Model, plain.
            groups: Its groups of channels.
            readers: The kernels that read them.
            last_steps: By the name of a group the step that nobody would remove: channels that are
                dead already change no size.
        """
        weights = list(model.weights)
        rank = max(len(weight.shape) for weight in weights)
        shapes = shapes_without(model, [])
        dense = _aligned(weights, shapes, rank)
        losses = []
        for group in groups:
            pairs = []
            step = last_steps[group.name]
            for path, rows in group.rows.items():
                kernel = readers.kernel(path)
                kernel[rows[step]] = 0.0
                pairs.append(readers.pair(path, kernel))
            narrower = _aligned(weights, shapes_without(model, pairs), rank)
            losses.append(dense - narrower)
        sizes = {id(weight): tuple(weight.shape) for weight in weights}
        kernels = {
            id(kernel.variable): kernel
            for kernel in prunable_weights(model, flops=True)
        }
        positions = [_positions(kernels.get(id(weight))) for weight in weights]
        is_kernel = [id(weight) in kernels for weight in weights]
        folded = _folded_weights(model)
        is_folded = [id(weight) in folded for weight in weights]
        return cls(
            groups=groups,
            sizes=_aligned(weights, sizes, rank),
            losses=np.stack(losses, axis=-1),
            positions=np.array(positions),
            is_kernel=np.array(is_kernel),
            is_folded=np.array(is_folded),
        )

    def cost(self, name: str, widths: Mapping[str, int]) -> float:
        """One of the costs, by name."""
        functions = {
            "parameters": self.parameters,
            "flops": self.flops,
            "work": self.work,
            "bytes": self.int8_bytes,
        }
        return functions[name](widths)

    def parameters(self, widths: Mapping[str, int]) -> float:
        """The number of entries of all weights."""
        return float(np.sum(self._entries(widths)))

    def flops(self, widths: Mapping[str, int]) -> float:
        """Multiply-adds of all kernels for one sample."""
        counts = self._multiply_adds(self._shapes(widths), "flops")
        return float(np.sum(counts))

    def work(self, widths: Mapping[str, int]) -> float:
        """Multiply-adds with the outputs of each kernel rounded up to whole lanes of 16."""
        return float(np.sum(self.work_by_weight(widths)))

    def work_by_weight(self, widths: Mapping[str, int]) -> Array:
        """The work of each kernel, `(weights,)`; other weights have 0.

        A kernel of 24 outputs takes as long as one of 32. Kernels of fewer than 16 outputs, such as
        a head, and depthwise ones, whose last axis has one entry, count as they are.
        """
        shapes = self._shapes(widths)
        outputs = shapes[:, -1]
        dense_outputs = self.sizes[:, -1]
        rounded = np.minimum(-(-outputs // _LANES) * _LANES, dense_outputs)
        shapes[:, -1] = np.where(dense_outputs < _LANES, outputs, rounded)
        return self._multiply_adds(shapes, "work")

    def _multiply_adds(self, shapes: Array, cost: str) -> Array:
        counts = np.prod(shapes, axis=1) * self.positions
        if np.isnan(counts).any():
            raise ValueError(
                "Multiply-adds are counted where the inputs of a model have a fixed shape, and the "
                "layers are Keras' or registered (`kernel_positions`): take another cost. "
                f"Received: {cost=}"
            )
        return counts

    def int8_bytes(self, widths: Mapping[str, int]) -> float:
        """Bytes of the weights in a file of `mode="dynamic_int8"`, without the graph around them.

        A kernel of at least 1,024 entries takes a byte for each, and 12 for the scale and the zero
        point of each output; others take 4 bytes for each entry. Batch normalization is folded into
        the kernel before it: only its shift remains.
        """
        shapes = self._shapes(widths)
        entries = np.prod(shapes, axis=1)
        integers = self.is_kernel & (entries >= _FLOATS_BELOW)
        sizes = np.where(integers, entries, _FLOAT_BYTES * entries)
        outputs = np.where(integers, shapes[:, -1], 0)
        sizes = np.where(self.is_folded, 0, sizes + _OUTPUT_BYTES * outputs)
        return float(np.sum(sizes))

    def _shapes(self, widths: Mapping[str, int]) -> Array:
        steps = []
        for group in self.groups:
            removed = group.width - widths.get(group.name, group.width)
            steps.append(removed // group.unit)
        return self.sizes - self.losses @ np.array(steps, int)

    def _entries(self, widths: Mapping[str, int]) -> Array:
        return np.prod(self._shapes(widths), axis=1)


def seconds_of_costs(model: keras.Model) -> float:
    """The estimated time that `WidthCosts.of` takes for each group."""
    start = time.monotonic()
    shapes_without(model, [])
    return _SLOWER * (time.monotonic() - start)


def _aligned(
    weights: Sequence[keras.Variable],
    shapes: Mapping[int, tuple[int, ...]],
    rank: int,
) -> Array:
    """The shapes of weights, `(weights, axes)`, with ones in front of those with fewer axes."""
    aligned = np.ones((len(weights), rank), int)
    for sizes, weight in zip(aligned, weights, strict=True):
        shape = shapes[id(weight)]
        sizes[rank - len(shape) :] = shape
    return aligned


def _positions(kernel: PrunableWeight | None) -> float:
    if kernel is None:
        return 0.0
    return np.nan if kernel.flops is None else kernel.flops / kernel.size


def _folded_weights(model: keras.Model) -> set[int]:
    """Weights of batch normalization by `id`, but for the shift."""
    folded = set()
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            shift = layer.beta if layer.center else layer.moving_mean
            folded |= {
                id(weight) for weight in layer.weights if weight is not shift
            }
    return folded
