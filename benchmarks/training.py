"""Data, batches and curves of training, for the scripts of this folder."""

import pathlib
import sys
from typing import Any

import keras
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

from data import Dataset, load

__all__ = ["Dataset", "Progress", "load", "shuffled", "whole_batches"]


def whole_batches(x: np.ndarray, y: np.ndarray, size: int) -> dict[str, Any]:
    """Arguments of `fit` that train on arrays, without the rest after the last whole batch."""
    kept = len(x) // size * size
    return {"x": x[:kept], "y": y[:kept], "batch_size": size}


def shuffled(x: np.ndarray, y: np.ndarray, size: int, seed: int) -> dict[str, Any]:
    """Arguments of `fit` that train on whole batches, in a new order in each epoch.

    Keras 3.15 on TensorFlow shuffles arrays by an operation within a dataset, which restarts in
    each epoch: after `keras.utils.set_random_seed` all epochs have the same batches in the same
    order, which costs a dense MLP on Fashion-MNIST a point after ten epochs (`moving_masks.py
    order`). JAX and torch shuffle outside, and tf_keras uses one dataset for all epochs.

    Args:
        x: Inputs.
        y: Labels.
        size: Batch size; the rest after the last whole batch is dropped.
        seed: Seed of the orders on TensorFlow.
    """
    arrays = whole_batches(x, y, size)
    if keras.backend.backend() != "tensorflow":
        return arrays
    import tensorflow as tf

    inputs, labels, kept = tf.constant(arrays["x"]), tf.constant(arrays["y"]), len(arrays["x"])

    def order(pair: Any) -> Any:  # of one epoch: as Keras does it, in half the time of `shuffle`
        rows = tf.random.experimental.stateless_shuffle(tf.range(kept), pair)
        return tf.data.Dataset.from_tensor_slices(tf.reshape(rows, (-1, size)))

    pairs = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True)
    batches = pairs.take(2).batch(2, drop_remainder=True).flat_map(order)
    batches = batches.apply(tf.data.experimental.assert_cardinality(kept // size))
    batches = batches.map(lambda rows: (tf.gather(inputs, rows), tf.gather(labels, rows)))
    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False  # its threads would take half of a single core
    return {"x": batches.prefetch(2).with_options(options), "shuffle": False}


class Progress(keras.callbacks.Callback):
    """Training accuracy in windows of steps: `(last step, accuracy within the window)`.

    `losses` has the loss in the same way, if `fit` reports it.

    In the first epoch every image is new to the network when it is counted, so this is an accuracy
    on unseen images, at no cost.

    Args:
        window: Steps that are averaged.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.points: list[tuple[int, float]] = []
        self.losses: list[tuple[int, float]] = []
        self._restart()

    def _restart(self) -> None:
        self._steps, self._before = 0, {"accuracy": 0.0, "loss": 0.0}

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Metrics begin anew."""
        self._restart()

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Recovers the windows from the running mean of the epoch."""
        assert logs is not None
        self._steps += 1
        if self._steps % self.window == 0:
            for name, points in (("accuracy", self.points), ("loss", self.losses)):
                if name in logs:
                    total = float(logs[name]) * self._steps
                    points.append((self._steps, (total - self._before[name]) / self.window))
                    self._before[name] = total
