"""Weights and batches over devices and processes: reading, writing, whether processes agree.

A worker is a process of `MultiWorkerMirroredStrategy`, of JAX where `keras.distribution` spans
several, or of `torch.distributed`; replicas within one process share its callbacks.
"""

import abc
import contextlib
import hashlib
import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import awaits_value, give_value, layout_entries, layout_of
from keras_sparse_ortho.errors import WorkerError

T = TypeVar("T")


def to_numpy(value: Any, *, copy: bool = True) -> np.ndarray:
    """A tensor or variable of the backend as a NumPy array, bfloat16 as float32."""
    # JAX gathers what is sharded over processes: all must call this, in one order. Without `copy`
    # it may be the tensor's memory: do not change or keep it.
    value = keras.ops.convert_to_tensor(value)
    if keras.backend.standardize_dtype(value.dtype) == "bfloat16":
        value = keras.ops.cast(value, "float32")  # torch cannot convert it
    if keras.backend.backend() == "jax":
        import jax

        if isinstance(value, jax.core.Tracer):
            raise ValueError(
                "A weight's values are needed while JAX traces the model, where it has none: build "
                "the model first, with a keras.Input or model.build(shape). "
                f"Received: a tracer of shape {value.shape}"
            )
        if not (value.is_fully_addressable or value.is_fully_replicated):
            from jax.experimental import multihost_utils

            return np.array(multihost_utils.process_allgather(value, tiled=True))
    if copy:
        return keras.ops.convert_to_numpy(value)
    return np.asarray(value.detach().cpu() if keras.backend.backend() == "torch" else value)


def without_gradients() -> contextlib.AbstractContextManager[Any]:
    """Inside, no graph of gradients is kept, as TensorFlow and JAX keep none by themselves."""
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


def is_traced(value: Any) -> bool:
    """Whether a tensor has no values yet, because a function is being compiled or mapped."""
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        return isinstance(value, jax.core.Tracer)
    return backend == "tensorflow" and not hasattr(value, "numpy")


def assign(variable: Any, value: Any) -> None:
    """Sets a variable to an array, number or tensor of its shape; its layout does not change."""
    waits = awaits_value(variable)
    on_devices = isinstance(value, keras.Variable) or keras.ops.is_tensor(value)
    if layout_of(variable) is not None and not on_devices:
        value = placed(np.asarray(value), variable)
    if waits:
        give_value(variable, value)
    else:
        variable.assign(value)


def placed(array: Any, like: Any) -> Any:
    """An array as a tensor of a variable's dtype (or bool) and device layout."""
    # JAX' devices take their shards of it. Processes with other arrays all raise a WorkerError.
    if keras.ops.is_tensor(array):
        return array
    dtype = "bool" if array.dtype == bool else like.dtype
    layout = layout_of(like)
    if layout is None and array.size > 1 and not any(array.strides):  # a broadcast number
        return keras.ops.full(array.shape, array.flat[0].item(), dtype=dtype)
    if layout is None:
        return keras.ops.convert_to_tensor(array, dtype=dtype)
    import jax

    array = array.astype(jax.numpy.dtype(dtype), copy=False)
    if not layout.is_fully_addressable:
        _jax_workers().compare("in the values of a weight", {like.path: digest_of(array)})
    return jax.make_array_from_callback(array.shape, layout, lambda index: array[index])


def workers_of(model: Any = None) -> "Workers":
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

    def batch(self, batch: Any) -> Any:
        """The batch to compute a mean loss on; `mean` then gives that of all workers."""
        return batch

    def batches(self, batches: Sequence[Any]) -> list[Any]:
        return list(batches)

    def mean(self, arrays: Sequence[np.ndarray], samples: int) -> list[np.ndarray]:
        """The mean of each array over all workers, weighted by their numbers of samples."""
        return list(arrays)

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        """The int32 vectors of all workers, which have equal lengths, as `(count, length)`."""
        return numbers[None]

    def gather_text(self, text: str) -> list[str]:
        data = np.frombuffer(text.encode(), np.uint8)
        lengths = self.gather(np.array([data.size], np.int32))[:, 0]
        padded = np.zeros(int(lengths.max()), np.int32)
        padded[: data.size] = data
        pairs = zip(self.gather(padded), lengths, strict=True)
        return [bytes(row[:length].astype(np.uint8)).decode() for row, length in pairs]

    def together(self, action: Callable[[], T]) -> T:
        """Calls a function on every worker; if it fails on one, the others raise a WorkerError."""
        if self.count == 1:
            return action()
        error: Exception | None = None
        try:
            result = action()
        except Exception as raised:
            error = raised
        if not self.gather(np.array([error is not None], np.int32)).any():
            return result
        messages = self.gather_text("" if error is None else f"{type(error).__name__}: {error}")
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
        by_worker = [json.loads(other) for other in self.gather_text(text)]
        names = dict.fromkeys(name for facts in by_worker for name in facts)
        wrong = [name for name in names if len({facts.get(name) for facts in by_worker}) > 1]
        found = {name: [facts.get(name) for facts in by_worker] for name in wrong[:3]}
        raise WorkerError(
            f"Workers that train one model must agree, and differ {when}: give them the same "
            "model, seeds, callbacks and, where masks depend on data, the gradients of all data. "
            f"Received: {len(wrong)} differences, by worker {found}"
        )


def digest_of(*arrays: np.ndarray) -> str:
    """A digest of the shapes, dtypes and bits of arrays."""
    state = hashlib.blake2b(digest_size=8)
    for array in arrays:
        state.update(f"{array.shape}{array.dtype}".encode())
        state.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return state.hexdigest()


