"""Which rows calibrate a file and which it is compared on, and signs that they are the wrong ones.

A file agrees with Keras on the rows that calibrated it whatever they are. So others are compared.
Rows that are all scaled wrongly cannot be told by each other: there the model has to know better.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.export._model import Signature, all_layers, keras_outputs
from keras_sparse_ortho.models import prunable_weights

L = keras.layers
_FEW = 16  # rows
_PART, _MOST = 4, 32  # one row in four is held out, and at most 32
# Of variances: a forgotten or doubled division by 255 is a factor of 65,025.
_VARIANCES = 64
# Largest input, and spread of the outputs over rows, that a network is hardly trained for.
_SMALL, _LARGE, _SAME = 1 / 32, 32, 1 / 16


class Rows(NamedTuple):
    """What calibrates a file, if anything, what it is compared on, and where that comes from."""

    calibrating: list[np.ndarray] | None
    compared: list[np.ndarray]
    origin: str


def rows_of(
    signature: Signature,
    sample: list[np.ndarray] | None,
    representative: list[np.ndarray] | None,
    trained: bool,
    seed: int,
) -> Rows:
    """Rows to calibrate and to compare on, from the arguments of `export_litert`.

    Args:
        signature: The inputs.
        sample: Rows to compare on that the user chose.
        representative: The user's calibration rows; only compared on where ranges are `trained`.
        trained: Whether the model brings the ranges of its activations.
        seed: Of random rows.
    """
    calibrating = None if trained else representative
    if sample is not None:
        known = calibrating is not None and _bytes_of(sample) <= _bytes_of(calibrating)
        return Rows(calibrating, sample, f"sample{_KNOWN if known else ''}")
    if representative is None:
        return Rows(None, signature.random_sample(seed), "standard normal rows")
    count, batch = len(representative[0]), signature.batch_size
    few = [array[: signature.default_rows] for array in representative]
    if trained:
        return Rows(None, few, "representative_data")
    apart = min(count // _PART, _MOST)
    if count < _FEW or count - apart < batch:
        return Rows(representative, few, f"representative_data{_KNOWN}")
    chosen = np.zeros(count, bool)
    chosen[np.linspace(0, count - 1, apart).astype(int)] = True
    return Rows(
        [array[~chosen] for array in representative],
        [array[chosen] for array in representative],
        "rows held out of representative_data",
    )


_KNOWN = ", rows that calibrated the file"


def _bytes_of(arrays: list[np.ndarray]) -> set[tuple[bytes, ...]]:
    return {tuple(one.tobytes() for one in row) for row in zip(*arrays, strict=True)}


def doubts(model: keras.Model, signature: Signature, rows: list[np.ndarray]) -> list[str]:
    """Signs that calibration rows are not like the data that a model was trained on.

    They are few, or all equal, or the first layer that knows the variance of its inputs
    (BatchNormalization, Normalization) gets another one, by a factor of 64 and more. Without such a
    layer: what the first kernel gets is below 1/32 and the outputs vary by less than 1/16; or it is
    above 32 and the outputs vary by more than 32, or nearly all are 0 or 1. Networks are hardly
    trained for either. Smaller factors, and those of networks without biases, are not seen.
    """
    count = len(rows[0])
    found = []
    if count < _FEW:
        found.append(f"{count} row{'s are' if count > 1 else ' is'} few")
    if count > 1 and all(np.all(array == array[:1]) for array in rows):
        found.append("all rows are equal")
    elif count > 1:
        some = np.unique(np.linspace(0, count - 1, _MOST).astype(int))
        scale = _scale(model, signature, [array[some] for array in rows])
        found += [scale] if scale else []
    return found


def _scale(model: keras.Model, signature: Signature, rows: list[np.ndarray]) -> str | None:
    """What is wrong with the scale of rows, as far as the model tells."""
    kernels = {id(weight.owner) for weight in prunable_weights(model)}
    first: dict[str, list[tuple[Any, np.ndarray]]] = {}
    with contextlib.ExitStack() as stack:
        for layer in list(all_layers(model)):
            if (kind := "kernel" if id(layer) in kernels else _kind(layer)) is not None:
                stack.enter_context(_noted(layer, first.setdefault(kind, [])))
        _, outputs = keras_outputs(model, signature, rows)
    layer, parts = _first(first.get("statistics", []))
    if parts:
        seen, known = _variances(layer, np.concatenate(parts))
        ratio = float(np.median(seen / known)) if known.size else 1.0
        if 1 / _VARIANCES < ratio < _VARIANCES:
            return None
        return (
            f"the variance of the inputs of '{layer.name}' ({type(layer).__name__}) is "
            f"{ratio:.2g} times the one that it was trained with"
        )
    layer, parts = _first(first.get("kernel", []))
    largest = max((float(np.abs(part).max()) for part in parts), default=1.0)
    if isinstance(layer, L.Embedding) or _SMALL <= largest <= _LARGE:
        return None
    spread = max(float(np.sqrt(np.mean(np.var(one, axis=0)))) for one in outputs)
    ends = np.mean([np.mean(np.minimum(abs(one), abs(one - 1)) < 1e-6) for one in outputs])
    if largest < _SMALL and spread < _SAME:
        return (
            f"the inputs are at most {largest:.2g} at the first kernel, and the outputs hardly vary"
        )
    if largest > _LARGE and (spread > _LARGE or ends > 0.9):
        return f"the inputs are up to {largest:.3g} at the first kernel, and the outputs extreme"
    return None


@contextlib.contextmanager
def _noted(layer: Any, calls: list[tuple[Any, np.ndarray]]) -> Iterator[None]:
    """Inside, calls of a layer are noted with their first input."""
    call = layer.call

    def noting(*args: Any, **kwargs: Any) -> Any:
        if not calls or calls[0][0] is layer:
            with contextlib.suppress(Exception):  # a tracer, inside of a loop
                x = np.asarray(to_numpy(keras.tree.flatten((args, kwargs))[0]), np.float64)
                calls.append((layer, x))
        return call(*args, **kwargs)

    vars(layer)["call"] = noting  # Keras would track an attribute
    try:
        yield
    finally:
        del vars(layer)["call"]


def _first(calls: list[tuple[Any, np.ndarray]]) -> tuple[Any, list[np.ndarray]]:
    """The first layer that was called, and its inputs."""
    return (calls[0][0] if calls else None), [x for _, x in calls]


def _kind(layer: Any) -> str | None:
    """Whether a layer has statistics of the data that it was trained on."""
    if isinstance(layer, L.BatchNormalization) and layer.built:
        fresh = not to_numpy(layer.moving_mean).any() and (to_numpy(layer.moving_variance) == 1)
        return None if np.all(fresh) else "statistics"
    known = isinstance(layer, L.Normalization) and not layer.invert
    return "statistics" if known and getattr(layer, "variance", None) is not None else None


def _variances(layer: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The variance of each channel in `x` and in training, without those that were constant."""
    if isinstance(layer, L.BatchNormalization):
        shape = [1] * x.ndim
        shape[layer.axis] = -1
        known = np.reshape(to_numpy(layer.moving_variance), shape)
    else:
        known = np.asarray(to_numpy(layer.variance))
    axes = tuple(k for k in range(x.ndim) if known.shape[k] == 1)
    seen = x.var(axis=axes, keepdims=True)
    live = known > 1e-6 * known.max()
    return seen[live], known[live]
