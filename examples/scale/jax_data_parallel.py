"""Sparse training with `keras.distribution.DataParallel` on JAX: four devices, and two processes.

    python examples/scale/jax_data_parallel.py --methods rigl blocks

Set the distribution before making the model; `fit` does the rest. Each of several processes passes
its own part of every batch to `fit` and to RigL.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # CPUs stand for accelerators

import keras
import recipe

FOUR_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


def begin(place):
    distribution = keras.distribution
    if place.processes > 1:
        distribution.initialize(
            f"127.0.0.1:{place.ports[0]}", place.processes, place.rank
        )
    if place.way != "one device":
        devices = distribution.list_devices()
        distribution.set_distribution(
            distribution.DataParallel(devices=devices, auto_shard_dataset=False)
        )


def train(method, place):
    model = recipe.sparse_model(method)
    x, y = recipe.shard(place.rank, place.processes)
    model.fit(
        x,
        y,
        batch_size=recipe.BATCH // place.processes,
        epochs=recipe.EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=recipe.callbacks(method, place.rank, place.processes),
    )
    return model


if __name__ == "__main__":
    recipe.main(
        [
            recipe.Way("one device"),
            recipe.Way("four devices", 1, FOUR_DEVICES),
            recipe.Way("two processes", 2),
        ],
        train,
        begin,
    )
