"""The processes that train one model: what they share, and whether they agree.

A worker is a process of `MultiWorkerMirroredStrategy`, of JAX where `keras.distribution` spans
several, or of `torch.distributed`; replicas within one process share its callbacks.
"""

import abc
import hashlib
import itertools
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import layout_entries
from keras_sparse_ortho._types import Nested, Tensor, TensorLike
from keras_sparse_ortho.errors import WorkerError

if TYPE_CHECKING:
    import tensorflow as tf

T = TypeVar("T")

Batch = Nested


def workers_of(model: keras.Model | None = None) -> "Workers":
    """The workers that train a model, or that would train one built now."""
    backend = keras.backend.backend()
    if backend == "jax":
        return _jax_workers()
    if backend == "tensorflow":
        return _tensorflow_workers(model)
    if backend == "torch":
        return _torch_workers()
    return Workers()


class Workers:
    """The processes of a training run, which must all call the same methods in one order."""

    def __init__(self, count: int = 1, rank: int = 0) -> None:
        self.count = count
        self.rank = rank

    def batch(self, batch: Batch) -> Batch:
        """The batch to compute a mean loss on; `mean` then gives that of all workers."""
        return batch

    def batches(self, batches: Sequence[Batch]) -> list[Batch]:
        return list(batches)

    def mean(
        self, arrays: Sequence[np.ndarray], samples: int
    ) -> list[np.ndarray]:
        """The mean of each array over all workers, weighted by their numbers of samples."""
        return list(arrays)

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        """The int32 vectors of all workers, which have equal lengths, as `(count, length)`."""
        return numbers[None]

    def gather_number(self, number: int) -> np.ndarray:
        """An integer of each worker, `(count,)`."""
        return self.gather(np.array([number], np.int32))[:, 0]

    def gather_text(self, text: str) -> list[str]:
        """The texts of all workers."""
        data = np.frombuffer(text.encode(), np.uint8)
        lengths = self.gather_number(data.size)
        padded = np.zeros(int(lengths.max()), np.int32)
        padded[: data.size] = data
        texts = []
        for row, length in zip(self.gather(padded), lengths, strict=True):
            encoded = bytes(row[:length].astype(np.uint8))
            texts.append(encoded.decode())
        return texts

    def together(self, action: Callable[[], T]) -> T:
        """Calls a function on every worker; if it fails on one, the others raise a WorkerError."""
        if self.count == 1:
            return action()
        error: Exception | None = None
        try:
            result = action()
        except Exception as raised:
            error = raised
        if not self.gather_number(error is not None).any():
            return result
        message = ""
        if error is not None:
            message = f"{type(error).__name__}: {error}"
        messages = self.gather_text(message)
        if error is not None:
            raise error
        failed = next(rank for rank, message in enumerate(messages) if message)
        raise WorkerError(
            f"Worker {failed} of {self.count} has failed, so this one stops as well. "
            f"Received: {messages[failed]}"
        )

    def compare(self, when: str, facts: Mapping[str, str]) -> None:
        """Raises WorkerError on every worker unless all have the same facts, digests by name."""
        if self.count == 1:
            return
        text = json.dumps(dict(facts))
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        marks = self.gather(np.frombuffer(digest, np.int32))
        if (marks == marks[0]).all():
            return
        by_worker = [
            json.loads(text_of_worker)
            for text_of_worker in self.gather_text(text)
        ]
        differences: dict[str, list[str | None]] = {}
        for name in dict.fromkeys(
            name for facts in by_worker for name in facts
        ):
            values = [facts.get(name) for facts in by_worker]
            if len(set(values)) > 1:
                differences[name] = values
        first_three = dict(list(differences.items())[:3])
        raise WorkerError(
            f"Workers that train one model must agree, and differ {when}: give them the same "
            "model, seeds, callbacks and, where masks depend on data, the gradients of all data. "
            f"Received: {len(differences)} differences, by worker {first_three}"
        )


def digest_of(*arrays: np.ndarray) -> str:
    """A digest of the shapes, dtypes and bits of arrays."""
    state = hashlib.blake2b(digest_size=8)
    for array in arrays:
        state.update(f"{array.shape}{array.dtype}".encode())
        state.update(
            np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        )
    return state.hexdigest()


