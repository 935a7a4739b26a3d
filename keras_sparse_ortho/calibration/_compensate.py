"""`compensate`: live weights that make up for the ones that are masked."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.calibration._rows import GramStop, LinearKernel, Moments, linear_kernel
from keras_sparse_ortho.calibration._solve import refit, relative_error
from keras_sparse_ortho.calibration._sweep import Stop, calibration_batches, sweep
from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError
from keras_sparse_ortho.kernels import PrunableWeight, storages_of, walk
from keras_sparse_ortho.models import check_built, prunable_weights


def compensate(
    model: keras.Model, data: Any, *, dense: keras.Model, verbose: int = 0
) -> dict[str, tuple[float, float]]:
    """Refits the live weights of a masked model to the kernels of the dense one, in place.

    For each kernel with mask `M` and inputs `X` of its layer in the masked model

        V = argmin tr (V - W)^T H (V - W)  over  V = M * V,   H = X^T X + 0.01 mean(diag X^T X) I,

    where `W` is the dense model's kernel: the least squared error of the layer's outputs, one
    linear system for each output. Layers are solved one after the other, each on the inputs that
    the ones before it give, in float64. Masks stay; biases and other weights, too.

    `prune(trained, density, data=x, refit=True)` does the same for masks that it makes.

    Args:
        model: A built Keras model with fixed masks, masked or compact.
        data: Inputs, or what `fit` takes; targets are not used. All rows of arrays, in batches of
            64; of data sets and generators the first 64 batches.
        dense: A model with the kernels to come near to, under the same paths: usually the trained
            one that was pruned.
        verbose: 1 for a progress bar over the kernels.

    Returns:
        By path of each kernel that was refitted, `tr (V - W)^T H (V - W) / tr W^T H W` before and
        after, on the rows of the refit. The error on other rows is larger, the more so the fewer
        rows there are: compare models on other data.

    Raises:
        NotPrunableError: A model that is not built or has no such kernels; inputs that are not
            finite; batches that go through the layers in another order than the first. The model
            is as it was then.
        UnknownWeightError: A dense model that lacks a kernel, or has one of another shape.

    Warns:
        UserWarning: Fewer than 16 different rows of data.

    Limits: what training has changed since the dense kernels is lost. Kernels that do not multiply
    the inputs of their layers (embeddings, recurrent cells), learnt masks and layers of live
    blocks (see `to_masked`) stay as they are. For memory see `prune`.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> keras.utils.set_random_seed(0)
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="a")])
    >>> x = np.random.default_rng(0).normal(size=(64, 8)) + 1
    >>> pruned = kso.prune(dense, 0.5)
    >>> before, after = compensate(pruned, x, dense=dense)["a/kernel"]
    >>> after < before
    True
    """
    check_built(model)
    found = _refittable(model)
    targets = {weight.path: weight for weight in prunable_weights(dense, unregistered=True)}
    for _, weight, _ in found:
        target = targets.get(weight.path)
        if target is None or target.shape != weight.shape:
            shape = None if target is None else target.shape
            raise UnknownWeightError(
                f"`dense` must have the kernel '{weight.path}' of shape {weight.shape}. "
                f"Received: a kernel of shape {shape}"
            )
    errors: dict[str, tuple[float, float]] = {}
    stops: list[Stop] = [
        GramStop(holder, kernel, _solver(weight, kernel, targets[weight.path], errors))
        for holder, weight, kernel in found
    ]
    before = [weight.raw_value() for _, weight, _ in found]
    try:
        sweep(model, calibration_batches(data), stops, verbose)
    except BaseException:
        for (_, weight, _), value in zip(found, before, strict=True):
            _set(weight, value)
        raise
    return errors


def _refittable(model: Any) -> list[tuple[Any, PrunableWeight, LinearKernel]]:
    """The layers to wait at, with their weights of fixed masks and how these are applied."""
    # The layer around the owner: inside it, the masked kernel has been computed already.
    holders = {
        id(storage): layer
        for layer, _ in walk(model, "")
        for storage in storages_of(layer).values()
    }
    found = []
    for weight in prunable_weights(model, unregistered=True):
        if weight.storage is None or not weight.storage.movable:
            continue
        holder = holders[id(weight.storage)]
        kernel = linear_kernel(weight, weight.owner)
        if kernel is not None and getattr(holder, "layer", None) is weight.owner:
            found.append((holder, weight, kernel))
    if not found:
        raise NotPrunableError(
            "The model has no kernel under a fixed mask that multiplies the inputs of its layer. "
            f"Received: model={model.name!r}"
        )
    return found


def _solver(
    weight: PrunableWeight,
    kernel: LinearKernel,
    target: PrunableWeight,
    errors: dict[str, tuple[float, float]],
) -> Callable[[Moments], None]:
    def solve(moments: Moments) -> None:
        assert weight.storage is not None
        gram = moments.gram
        wanted, given, mask = (
            kernel.to_matrices(x)
            for x in (target.finite_raw_value(), weight.value, weight.storage.mask_value())
        )
        found = refit(wanted, mask, gram) * mask
        errors[weight.path] = (
            relative_error(given, wanted, gram),
            relative_error(found, wanted, gram),
        )
        _set(weight, kernel.from_matrices(found).astype(np.float32))

    return solve


def _set(weight: PrunableWeight, value: np.ndarray) -> None:
    assert weight.storage is not None
    weight.storage.assign_raw(value)
    weight.storage.settle()
