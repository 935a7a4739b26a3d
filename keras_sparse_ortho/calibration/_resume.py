"""Kernels that an interrupted `prune(resume=)` has solved, in a file each."""

import contextlib
import io
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._files import atomic_write_bytes, check_archive
from keras_sparse_ortho._keras_internals import from_zero_states
from keras_sparse_ortho._values import digest_of, to_numpy, without_gradients
from keras_sparse_ortho.initializers import PackedDraw
from keras_sparse_ortho.kernels import PrunableWeight

_SOLVER = 7  # files of a run that goes on are those of this version
_SAME = 1e-3  # on GPUs, outputs of one function differ by less from run to run


class SavedKernels:
    """A file for each finished kernel, named by a digest of all that it depends on.

    The digest has the recipe, the data, the weights and the configuration of the model. The code
    of a custom layer is in none of these, but it shows in the outputs for the first batch. Outputs
    may differ a little from run to run, so each file has them, and they are compared.

    Args:
        folder: path. Where the files are.
        model: Model with the values that it has before it is pruned.
        batches: list. Calibration data.
        settings: str. How the kernels are solved.
        arrays: dict. Masks and scores that were given.
    """

    def __init__(
        self,
        folder: str | pathlib.Path,
        model: Any,
        batches: Sequence[Any],
        settings: str,
        arrays: Mapping[str, np.ndarray],
    ) -> None:
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        texts = [str(_SOLVER), settings, configuration_of(model), *arrays]
        variables = [*model.weights, *keras.tree.flatten(batches)]
        values = (to_numpy(variable, copy=False) for variable in variables)
        self._key = digest_of(*map(_as_bytes, texts), *arrays.values(), *values)
        self._outputs = _outputs_in_short(model, batches[0])

    def path(self, weight: PrunableWeight) -> pathlib.Path:
        """The file of a kernel."""
        return (
            self._folder
            / f"{self._key}-{digest_of(_as_bytes(weight.path))}.npz"
        )

    def has(self, weight: PrunableWeight) -> bool:
        """Whether there is a file of this kernel, solved in a model with the same outputs."""
        if not self.path(weight).exists():
            return False
        with self._reading(weight) as arrays:
            outputs = arrays["outputs"]
        if outputs.shape != self._outputs.shape:
            return False
        scale = np.abs(self._outputs).max(axis=1, keepdims=True)
        return bool(np.all(np.abs(outputs - self._outputs) <= _SAME * scale))

    def load(self, weight: PrunableWeight) -> tuple[np.ndarray, np.ndarray]:
        """Values and mask of a kernel that was solved before."""
        with self._reading(weight) as arrays:
            draw = PackedDraw(
                arrays["bits"],
                arrays["values"],
                weight.shape,
                0,
                None,
            )
            kernel, mask = draw.kernel, draw.mask
            if not np.isfinite(kernel).all():
                raise ValueError("values that are not finite")
        return kernel, mask

    def save(
        self,
        weight: PrunableWeight,
        value: np.ndarray,
        mask: np.ndarray,
    ) -> None:
        """Writes the file of a kernel."""
        draw = PackedDraw.of(
            value.astype(weight.raw_value(copy=False).dtype), mask, None
        )
        stream = io.BytesIO()
        np.savez(
            stream,
            bits=draw.bits,
            values=draw.values,
            outputs=self._outputs,
        )
        atomic_write_bytes(self.path(weight), stream.getvalue())

    @contextlib.contextmanager
    def _reading(self, weight: PrunableWeight) -> Iterator[Any]:
        """The arrays of a kernel's file; ValueError that names it if they cannot be read."""
        path = self.path(weight)
        try:
            check_archive(path)
            with np.load(path) as arrays:
                yield arrays
        # Any: NumPy's readers of a damaged file raise all kinds.
        except Exception as error:
            raise ValueError(
                f"`resume` goes on from files of an earlier run. Delete this one: {weight.path!r} "
                f"is then solved again. Received: {str(path)!r}, {type(error).__name__}: {error}"
            ) from None


def configuration_of(model: Any) -> str:
    """Returns the classes and settings of a model's layers as text.

    Automatic names end in a number that depends on earlier models, and compilation does not
    change the outputs: both are left out. A model without a configuration is its class alone.
    """
    try:
        config = keras.saving.serialize_keras_object(model)
        text = json.dumps(
            _without(config, "compile_config"), sort_keys=True, default=_kind
        )
    except Exception:  # any: the class may be a user's
        return f"{type(model).__module__}.{type(model).__qualname__}"
    return re.sub(r'_\d+(?=")', "", text)


def _kind(value: Any) -> str:
    """The class of an object that JSON lacks; its text may hold an address."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _without(
    config: Any,
    key: str,
) -> Any:
    """A configuration without a key at any depth."""
    if isinstance(config, dict):
        return {
            name: _without(value, key)
            for name, value in config.items()
            if name != key
        }
    if isinstance(config, list | tuple):
        return [_without(value, key) for value in config]
    return config


def _outputs_in_short(
    model: Any,
    batch: Any,
) -> np.ndarray:
    """Three means of each output for a batch: other functions hardly have the same ones."""
    with from_zero_states(model), without_gradients():
        outputs = keras.tree.flatten(model(batch, training=False))
    means = []
    for output in outputs:
        values = to_numpy(output, copy=False).astype(np.float64).ravel()
        order = np.cos(np.arange(values.size))
        means.append(
            [np.abs(values).mean(), values.mean(), (order * values).mean()]
        )
    return np.array(means)


def _as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)