class AveragingWorkers(Workers):
    """Workers of TensorFlow and torch: each has its own gradient, and these are averaged."""

    @abc.abstractmethod
    def _sum(self, array: np.ndarray) -> np.ndarray:
        """The sum over all workers."""

    def mean(
        self, arrays: Sequence[np.ndarray], samples: int
    ) -> list[np.ndarray]:
        counts = self.gather_number(samples)
        share = samples / int(counts.sum())
        # Exact for equal counts and a power of two of workers.
        return [
            self._sum((array * share).astype(array.dtype)) for array in arrays
        ]


def _tensorflow_workers(model: keras.Model | None) -> Workers:
    """The processes of a distribution strategy of TensorFlow."""
    import tensorflow as tf

    strategy = (
        getattr(model, "distribute_strategy", None)
        or tf.distribute.get_strategy()
    )
    if not isinstance(
        strategy,
        tf.distribute.MultiWorkerMirroredStrategy
        | tf.distribute.experimental.MultiWorkerMirroredStrategy,
    ):
        return Workers()  # MirroredStrategy and the like have one process
    replica_ids: list[int] = []  # of this process

    def note(context: tf.distribute.ReplicaContext) -> Tensor:
        replica_ids.append(context.replica_id_in_sync_group)
        return tf.constant(0)

    strategy.experimental_distribute_values_from_function(note)
    count = strategy.num_replicas_in_sync // len(replica_ids)
    if count == 1:
        return Workers()
    return _TensorFlowWorkers(count, strategy, sorted(replica_ids))


