"""Workers of TensorFlow and torch: each has a gradient of its own, and these are averaged."""

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._workers._workers import Workers


class Averaging(Workers):
    """Workers that compute apart, and then reduce."""

    averages = True

    @abc.abstractmethod
    def _sum(self, array: np.ndarray) -> np.ndarray:
        """The sum over all workers."""

    def mean(self, arrays: Sequence[np.ndarray], samples: int) -> list[np.ndarray]:
        counts = self.gather(np.array([samples], np.int32))[:, 0]
        share = samples / int(counts.sum())
        # For equal counts and a power of two of workers this is exact.
        return [self._sum((array * share).astype(array.dtype)) for array in arrays]


def tensorflow_workers(model: Any) -> Workers:
    import tensorflow as tf

    strategy = getattr(model, "distribute_strategy", None) or tf.distribute.get_strategy()
    if not isinstance(
        strategy,
        tf.distribute.MultiWorkerMirroredStrategy
        | tf.distribute.experimental.MultiWorkerMirroredStrategy,
    ):
        return Workers()  # MirroredStrategy and its kin have one process
    own: list[int] = []

    def note(context: Any) -> Any:
        own.append(context.replica_id_in_sync_group)
        return tf.constant(0)

    strategy.experimental_distribute_values_from_function(note)
    count = strategy.num_replicas_in_sync // len(own)
    return Workers() if count == 1 else _TensorFlowWorkers(count, strategy, sorted(own))


class _TensorFlowWorkers(Averaging):
    def __init__(self, count: int, strategy: Any, replicas: list[int]) -> None:
        super().__init__(count, replicas[0] // len(replicas))
        self._strategy = strategy
        self._replicas = len(replicas)

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        found = self._strategy.gather(self._values(numbers[None]), axis=0)
        return np.asarray(found)[:: self._replicas]

    def _sum(self, array: np.ndarray) -> np.ndarray:
        values = self._values((array / self._replicas).astype(array.dtype))
        return np.asarray(self._strategy.reduce("SUM", values, axis=None))

    def _values(self, array: np.ndarray) -> Any:
        import tensorflow as tf

        return self._strategy.experimental_distribute_values_from_function(
            lambda _: tf.constant(array)
        )


def torch_workers() -> Workers:
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return Workers()
    count = distributed.get_world_size()
    return Workers() if count == 1 else _TorchWorkers(count, distributed.get_rank())


class _TorchWorkers(Averaging):
    def gather(self, numbers: np.ndarray) -> np.ndarray:
        import torch
        from torch import distributed

        own = self._tensor(numbers)
        found = [torch.empty_like(own) for _ in range(self.count)]
        distributed.all_gather(found, own)
        return np.stack([part.cpu().numpy() for part in found])

    def _sum(self, array: np.ndarray) -> np.ndarray:
        from torch import distributed

        total = self._tensor(array)
        distributed.all_reduce(total)
        return np.asarray(total.cpu().numpy())

    def _tensor(self, array: np.ndarray) -> Any:
        import torch
        from torch import distributed

        # NCCL sends what is on its devices, Gloo what is in memory.
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
        return torch.tensor(array, device=device)
