"""Whether a model in another form has the kernels that it had, and computes what it did."""

import warnings
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import VariableOverrides, own_variables
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho._workers import digest_of
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import storages_of, walk
from keras_sparse_ortho.models._flops import from_zero_states, open_specs
from keras_sparse_ortho.models._rewrite import prunable_weights
from keras_sparse_ortho.parametrizations import LowRankSoftThreshold


class SameFunction:
    """What a model has and computes now, to be compared with what it is rewritten to.

    Compared are the effective kernels by path, to the bit, the number of all other weights, and
    outputs where it holds layers of others (see `Probe`); of products outputs alone.
    """

    def __init__(self, model: Any) -> None:
        self._name = getattr(model, "name", model)
        # A layer whose kernel is a product may become two layers.
        self._divided = tuple(
            f"{path}/"
            for layer, path in walk(model, "")
            if any(isinstance(own, LowRankSoftThreshold) for own in storages_of(layer).values())
        )
        self._kernels, self._others = self._weights_of(model)
        self._probe = Probe(model, always=bool(self._divided))

    def check(self, model: Any) -> None:
        """Raises NotPrunableError unless another form of the model is the same."""
        kernels, others = self._weights_of(model)
        paths = sorted(kernels.keys() | self._kernels.keys())
        wrong = [path for path in paths if kernels.get(path) != self._kernels.get(path)]
        if wrong or (others != self._others and not self._divided):
            raise NotPrunableError(
                f"The model '{self._name}' would not have the weights that it has. Received: "
                f"other values or none for {wrong}; {others} weights that are no kernels where "
                f"there were {self._others}"
            )
        self._probe.check(model)

    def _weights_of(self, model: Any) -> tuple[dict[str, str], int]:
        """Digests of kernels by path, and the number of weights that are not beside kernels."""
        kernels = {
            # Plus 0.0: a dropped entry may be -0.0 in one form, and 0.0 in another.
            weight.path: digest_of(weight.value + 0.0)
            for weight in prunable_weights(model, unregistered=True)
            if not weight.path.startswith(self._divided)
        }
        return kernels, len({id(variable) for variable in model.weights} - beside_kernels(model))


class Probe:
    """The outputs of a model for one sample, with other `values` of some variables if given.

    Nothing where its inputs are not known, or (but for `always`) where all layers are Keras'.
    """

    def __init__(
        self, model: Any, values: Iterable[tuple[Any, Any]] = (), *, always: bool = False
    ) -> None:
        self._name = getattr(model, "name", model)
        self._sample = _sample_for(model) if always or _is_of_others(model) else None
        self._outputs: list[np.ndarray] | None = None
        if self._sample is None:
            return
        try:
            found, again = (_outputs(model, self._sample, values) for _ in range(2))
        except Exception:  # of someone else's code, on inputs that it has not chosen
            return
        # Layers that draw random numbers in calls never give the same twice.
        if all(np.isfinite(o).all() for o in found) and all(map(np.array_equal, found, again)):
            self._outputs = found

    def check(self, model: Any) -> None:
        """Raises NotPrunableError if another model has other outputs."""
        if self._outputs is None:
            return
        # For another order of summation, as in live blocks and products.
        tolerance = 1e-3 if model.compute_dtype in ("float32", "float64") else 0.1
        for before, after in zip(self._outputs, _outputs(model, self._sample), strict=True):
            error = float(np.max(np.abs(after - before), initial=0.0))
            scale = float(np.max(np.abs(before), initial=1e-6))
            if not error <= tolerance * scale:
                raise NotPrunableError(
                    f"The model '{self._name}' would compute something else, though it has the "
                    "weights that it is to have: code in it depends on the class of a layer, or "
                    "uses a variable where Keras does not see it. Received: "
                    f"outputs of up to {scale:.3g} that differ by up to {error:.3g} for one sample"
                )


def probe_of_copy(model: Any, copy: Any) -> Probe:
    """What a model would compute with the effective kernels of a copy of it."""
    if not _is_of_others(model):
        return Probe(model)  # which compares nothing
    theirs = {weight.path: weight for weight in prunable_weights(copy, unregistered=True)}
    ours = prunable_weights(model, unregistered=True)
    found = ((weight.variable, theirs[weight.path].value) for weight in ours)  # one at a time
    return Probe(model, [(v, keras.ops.convert_to_tensor(value, v.dtype)) for v, value in found])


def beside_kernels(model: Any) -> set[int]:
    """The variables, by `id`, that stand beside kernels: masks, indices, thresholds."""
    found: set[int] = set()
    for layer, _ in walk(model, ""):
        found |= {id(v) for storage in storages_of(layer).values() for v in storage.support()}
        if hasattr(layer, "transparent_path"):
            found |= {id(variable) for variable in own_variables(layer)}
    return found


def _is_of_others(model: Any) -> bool:
    """Whether a model holds, or is of, a class that is neither Keras' nor ours."""
    known = ("keras", __name__.partition(".")[0])
    return any(
        type(layer).__module__.partition(".")[0] not in known for layer, _ in walk(model, "")
    )


def _sample_for(model: Any) -> Any:
    """Inputs of batch one, or `None` where it is not known what they are like."""
    specs = open_specs(model)
    rng = np.random.default_rng(0)

    def draw(spec: Any) -> Any:
        shape = (1, *(8 if size is None else size for size in spec.shape[1:]))
        # From [0, 1): it may be cast to an index, which is 0 then.
        return keras.ops.convert_to_tensor(rng.random(shape), dtype=spec.dtype)

    try:
        return None if specs is None else keras.tree.map_structure(draw, specs)
    except Exception:  # strings and the like
        return None


def _outputs(model: Any, sample: Any, values: Iterable[tuple[Any, Any]] = ()) -> list[np.ndarray]:
    # In a scope that takes all updates, so that no state of the model changes.
    with warnings.catch_warnings(), keras.StatelessScope(), VariableOverrides(values):
        warnings.simplefilter("ignore")
        with from_zero_states(model):
            outputs = keras.tree.flatten(model(sample, training=False))
    # A class that is changed may round its numbers, or find another largest one, elsewhere.
    return [to_numpy(o) for o in outputs if keras.backend.is_float_dtype(o.dtype)]