class AveragingWorkers(Workers):
    """Workers of TensorFlow and torch: each has its own gradient, and these are averaged."""

    @abc.abstractmethod
    def _sum(self, array: np.ndarray) -> np.ndarray:
        """The sum over all workers."""

    def mean(self, arrays: Sequence[np.ndarray], samples: int) -> list[np.ndarray]:
        counts = self.gather(np.array([samples], np.int32))[:, 0]
        share = samples / int(counts.sum())
        # Exact for equal counts and a power of two of workers.
        return [self._sum((array * share).astype(array.dtype)) for array in arrays]


def _tensorflow_workers(model: Any) -> Workers:
    import tensorflow as tf

    strategy = getattr(model, "distribute_strategy", None) or tf.distribute.get_strategy()
    if not isinstance(
        strategy,
        tf.distribute.MultiWorkerMirroredStrategy
        | tf.distribute.experimental.MultiWorkerMirroredStrategy,
    ):
        return Workers()  # MirroredStrategy and the like have one process
    own: list[int] = []

    def note(context: Any) -> Any:
        own.append(context.replica_id_in_sync_group)
        return tf.constant(0)

    strategy.experimental_distribute_values_from_function(note)
    count = strategy.num_replicas_in_sync // len(own)
    return Workers() if count == 1 else _TensorFlowWorkers(count, strategy, sorted(own))


class _TensorFlowWorkers(AveragingWorkers):
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


def _torch_workers() -> Workers:
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return Workers()
    count = distributed.get_world_size()
    return Workers() if count == 1 else _TorchWorkers(count, distributed.get_rank())


class _TorchWorkers(AveragingWorkers):
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

        # NCCL sends from the device, Gloo from host memory.
        device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
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


_checked: "weakref.WeakSet[Any]" = weakref.WeakSet()


def check_layouts() -> None:
    """Raises WorkerError unless all JAX workers have one `LayoutMap`; compared once."""
    # Else a worker would wait forever for the first weight that is read.
    if keras.backend.backend() != "jax":
        return
    distribution = keras.distribution.distribution()
    if distribution is not None and distribution not in _checked:
        _jax_workers().compare("in the layouts of variables", layout_entries(distribution))
        _checked.add(distribution)


class _JaxWorkers(Workers):
    """Each worker has the gradient of the global batch, which `batch` assembles."""

    def __init__(self, count: int, rank: int, distribution: Any) -> None:
        super().__init__(count, rank)
        self._distribution = distribution

    def gather(self, numbers: np.ndarray) -> np.ndarray:
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.process_allgather(numbers))

    def batches(self, batches: Sequence[Any]) -> list[Any]:
        counts = self.gather(np.array([len(batches)], np.int32))[:, 0].tolist()
        if len(set(counts)) > 1:
            raise WorkerError(
                "On JAX all workers compute on their batches together, so all need the same "
                f"number of batches. Received: {counts} batches"
            )
        return [self.batch(batch) for batch in batches]

    def batch(self, batch: Any) -> Any:
        """The global batch; a batch that is the same on all workers counts once."""
        batch = _map(_as_in_fit, batch)
        leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
        mark = np.frombuffer(bytes.fromhex(digest_of(*leaves)), np.int32)
        rows = int(keras.tree.flatten(batch[0])[0].shape[0])
        known = self.gather(np.concatenate([mark, np.array([rows], np.int32)]))
        if (known == known[0]).all():
            return _map(self._replicated, batch)
        if len(set(known[:, -1].tolist())) > 1:
            raise WorkerError(
                "On JAX the batches of all workers form one global batch, so all need the same "
                f"number of samples. Received: {known[:, -1].tolist()} samples"
            )
        self._check_shards(known)
        return _map(self._sharded, batch)

    def _check_shards(self, known: np.ndarray) -> None:
        """Raises unless workers with shards of one replica of the model have the same batch."""
        layout = self._distribution.get_data_layout((1,)).backend_layout
        places = layout.mesh.shape[self._distribution.batch_dim_name]
        rows: dict[int, set[int]] = {}
        for device, index in layout.devices_indices_map((places,)).items():
            rows.setdefault(device.process_index, set()).add(index[0].start or 0)
        shards = [frozenset(rows[process]) for process in sorted(rows)]
        for one, mine in enumerate(shards):
            for other in range(one):
                if mine & shards[other] and (known[one] != known[other]).any():
                    raise WorkerError(
                        f"Workers {other} and {one} hold shards of one replica of the model, so "
                        "they must be given the same batches. Received: different samples"
                    )

    def _sharded(self, leaf: Any) -> Any:
        import jax

        layout = self._distribution.get_data_layout(leaf.shape).backend_layout
        return jax.make_array_from_process_local_data(layout, leaf)

    def _replicated(self, leaf: Any) -> Any:
        import jax

        layout = self._distribution.get_data_layout(leaf.shape).backend_layout
        if leaf.shape[0] % layout.mesh.shape[self._distribution.batch_dim_name]:
            layout = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec())
        return jax.make_array_from_callback(leaf.shape, layout, lambda index: leaf[index])


def _map(function: Callable[[Any], Any], batch: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else function(leaf), batch)


def _as_in_fit(leaf: Any) -> Any:
    """A part of a batch as a NumPy array, floats in Keras' default dtype."""
    leaf = np.asarray(leaf)
    return leaf.astype(keras.config.floatx()) if np.issubdtype(leaf.dtype, np.floating) else leaf
