"""The processes that train one model together: what they compute as one, and whether they agree.

A worker is a process of `MultiWorkerMirroredStrategy`, of JAX where `keras.distribution` spans
several, or of `torch.distributed`. Replicas within a process are none: they share its callbacks.
"""

from typing import Any

import keras

from keras_sparse_ortho._workers import _jax
from keras_sparse_ortho._workers._averaging import tensorflow_workers, torch_workers
from keras_sparse_ortho._workers._workers import Workers as Workers
from keras_sparse_ortho._workers._workers import digest_of as digest_of

__all__ = ["Workers", "check_layouts", "digest_of", "workers_of"]


def workers_of(model: Any = None) -> Workers:
    """The workers that train a model, or that would train one made now."""
    backend = keras.backend.backend()
    if backend == "jax":
        return _jax.jax_workers()
    if backend == "tensorflow":
        return tensorflow_workers(model)
    if backend == "torch":
        return torch_workers()
    return Workers()


def check_layouts() -> None:
    """Raises WorkerError on all workers where a `LayoutMap` of JAX is not the same on all."""
    if keras.backend.backend() == "jax":
        _jax.check_layouts()