class _TensorFlowWorkers(AveragingWorkers):
    def __init__(
        self,
        count: int,
        strategy: "tf.distribute.Strategy",
        replica_ids: list[int],
    ) -> None:
        super().__init__(count, replica_ids[0] // len(replica_ids))
        self._strategy = strategy
        self._replicas = len(replica_ids)

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        by_replica = self._strategy.gather(self._values(numbers[None]), axis=0)
        return np.asarray(by_replica)[:: self._replicas]

    def _sum(self, array: np.ndarray) -> np.ndarray:
        share = array / self._replicas
        values = self._values(share.astype(array.dtype))
        return np.asarray(self._strategy.reduce("SUM", values, axis=None))

    def _values(self, array: np.ndarray) -> Tensor:
        """The array on all replicas of this process."""
        import tensorflow as tf

        return self._strategy.experimental_distribute_values_from_function(
            lambda _: tf.constant(array)
        )


def _torch_workers() -> Workers:
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return Workers()
    count = distributed.get_world_size()
    if count == 1:
        return Workers()
    return _TorchWorkers(count, distributed.get_rank())


class _TorchWorkers(AveragingWorkers):
    def gather(self, numbers: np.ndarray) -> np.ndarray:
        import torch
        from torch import distributed

        tensor = self._tensor(numbers)
        gathered = [torch.empty_like(tensor) for _ in range(self.count)]
        distributed.all_gather(gathered, tensor)
        return np.stack(
            [tensor_of_worker.cpu().numpy() for tensor_of_worker in gathered]
        )

    def _sum(self, array: np.ndarray) -> np.ndarray:
        from torch import distributed

        total = self._tensor(array)
        distributed.all_reduce(total)
        return np.asarray(total.cpu().numpy())

    def _tensor(self, array: np.ndarray) -> Tensor:
        """The array where the backend of `torch.distributed` sends from."""
        import torch
        from torch import distributed

        device = "cpu"
        if distributed.get_backend() == "nccl":  # Gloo sends from host memory
            device = "cuda"
        return torch.tensor(array, device=device)


def _jax_workers() -> Workers:
    distribution = keras.distribution.distribution()
    if distribution is None:
        return Workers()
    import jax

    devices = distribution.device_mesh.backend_mesh.devices.flat
    if len({device.process_index for device in devices}) == 1:
        return Workers()
    return _JaxWorkers(jax.process_count(), jax.process_index(), distribution)


_checked_distributions: "weakref.WeakSet[keras.distribution.Distribution]" = (
    weakref.WeakSet()
)


def check_layouts() -> None:
    """Raises WorkerError unless all JAX workers have one `LayoutMap`; compared once.

    Else a worker would wait forever for the first weight that is read.
    """
    if keras.backend.backend() != "jax":
        return
    distribution = keras.distribution.distribution()
    if distribution is not None and distribution not in _checked_distributions:
        _jax_workers().compare(
            "in the layouts of variables", layout_entries(distribution)
        )
        _checked_distributions.add(distribution)


class _JaxWorkers(Workers):
    """Each worker has the gradient of the global batch, which `batch` assembles."""

    def __init__(
        self,
        count: int,
        rank: int,
        distribution: "keras.distribution.Distribution",
    ) -> None:
        super().__init__(count, rank)
        self._distribution = distribution

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(numbers))

    def batches(self, batches: Sequence[Batch]) -> list[Batch]:
        counts = self.gather_number(len(batches)).tolist()
        if len(set(counts)) > 1:
            raise WorkerError(
                "On JAX all workers compute on their batches together, so all need the same "
                f"number of batches. Received: {counts} batches"
            )
        return [self.batch(batch) for batch in batches]

    def batch(self, batch: Batch) -> Batch:
        """The global batch; a batch that is the same on all workers counts once."""
        batch = _map(_as_in_fit, batch)
        leaves = [
            leaf for leaf in keras.tree.flatten(batch) if leaf is not None
        ]
        digest = np.frombuffer(bytes.fromhex(digest_of(*leaves)), np.int32)
        digests = self.gather(digest)
        inputs = keras.tree.flatten(batch[0])
        sample_counts = self.gather_number(int(inputs[0].shape[0])).tolist()
        has_one_count = len(set(sample_counts)) == 1
        if has_one_count and (digests == digests[0]).all():
            return _map(self._replicated, batch)
        if not has_one_count:
            raise WorkerError(
                "On JAX the batches of all workers form one global batch, so all need the same "
                f"number of samples. Received: {sample_counts} samples"
            )
        self._check_shards(digests)
        return _map(self._sharded, batch)

    def _check_shards(self, digests: np.ndarray) -> None:
        """Raises unless workers with shards of one replica of the model have the same batch."""
        layout = self._distribution.get_data_layout((1,)).backend_layout
        places = layout.mesh.shape[self._distribution.batch_dim_name]
        rows: dict[int, set[int]] = {}
        for device, index in layout.devices_indices_map((places,)).items():
            rows.setdefault(device.process_index, set()).add(
                index[0].start or 0
            )
        shards = [frozenset(rows[process]) for process in sorted(rows)]
        for earlier, worker in itertools.combinations(range(len(shards)), 2):
            differ = bool((digests[worker] != digests[earlier]).any())
            if differ and shards[worker] & shards[earlier]:
                raise WorkerError(
                    f"Workers {earlier} and {worker} hold shards of one replica of the model, so "
                    "they must be given the same batches. Received: different samples"
                )

    def _sharded(self, leaf: np.ndarray) -> Tensor:
        import jax

        layout = self._distribution.get_data_layout(leaf.shape).backend_layout
        return jax.make_array_from_process_local_data(layout, leaf)

    def _replicated(self, leaf: np.ndarray) -> Tensor:
        import jax

        layout = self._distribution.get_data_layout(leaf.shape).backend_layout
        devices = layout.mesh.shape[self._distribution.batch_dim_name]
        if leaf.shape[0] % devices:
            layout = jax.sharding.NamedSharding(
                layout.mesh, jax.sharding.PartitionSpec()
            )
        return jax.make_array_from_callback(
            leaf.shape, layout, lambda index: leaf[index]
        )


def _map(function: Callable[[Any], Any], batch: Batch) -> Batch:
    """Calls a function on all arrays of a batch; `None` stays."""

    def on_leaf(leaf: Any) -> Any:
        if leaf is None:
            return None
        return function(leaf)

    return keras.tree.map_structure(on_leaf, batch)


def _as_in_fit(leaf: TensorLike) -> np.ndarray:
    """An array of a batch, floats in Keras' default dtype."""
    array = np.asarray(leaf)
    if np.issubdtype(array.dtype, np.floating):
        return array.astype(keras.config.floatx())
    return array
