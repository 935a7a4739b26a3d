"""Files and configurations of other origin: old ones load, crafted ones are refused by name."""

import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.initializers import ApproximateIsometry, ExactOrthogonal
from keras_sparse_ortho.layers import BlockSparseConv2D, BlockSparseDense
from keras_sparse_ortho.parametrizations import (
    MagnitudeMask,
    SoftThreshold,
    StraightThroughTopK,
)
from keras_sparse_ortho.schedules import Constant, Polynomial
from tests.helpers import array, run_python

pytestmark = pytest.mark.core
LONG = 10**5000  # which Python does not print
# Keras restores neither of these, with errors of other kinds.
NOT_RESTORED = [
    {"class_name": "__slice__", "config": {"value": [1, 2, 3]}},
    {
        **keras.saving.serialize_keras_object(Constant(0.5)),
        "build_config": {"input_shape": [1]},
    },
]


def deep():
    value = 1
    for _ in range(5000):
        value = [value]
    return value


@pytest.mark.parametrize("kind", [MagnitudeMask, StraightThroughTopK])
@pytest.mark.parametrize("config", [{}, [], None, {"schedules": 1}])
def test_a_scheduled_mask_without_schedule(kind, config):
    with pytest.raises(ValueError, match=r"holds `schedule`.*Received: "):
        kind.from_config(config)


@pytest.mark.parametrize("config", NOT_RESTORED)
def test_parts_that_keras_does_not_restore(config):
    with pytest.raises(ValueError, match=r"cannot be restored.*Received: "):
        MagnitudeMask.from_config({"schedule": config})
    with pytest.raises(ValueError, match=r"cannot be restored.*Received: "):
        ExactOrthogonal(0.5, structure=config)


@pytest.mark.parametrize(
    "change",
    [
        {"model": 3},
        {"names": None},
        {"names": [1]},
        {"layers": []},
        {"layers": {"dense": None}},
        {"model": ...},
        {"layers": ...},
    ],
)
def test_layers_inside_a_class(change):
    config = {
        "model": keras.saving.serialize_keras_object(keras.layers.Dense(3)),
        "names": [],
        "layers": {},
        **change,
    }
    config = {key: value for key, value in config.items() if value is not ...}
    kind = keras.saving.get_registered_object("keras_sparse_ortho>Rebuilt")
    with pytest.raises(
        ValueError, match="The configuration of a layer with others inside"
    ):
        kind.from_config(config)


NUMBERS = [LONG, float("nan"), float("inf"), "1.0", None, [], True, deep()]


@pytest.mark.parametrize("value", NUMBERS, ids=range(len(NUMBERS)))
def test_numbers_that_are_none(value):
    wrong = [
        lambda: ExactOrthogonal(0.5, gain=value),
        lambda: Polynomial(0.5, power=value),
        lambda: SoftThreshold(s_init=value),
        lambda: ApproximateIsometry(0.5, gain=value),
    ]
    # Keras itself walks through the arguments of layers.
    if not isinstance(value, list):
        wrong.append(lambda: BlockSparseDense(8, density=0.5, gain=value))
    for make in wrong if not isinstance(value, str) else wrong[1:]:
        with pytest.raises(ValueError, match="Received: "):
            make()


@pytest.mark.parametrize(
    "value", [LONG, -LONG, deep()], ids=["long", "negative", "deep"]
)
def test_integers_and_densities_that_no_message_could_show(value):
    with pytest.raises(
        DensityError, match=r"Received: density=a .* too large to be shown"
    ):
        Constant(value)
    with pytest.raises(
        ValueError, match=r"Received: seed=a .* too large to be shown"
    ):
        ExactOrthogonal(0.5, seed=value if value != LONG else -LONG)


@pytest.mark.parametrize(
    "units", [2**31, 10**30, 10**400], ids=["1", "30", "400"]
)
def test_kernels_that_no_memory_holds(units):
    with pytest.raises(LayoutError, match="has at most 2147483647"):
        BlockSparseDense(units, density=0.5, block=1, seed=0).build((None, 8))
    with pytest.raises(LayoutError, match="at most 2147483647 live entries"):
        BlockSparseDense(2**30, density=0.5, block=1, seed=0).build((None, 8))


@pytest.mark.parametrize(
    "shape", [{}, None, 3, "abcd", [None], [None, None], [1, "a"], [{}, {}]]
)
def test_shapes_that_layers_of_live_blocks_are_built_for(shape):
    layers = [
        BlockSparseDense(8, density=0.5, block=2),
        BlockSparseConv2D(8, 3, density=0.5),
    ]
    for layer in layers:
        with pytest.raises((ValueError, TypeError)):
            layer.build_from_config({"input_shape": shape})
    with pytest.raises(
        LayoutError, match="needs inputs with a known size of axis -1"
    ):
        layers[0].build(shape)


SAVED = Path(__file__).with_name("saved")
OUTPUTS = dict(np.load(SAVED / "outputs.npz"))


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_a_saved_model_loads_and_computes_the_same(name):
    model = keras.saving.load_model(SAVED / f"{name}.keras")
    x = (
        np.random.default_rng(0)
        .normal(size=(4, *model.inputs[0].shape[1:]))
        .astype("float32")
    )
    np.testing.assert_allclose(array(model(x)), OUTPUTS[name], atol=1e-5)
    assert any(
        weight.storage is not None for weight in kso.prunable_weights(model)
    )


@pytest.mark.torch_only  # whose processes can be forked
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_crafted_files_load_or_are_refused_by_name():
    options = ["--parts", "hostile", "--share", "0.02", "--seed", "7"]
    done = run_python(
        "-W", "ignore", "-m", "tests.faults", *options, cwd=SAVED.parents[1]
    )
    rows = re.findall(r"^\| hostile: [^|]+\| (\d+) \|", done, re.MULTILINE)
    assert len(rows) == 7
    assert sum(map(int, rows)) >= 40
