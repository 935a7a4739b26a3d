"""`BackupAndRestore`: a killed run goes on as if it had not been interrupted."""

import json
import os
import pathlib
from collections.abc import Collection
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import global_generators, set_global_generators
from keras_sparse_ortho._checks import is_integer, other_keywords
from keras_sparse_ortho._files import atomic_write, shown
from keras_sparse_ortho._keras_internals import initial_epoch_is
from keras_sparse_ortho._types import Config
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho._workers import Workers, workers_of

_RECORD = "latest.json"
_WEIGHTS = "epoch_{:06d}.weights.h5"


class BackupAndRestore(keras.callbacks.Callback):
    """Saves the state of training after every epoch, and resumes from there when run again.

    Unlike `keras.callbacks.BackupAndRestore` it saves the states of seed generators (`Dropout`,
    augmentation), and survives a kill even while it writes. `fit`, called again with the same
    arguments, ends bit by bit with the model of an uninterrupted run, if the data come in the same
    order. If several processes train one model, each has this callback and a folder `worker_0`, ...
    in `backup_dir`; a restarted job resumes from the last epoch that all of them have.

    Args:
        backup_dir: str or path. A folder for this run alone; created if needed.
        delete_checkpoint: bool. Whether to delete the files when training is finished.

    When training begins, raises ValueError for a model that is not built and a backup that is
    damaged, of another model, or without the epoch of other processes; WorkerError if another
    process does.

    Limits: a run resumes at the end of an epoch. `fit(shuffle=True)` and a shuffled
    `tf.data.Dataset` give another order in it. Counts of other callbacks, such as the patience of
    `EarlyStopping`, start again. Kernels that are sharded over processes cannot be saved.

    Examples:
        >>> import keras, numpy as np, tempfile, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.5),
        ...                           keras.layers.Dense(4)])
        >>> model = kso.sparsify(dense, 0.25, seed=0)
        >>> model.compile("sgd", "mse")
        >>> backup = BackupAndRestore(tempfile.mkdtemp())
        >>> history = model.fit(np.ones((8, 8)), np.ones((8, 4)), shuffle=False, verbose=0,
        ...                     epochs=3, callbacks=[backup])
    """

    @other_keywords
    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        *,
        delete_checkpoint: bool = True,
    ) -> None:
        super().__init__()
        self.backup_dir = pathlib.Path(backup_dir)
        self.delete_checkpoint = delete_checkpoint
        self._workers = Workers()
        self._folder = self.backup_dir
        self._saved: dict[str, Any] | None = None

    def on_train_begin(self, logs: Config | None = None) -> None:
        self._workers = workers_of(self.model)
        if self._workers.count > 1:
            self._folder = self.backup_dir / f"worker_{self._workers.rank}"
        records = self._workers.together(self._records)
        latest = records[0]["epoch"] if records else 0
        epoch = int(self._workers.gather(np.array([latest], np.int32)).min())
        self._saved = None
        if epoch:
            self._workers.together(lambda: self._restore(records, epoch))

    def _records(self) -> list[dict[str, Any]]:
        """The backups in the folder, the last one first; raises for damaged ones."""
        if not self.model.built:
            raise ValueError(
                "BackupAndRestore needs a model that is built: call it on a batch of data before "
                f"`fit`. Received: model={self.model.name!r}"
            )
        record = self._folder / _RECORD
        if not record.exists():
            return []
        try:
            latest = json.loads(record.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # no JSON, or not UTF-8
            raise self._damaged(
                f"{type(error).__name__} in {str(record)!r}"
            ) from error
        before = (
            latest.pop("before", None) if isinstance(latest, dict) else None
        )
        records = [latest] if before is None else [latest, before]
        if wrong := [entry for entry in records if not _is_record(entry)]:
            raise self._damaged(f"{str(record)!r} with {shown(wrong[0])}")
        return records

    def _damaged(self, found: str) -> ValueError:
        return ValueError(
            f"The backup in {str(self._folder)!r} is damaged, or of another model. Delete this "
            "folder to train from the start; a .weights.h5 file in it that is whole can be loaded "
            f"by `model.load_weights`. Received: {found}"
        )

    def _restore(self, records: list[dict[str, Any]], epoch: int) -> None:
        """Gives model, optimizer and generators the state at the end of an epoch."""
        model, states = self.model, _seed_states(self.model)
        match = next(
            (record for record in records if record["epoch"] == epoch), None
        )
        if match is None:
            raise ValueError(
                f"All processes must have a backup of one epoch, and another process has only "
                f"{epoch}. Received: {str(self._folder)!r} with {[r['epoch'] for r in records]}"
            )
        if len(states) != len(match["seeds"]):
            raise self._damaged(
                f"{len(match['seeds'])} seed generators, for {len(states)}"
            )
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        try:
            model.load_weights(self._folder / _WEIGHTS.format(epoch))
            for state, value in zip(states, match["seeds"], strict=True):
                assign(
                    state,
                    np.array(value, dtype=state.dtype).reshape(state.shape),
                )
            set_global_generators(match["generators"])
        except Exception as error:  # of HDF5, of the backends: any kind
            raise self._damaged(
                f"epoch {epoch}, {type(error).__name__}: {error}"
            ) from error
        initial_epoch_is(model, epoch)
        self._saved = match

    def on_epoch_end(self, epoch: int, logs: Config | None = None) -> None:
        """Saves weights and generators, and removes older backups."""
        model = self.model
        self._folder.mkdir(parents=True, exist_ok=True)
        weights = self._folder / _WEIGHTS.format(epoch + 1)
        model.save_weights(weights, overwrite=True)
        with weights.open("rb") as stream:
            os.fsync(stream.fileno())
        seeds = [to_numpy(state).tolist() for state in _seed_states(model)]
        saved = {
            "epoch": epoch + 1,
            "seeds": seeds,
            "generators": global_generators(),
        }
        needed_files, record = {weights}, saved
        # No process is more than one epoch ahead, as every step waits for all of them.
        if self._workers.count > 1 and self._saved is not None:
            needed_files.add(
                self._folder / _WEIGHTS.format(self._saved["epoch"])
            )
            record = {**saved, "before": self._saved}
        with atomic_write(self._folder / _RECORD) as stream:
            json.dump(record, stream)
        self._delete_weights(but=needed_files)
        self._saved = saved

    def on_train_end(self, logs: Config | None = None) -> None:
        if self.delete_checkpoint:
            self._workers.together(lambda: None)
            (self._folder / _RECORD).unlink(missing_ok=True)
            self._delete_weights()

    def _delete_weights(self, but: Collection[pathlib.Path] = ()) -> None:
        for path in self._folder.glob(
            _WEIGHTS.format(0).replace("000000", "*")
        ):
            if path not in but:
                path.unlink(missing_ok=True)


def _is_record(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    epoch: Any = value.get("epoch")
    seeds = value.get("seeds")
    return (
        (is_integer(epoch) and 0 < epoch < 2**31)
        and (
            isinstance(seeds, list)
            and all(isinstance(state, list) for state in seeds)
        )
        and all(is_integer(number) for state in seeds for number in state)
        and isinstance(value.get("generators"), list)
    )


def _seed_states(model: keras.Model) -> list[Any]:
    """The states of all seed generators in a model, in the order of its structure."""
    weights = {id(variable) for variable in model.weights}
    return [
        variable for variable in model.variables if id(variable) not in weights
    ]
