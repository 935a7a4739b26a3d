"""Processes of the recipes in `examples/scale`, and meshes of their devices."""

import contextlib
import importlib
import os
from pathlib import Path

import keras

ROOT = Path(__file__).resolve().parents[2]
SCALE = ROOT / "examples" / "scale"
BACKEND = os.environ["KERAS_BACKEND"]
RECIPE = {
    "tensorflow": "tensorflow_workers",
    "jax": "jax_data_parallel",
    "torch": "torch_ddp",
}


def recipe_of_two():
    """The recipe for two processes on this backend, in a process with `environment`."""
    return importlib.import_module(RECIPE[BACKEND])


def environment(*, one_device=True, **changes):
    """That of a process that finds the recipes, the package and its tests."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    own = {
        "XLA_FLAGS": " ".join(
            f for f in flags if not (one_device and "device_count" in f)
        )
    }
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{SCALE}",
        **own,
        **changes,
    }


@contextlib.contextmanager
def model_parallel(devices, entries):
    """A mesh of devices along "model", and a LayoutMap with these entries."""
    distribution = keras.distribution
    table = distribution.LayoutMap(
        distribution.DeviceMesh((1, len(devices)), ["batch", "model"], devices)
    )
    for pattern, axes in entries.items():
        table[pattern] = axes
    before = distribution.distribution()
    distribution.set_distribution(distribution.ModelParallel(layout_map=table))
    try:
        yield
    finally:
        distribution.set_distribution(before)
