"""The processes of JAX under `keras.distribution`."""

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import layout_entries
from keras_sparse_ortho._workers._workers import Workers, digest_of
from keras_sparse_ortho.errors import WorkerError


def jax_workers() -> Workers:
    distribution = keras.distribution.distribution()
    if distribution is None:
        return Workers()
    import jax

    devices = distribution.device_mesh.backend_mesh.devices.flat
    if len({device.process_index for device in devices}) == 1:
        return Workers()
    return _JaxWorkers(jax.process_count(), jax.process_index(), distribution)


_agreed: "weakref.WeakSet[Any]" = weakref.WeakSet()


def check_layouts() -> None:
    """Compares the current `keras.distribution` of all workers, once for each.

    With layouts of its own a worker would wait for others where these do not come, from the first
    weight on that is read.

    Raises:
        WorkerError: They differ.
    """
    distribution = keras.distribution.distribution()
    if distribution is not None and distribution not in _agreed:
        jax_workers().compare("on where variables lie", layout_entries(distribution))
        _agreed.add(distribution)


class _JaxWorkers(Workers):
    """One program runs on all: it has the gradient of the global batch, which `batch` makes."""

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
                "On JAX all workers compute on their batches together, and must have as many of "
                f"them. Received: {counts} batches"
            )
        return [self.batch(batch) for batch in batches]

    def batch(self, batch: Any) -> Any:
        """The batches of all workers as one; a batch that all of them have is taken once."""
        batch = keras.tree.map_structure(_as_in_fit, batch)
        leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
        mark = np.frombuffer(bytes.fromhex(digest_of(*leaves)), np.int32)
        known = self.gather(np.concatenate([mark, np.array([_rows(batch)], np.int32)]))
        if (known == known[0]).all():
            return keras.tree.map_structure(self._replicated, batch)
        if len(set(known[:, -1].tolist())) > 1:
            raise WorkerError(
                "On JAX the batches of all workers are one batch, and must have as many samples "
                f"each. Received: {known[:, -1].tolist()} samples"
            )
        self._check_shards(known)
        return keras.tree.map_structure(self._sharded, batch)

    def _check_shards(self, known: np.ndarray) -> None:
        """Workers that hold parts of one replica of the model must have one batch."""
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
                        f"The workers {other} and {one} hold parts of one replica of the model, "
                        "and must be given the same batches. Received: other samples"
                    )

    def _sharded(self, leaf: Any) -> Any:
        if leaf is None:
            return None
        import jax

        layout = self._distribution.get_data_layout(leaf.shape).backend_layout
        return jax.make_array_from_process_local_data(layout, leaf)

    def _replicated(self, leaf: Any) -> Any:
        if leaf is None:
            return None
        import jax

        layout = self._distribution.get_data_layout(leaf.shape).backend_layout
        if leaf.shape[0] % layout.mesh.shape[self._distribution.batch_dim_name]:
            layout = jax.sharding.NamedSharding(layout.mesh, jax.sharding.PartitionSpec())
        return jax.make_array_from_callback(leaf.shape, layout, lambda index: leaf[index])


def _as_in_fit(leaf: Any) -> Any:
    """A part of a batch as NumPy, floats in Keras' default type."""
    if leaf is None:
        return None
    leaf = np.asarray(leaf)
    return leaf.astype(keras.config.floatx()) if np.issubdtype(leaf.dtype, np.floating) else leaf


def _rows(batch: Any) -> int:
    return int(keras.tree.flatten(batch[0])[0].shape[0])
