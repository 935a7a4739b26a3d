"""Whether a changed model has the kernels and outputs of the given one."""

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import (
    VariableOverrides,
    from_zero_states,
    own_variables,
)
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho._workers import digest_of
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import is_wrapper, storages_of, walk
from keras_sparse_ortho.models._flops import open_specs
from keras_sparse_ortho.models._prunable_weights import prunable_weights
from keras_sparse_ortho.parametrizations import LowRankSoftThreshold

VariableValues = Iterable[tuple[keras.Variable, "keras.KerasTensor"]]

_UNKNOWN_SIZE = 8  # of a dimension that the inputs leave open
# Live blocks and products sum in another order than dense kernels.
_TOLERANCE = 1e-3
_TOLERANCE_16_BIT = 0.1


class SameFunction:
    """Effective kernels of a model, to the bit, number of other weights, and outputs (`Probe`)."""

    def __init__(self, model: keras.Model) -> None:
        self._name = getattr(model, "name", model)
        # A layer whose kernel is a product may become two layers: only outputs are compared.
        self._divided_paths = tuple(
            f"{path}/"
            for layer, path in walk(model, "")
            if any(
                isinstance(own, LowRankSoftThreshold)
                for own in storages_of(layer).values()
            )
        )
        self._digests = self._kernel_digests(model)
        self._other_count = _count_of_others(model)
        self._probe = Probe(model, always=bool(self._divided_paths))

    def check(self, model: keras.Model) -> None:
        """Raises NotPrunableError for a model with other kernels, weights or outputs."""
        digests = self._kernel_digests(model)
        other_count = _count_of_others(model)
        paths = sorted(digests.keys() | self._digests.keys())
        wrong_paths = [
            path
            for path in paths
            if digests.get(path) != self._digests.get(path)
        ]
        has_other_count = (
            other_count != self._other_count and not self._divided_paths
        )
        if wrong_paths or has_other_count:
            raise NotPrunableError(
                f"The model {self._name!r} would not keep all of its weights. Received: other "
                f"values or none for {wrong_paths}; {other_count} weights besides kernels, not "
                f"{self._other_count}"
            )
        self._probe.check(model)

    def _kernel_digests(self, model: keras.Model) -> dict[str, str]:
        return {
            # Plus 0.0: a dropped entry may be -0.0 in one form, and 0.0 in another.
            weight.path: digest_of(weight.value + 0.0)
            for weight in prunable_weights(model, unregistered=True)
            if not weight.path.startswith(self._divided_paths)
        }


def _count_of_others(model: keras.Model) -> int:
    """The number of weights that are not masks, indices or thresholds beside kernels."""
    beside_kernels: set[int] = set()
    for layer, _ in walk(model, ""):
        for storage in storages_of(layer).values():
            beside_kernels |= {id(variable) for variable in storage.support()}
        if is_wrapper(layer):
            beside_kernels |= {
                id(variable) for variable in own_variables(layer)
            }
    return len({id(variable) for variable in model.weights} - beside_kernels)


class Probe:
    """The outputs of a model for one sample, to be compared with those of a changed model.

    Nothing is compared where all layers are Keras' or ours, or where the inputs are unknown.

    Args:
        model: Model before it changes.
        values: Pairs of variables and tensors that they have in the probe.
        always: bool. Whether to compare models of Keras' layers, too.
    """

    def __init__(
        self,
        model: keras.Model,
        values: VariableValues = (),
        *,
        always: bool = False,
    ) -> None:
        self._name = getattr(model, "name", model)
        self._sample = None
        self._outputs: list[np.ndarray] | None = None
        if always or _has_foreign_layers(model):
            self._sample = _sample_for(model)
        if self._sample is None:
            return
        values = list(values)
        try:
            outputs = _outputs(model, self._sample, values)
            repeated_outputs = _outputs(model, self._sample, values)
        # of someone else's code, on inputs that it has not chosen
        except Exception:
            return
        # Layers that draw random numbers in calls never give the same twice.
        is_repeatable = all(map(np.array_equal, outputs, repeated_outputs))
        if is_repeatable and all(
            np.isfinite(output).all() for output in outputs
        ):
            self._outputs = outputs

    def check(self, model: keras.Model) -> None:
        """Raises NotPrunableError for a model with other outputs."""
        if self._outputs is None:
            return
        dtypes = {layer.compute_dtype for layer, _ in walk(model, "")}
        has_full_precision = dtypes <= {"float32", "float64"}
        tolerance = _TOLERANCE if has_full_precision else _TOLERANCE_16_BIT
        for before, after in zip(
            self._outputs, _outputs(model, self._sample), strict=True
        ):
            error = float(np.max(np.abs(after - before), initial=0.0))
            scale = float(np.max(np.abs(before), initial=1e-6))
            if not error <= tolerance * scale:
                raise NotPrunableError(
                    f"The model {self._name!r} would compute something else, although its weights "
                    "are correct: its code depends on the class of a layer, or uses a variable "
                    f"where Keras does not see it. Received: outputs of up to {scale:.3g} that "
                    f"differ by up to {error:.3g} for one sample"
                )


def probe_of_copy(model: keras.Model, model_copy: keras.Model) -> Probe:
    """The outputs that a model would have with the effective kernels of a copy of it."""
    if not _has_foreign_layers(model):
        return Probe(model)  # which compares nothing
    new_weights = {
        weight.path: weight
        for weight in prunable_weights(model_copy, unregistered=True)
    }
    values = []
    for weight in prunable_weights(model, unregistered=True):
        variable = weight.variable
        kernel = keras.ops.convert_to_tensor(
            new_weights[weight.path].value, variable.dtype
        )
        values.append((variable, kernel))
    return Probe(model, values)


def _has_foreign_layers(model: keras.Model) -> bool:
    """Whether a model holds, or is of, a class that is neither Keras' nor ours."""
    packages = {
        type(layer).__module__.partition(".")[0] for layer, _ in walk(model, "")
    }
    return not packages <= {"keras", __name__.partition(".")[0]}


def _sample_for(model: keras.Model) -> Any | None:
    """Inputs of batch one, or `None` where it is not known what they are like."""
    specs = open_specs(model)
    if specs is None:
        return None
    rng = np.random.default_rng(0)

    def draw(spec: keras.KerasTensor) -> keras.KerasTensor:
        sizes = (
            _UNKNOWN_SIZE if size is None else size for size in spec.shape[1:]
        )
        # From [0, 1): it may be cast to an index, which is 0 then.
        return keras.ops.convert_to_tensor(
            rng.random((1, *sizes)), dtype=spec.dtype
        )

    try:
        return keras.tree.map_structure(draw, specs)
    except Exception:  # strings and the like
        return None


def _outputs(
    model: keras.Model, sample: Any, values: VariableValues = ()
) -> list[np.ndarray]:
    """The floating-point outputs for a sample; no state of the model changes."""
    with (
        keras.StatelessScope(),
        VariableOverrides(values),
        from_zero_states(model),
    ):
        outputs = keras.tree.flatten(model(sample, training=False))
    # A class that is changed may round its integers, or find another largest one, elsewhere.
    return [
        to_numpy(output)
        for output in outputs
        if keras.backend.is_float_dtype(output.dtype)
    ]
