"""Sparse training with `keras.distribution.ModelParallel` on JAX: four devices, and two processes.

    python examples/scale/jax_model_parallel.py --methods rigl blocks

The `LayoutMap` is that of the dense model: it names kernels by their paths, and masks, values,
indices, channel thresholds and optimizer slots are sharded like their kernels; live blocks are
sharded by output blocks. On four devices two hold half of the kernels each, and two the same for
the other half of the batch. With two processes each holds half of the kernels, so both get whole
batches.
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
    if place.way == "one device":
        return
    devices = distribution.list_devices()
    mesh = distribution.DeviceMesh(
        (len(devices) // 2, 2), ["batch", "model"], devices
    )
    layout = distribution.LayoutMap(mesh)
    layout["net/(hidden|middle)/kernel"] = (None, "model")
    distribution.set_distribution(
        distribution.ModelParallel(
            layout_map=layout, batch_dim_name="batch", auto_shard_dataset=False
        )
    )


def train(method, place):
    model = recipe.sparse_model(method)
    x, y = recipe.data()
    model.fit(
        x,
        y,
        batch_size=recipe.BATCH,
        epochs=recipe.EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=recipe.callbacks(method, 0, 1),
    )
    check_layouts(model, place)
    return model


def check_layouts(model, place):
    """Kernels, or what replaces them, are sharded in halves."""
    if place.way == "one device":
        return
    for variable in model.weights:
        cut = "model" in str(variable.value.sharding.spec)
        names = (
            "kernel",
            "kernel_mask",
            "kernel_values",
            "blocks",
            "inputs_of",
        )
        divisible = (
            variable.name != "kernel_values" or variable.shape[0] % 2 == 0
        )
        if variable.name in names and "head" not in variable.path and divisible:
            assert cut, f"{variable.path} is whole on every device"


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
