"""TFMOT's schedules on Keras 3, counts worked out by hand; and the two Kerases in one process."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.parametrizations import (
    MagnitudeMask,
    StraightThroughTopK,
)
from tests.callbacks.runs import Watch, live
from tests.helpers import part_of_a_run, run_python

pytestmark = pytest.mark.tensorflow_only


def trained(model, steps=10):
    """Live entries before every step and at the end."""
    watch = Watch(steps=True)
    x, y = np.random.default_rng(0).normal(size=(2, steps, 10))
    model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(
        x,
        y,
        batch_size=1,
        verbose=0,
        callbacks=[kso.callbacks.UpdateMasks(), watch],
    )
    return [*watch.seen, live(model)]


def network(parametrization, *args):
    dense = keras.Sequential(
        [keras.Input((10,)), keras.layers.Dense(10, name="only")]
    )
    return kso.parametrize(dense, parametrization, *args)


# 100 entries. s(t) = 0.8 + (0.2 - 0.8) * (1 - (t - 2) / 4): 0.2, 0.5, 0.8 at t = 2, 4, 6.
LINEAR = [100, 100, 80, 80, 50, 50, 20, 20, 20, 20, 20]
# s(t) = 0.9 * (1 - (1 - t / 8) ** 3): 0, 0.5203125, 0.7875, 0.8859375, 0.9 at t = 0, 2, 4, 6, 8.
CUBIC = [100, 100, 48, 48, 21, 21, 11, 11, 10, 10, 10]
# s = 0.7 from step 3, every 4 steps.
CONSTANT = [100, 100, 100, 30, 30, 30, 30, 30, 30, 30, 30]


def linear(sparsity):
    return sparsity.PolynomialDecay(
        0.2, 0.8, begin_step=2, end_step=6, power=1, frequency=2
    )


def test_counts_by_hand(sparsity):
    cubic = sparsity.PolynomialDecay(
        0.0, 0.9, begin_step=0, end_step=8, power=3, frequency=2
    )
    constant = sparsity.ConstantSparsity(0.7, begin_step=3, frequency=4)
    for schedule, counts in (
        (linear(sparsity), LINEAR),
        (cubic, CUBIC),
        (constant, CONSTANT),
    ):
        assert trained(network(MagnitudeMask(schedule))) == counts
    assert trained(network(StraightThroughTopK(linear(sparsity)))) == LINEAR


def test_a_budget_gives_another_end(sparsity):
    # Half of the entries live: 0.5 + (0.2 - 0.5) * (1 - (t - 2) / 4) is 0.2, 0.35, 0.5.
    with pytest.warns(
        UserWarning,
        match=r"Received: 0.2 in the MagnitudeMask, replaced by 0.5",
    ):
        model = network(MagnitudeMask(linear(sparsity)), 0.5, "uniform")
    assert trained(model) == [100, 100, 80, 80, 65, 65, 50, 50, 50, 50, 50]


def test_saved_and_loaded(sparsity, tmp_path):
    model = network(MagnitudeMask(linear(sparsity)))
    with part_of_a_run():
        trained(model, steps=4)
        model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert all(map(np.array_equal, loaded.get_weights(), model.get_weights()))
    assert trained(keras.models.clone_model(loaded)) == LINEAR


def test_files_of_earlier_versions_and_other_schedules(sparsity):
    config = linear(sparsity).get_config()
    old = {
        "schedule": {
            "module": "x",
            "name": "PolynomialDecay",
            "config": config["config"],
        }
    }
    assert (
        trained(
            network(MagnitudeMask(kso.schedules.TfmotSchedule.from_config(old)))
        )
        == LINEAR
    )

    class Later(sparsity.ConstantSparsity):
        """A schedule of a user's own."""

    with pytest.raises(
        ValueError, match=r"a subclass of schedules.Schedule. Received: 'Later'"
    ):
        MagnitudeMask(Later(0.5, begin_step=3))


TOGETHER = """
import os
{first}
import numpy as np
import tensorflow as tf
import keras
before, legacy = tf.keras.Model, os.environ.get("TF_USE_LEGACY_KERAS")
import keras_sparse_ortho as kso
kso.export_litert
assert os.environ.get("TF_USE_LEGACY_KERAS") == legacy

x, y = np.ones((8, 6), "float32"), np.ones((8, 4), "float32")


def trained(which, sparsify, weights_of):
    model = which.Sequential([which.Input((6,)), which.layers.Dense(4)])
    model = sparsify(model, 0.5, seed=0)
    model.compile("adam", "mse")
    model.fit(x, y, verbose=0)
    assert weights_of(model)[0].live == 12
    model.save("model.keras")
    loaded = which.models.load_model("model.keras")
    assert np.allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    return loaded


def keras_3():
    loaded = trained(keras, kso.sparsify, kso.prunable_weights)
    keras.models.clone_model(kso.strip(loaded))


def keras_2():
    tf_keras = kso.tfmot.register_initializers()
    trained(tf_keras, kso.tfmot.prune_exact_orthogonal, kso.tfmot.prunable_weights)


for work in ({order}):
    work()
    assert tf.keras.Model is before
    assert not hasattr(keras.layers.Dense(3), "get_prunable_weights")
print("good", "3" if before is keras.Model else "2")
"""


@pytest.mark.parametrize(
    ("first", "order", "version"),
    [
        ("", "keras_2, keras_3, keras_2", "3"),
        # Who imports TFMOT first has chosen otherwise, and it stays so.
        ("import tensorflow_model_optimization", "keras_2, keras_3", "2"),
    ],
)
@pytest.mark.slow
def test_two_kerases_in_one_process(first, order, version, tmp_path):
    code = TOGETHER.format(first=first, order=order)
    done = run_python(
        "-W", "ignore", "-c", code, cwd=tmp_path, KERAS_BACKEND="tensorflow"
    )
    assert done.split() == ["good", version]
