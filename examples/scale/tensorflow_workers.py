"""Sparse training in two processes of TensorFlow's MultiWorkerMirroredStrategy, on this machine.

    python examples/scale/tensorflow_workers.py --methods rigl blocks

Under this strategy Keras 3's `fit` fails for dense models, too (keras-team/keras#20585): it cannot
build the model from a batch that is spread over workers. So the model and its optimizer are built
first, and a custom training loop runs `model.train_step` on the replicas.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import json

import keras
import recipe
import tensorflow as tf


def begin(place):
    global strategy
    if place.processes == 1:
        strategy = tf.distribute.get_strategy()
        return
    # On a cluster TF_CONFIG is what the scheduler sets.
    hosts = [f"127.0.0.1:{port}" for port in place.ports]
    task = {"type": "worker", "index": place.rank}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": hosts}, "task": task}
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy()


def train(method, place):
    with strategy.scope():
        model = recipe.sparse_model(method)
        model.optimizer.build(model.trainable_variables)
    x, y = recipe.shard(place.rank, place.processes)
    size = recipe.BATCH // place.processes
    # Each worker brings its own part of each batch.
    batches = strategy.distribute_datasets_from_function(
        lambda context: tf.data.Dataset.from_tensor_slices((x, y)).batch(size)
    )

    @tf.function
    def step(batch):
        strategy.run(model.train_step, args=(batch,))

    hooks = keras.callbacks.CallbackList(
        recipe.callbacks(method, place.rank, place.processes),
        model=model,
        epochs=recipe.EPOCHS,
        steps=recipe.BATCHES,
    )
    hooks.on_train_begin()
    for epoch in range(recipe.first_epoch(model), recipe.EPOCHS):
        hooks.on_epoch_begin(epoch)
        for number, batch in enumerate(batches):
            hooks.on_train_batch_begin(number)
            step(batch)
            hooks.on_train_batch_end(number)
        hooks.on_epoch_end(epoch, {})
    hooks.on_train_end()
    return model


if __name__ == "__main__":
    recipe.main(
        [recipe.Way("one process"), recipe.Way("two processes", 2)],
        train,
        begin,
    )
