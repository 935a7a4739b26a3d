"""Digests of what workers that train one model must have in common."""

import json
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import layout_of
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho._workers import digest_of
from keras_sparse_ortho.models._prunable_weights import prunable_weights
from keras_sparse_ortho.parametrizations import LearntThreshold, Parametrization


def structure_facts(model: Any) -> dict[str, str]:
    """Variables and their layouts, kernels and parametrizations of a model, by name.

    To be compared before any value is read, which on JAX takes all workers.
    """
    weights = prunable_weights(model)
    facts = {"paths of kernels": ", ".join(weight.path for weight in weights)}
    for weight in weights:
        own = weight.parametrization
        if isinstance(own, Parametrization):
            config = json.dumps(own.get_config(), default=str)
            facts[f"parametrization of {weight.path}"] = f"{type(own).__name__} {config}"
    for number, variable in enumerate(model.weights):
        layout = getattr(layout_of(variable), "spec", "")
        facts[_name(number, variable)] = f"{variable.dtype}{tuple(variable.shape)} {layout}"
    return facts


def value_facts(model: Any) -> dict[str, str]:
    """Masks and trained values of a model, by name.

    On JAX, where one program runs on all workers, all other values as well, such as the states of
    seed generators. Elsewhere each worker may have its own moving averages and dropout.
    """
    on_jax = keras.backend.backend() == "jax"
    facts = {
        _name(number, variable): digest_of(to_numpy(variable))
        for number, variable in enumerate(model.variables if on_jax else model.weights)
        if on_jax or variable.trainable
    }
    return {**facts, **mask_facts(model)}


def _name(number: int, variable: Any) -> str:
    return f"variable {number}, {variable.name}"


def mask_facts(model: Any) -> dict[str, str]:
    """Which entries are live, and what decides it, for each kernel."""
    facts = {}
    for weight in prunable_weights(model):
        own = weight.storage
        if own is None:
            continue
        facts[weight.path] = digest_of(np.packbits(own.mask_value()))
        if isinstance(own, LearntThreshold):
            facts[f"{weight.path}, threshold"] = digest_of(own.threshold_value())
    return facts
