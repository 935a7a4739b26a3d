"""First steps with the package that is installed: ``first_steps.py``.

It prints where the package is, prunes a trained network, trains sparse ones, saves, loads and
strips them, and writes a LiteRT file where the packages for it are. `make release-check` runs it on
the wheel, and the workflow `test` on Linux, macOS and Windows.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np

import keras_sparse_ortho as kso


def network() -> keras.Model:
    """A small classifier."""
    dense = keras.layers.Dense
    return keras.Sequential(
        [keras.Input((64,)), dense(128, "relu"), dense(64, "relu"), dense(4)]
    )


def trained(
    model: keras.Model, x: np.ndarray, y: np.ndarray, *callbacks: object
) -> keras.Model:
    """The model after two epochs."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    model.fit(x, y, epochs=2, verbose=0, callbacks=[*callbacks])
    return model


def main() -> int:
    """Take the steps; 0 if each did what it should."""
    print(kso.__file__)
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(256, 64)).astype("float32")
    y = x[:, :4].argmax(axis=1)
    dense = trained(network(), x, y)
    schedule = kso.MagnitudeMask(kso.schedules.Cubic(0.25))
    models = {
        "pruned": kso.prune(dense, 0.25, score="obs", data=x),
        "scheduled": trained(
            kso.parametrize(dense, schedule), x, y, kso.callbacks.UpdateMasks()
        ),
        "on blocks": trained(
            kso.sparsify(network(), 0.25, storage="blocks", seed=0), x, y
        ),
    }
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for name, model in models.items():
            file = Path(folder) / f"{name}.keras"
            model.save(file)
            again, expected = (
                keras.saving.load_model(file),
                model.predict(x, verbose=0),
            )
            for one in (again, kso.strip(again)):
                np.testing.assert_allclose(
                    one.predict(x, verbose=0), expected, atol=1e-4
                )
            density = kso.report(model).density
            assert density < 0.35, f"{name}: {density}"
            print(f"{name}: density {density:.3f}, saved, loaded and stripped")
        command = [
            sys.executable,
            "-P",
            "-m",
            "keras_sparse_ortho",
            "report",
            str(file),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        if all(
            map(
                importlib.util.find_spec,
                ("ai_edge_litert", "ai_edge_quantizer"),
            )
        ):
            report = kso.export_litert(
                kso.strip(models["pruned"]), Path(folder) / "small.tflite"
            )
            print(f"small.tflite: {report.bytes:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
