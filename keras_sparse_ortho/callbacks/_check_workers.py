"""`CheckWorkers`: processes that train one model, and whether it is one."""

from typing import Any

from keras_sparse_ortho.callbacks._step_callback import StepCallback
from keras_sparse_ortho.models import value_facts


class CheckWorkers(StepCallback):
    """Compares what processes that train one model have, before the first step and every epoch.

    Each process of `tf.distribute.MultiWorkerMirroredStrategy`, of JAX under `keras.distribution`
    or of `torch.distributed` makes the model by itself. With other seeds, masks or weights on one
    of them, training goes on without a word, and what comes out is no model. This compares digests
    of structure, masks, trained weights and layouts, and stops all processes where they differ.

    `RigL`, `SET`, `UpdateMasks` and `TargetDensity` do the same by themselves before the first
    step, and compare masks after every update. So this is for models with fixed masks, and for
    those who want the weights compared, too. With one process it does nothing.

    Raises:
        WorkerError: What differs, on every process.

    Limits: every process must have this callback: comparing waits for all. It reads all weights,
    once an epoch. Moving averages are not compared but on JAX, nor are states of random generators:
    elsewhere each process may have its own.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> model = kso.sparsify(keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]), 0.25)
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0,
    ...                     callbacks=[kso.callbacks.CheckWorkers()])
    """

    def on_step(self, step: int, executed: int) -> None:
        """Nothing."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares."""
        if self.workers.count > 1:
            self.sync()
            self.workers.compare(f"after epoch {epoch + 1}", value_facts(self._watched))
