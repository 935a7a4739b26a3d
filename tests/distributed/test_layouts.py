"""Where variables lie under `keras.distribution.ModelParallel`, on two devices of one process."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import LayoutError
from tests.distributed.recipes import model_parallel

pytestmark = pytest.mark.jax_only

L = keras.layers


def layouts(**entries):
    return model_parallel(keras.distribution.list_devices("cpu"), entries)


def dense():
    return keras.Sequential(
        [
            keras.Input((16,)),
            L.Dense(16, name="hidden"),
            L.Dense(5, name="head"),
        ],
        name="net",
    )


def specs(model):
    """By path, along which axis of the mesh each axis of a variable is cut."""
    found = {}
    for variable in model.variables:
        spec = tuple(variable.value.sharding.spec)
        found[variable.path] = spec + (None,) * (
            len(variable.shape) - len(spec)
        )
    return found


def masked(**kwargs):
    return lambda: kso.sparsify(dense(), 0.5, seed=0, **kwargs)


def parametrized(parametrization):
    return lambda: kso.parametrize(dense(), parametrization)


KERNELS = ("kernel", "recurrent_kernel")
HALVES, WHOLE = (None, "model"), (None, None)
CASES = {
    "masked": (masked(), {"kernel": HALVES, "kernel_mask": HALVES}),
    "compact": (
        masked(storage="compact", budget="uniform"),
        {"kernel_values": ("model",), "kernel_indices": ("model",)},
    ),
    "thresholds of channels": (
        parametrized(kso.SoftThreshold(granularity="channel")),
        {
            "kernel": HALVES,
            "kernel_s": HALVES,
            "kernel_s_offset": (),
            "kernel_s_target": (None,),
        },
    ),
    "a schedule": (
        parametrized(kso.MagnitudeMask(0.5, frequency=2)),
        {"kernel_mask": HALVES, "kernel_renewed": ()},
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "pattern", ["net/hidden/kernel", "net/hidden/.*kernel.*"]
)
def test_what_belongs_to_a_kernel_lies_as_it_does(name, pattern):
    make, expected = CASES[name]
    with layouts(**{pattern: HALVES}):
        model = make()
        found = specs(model)
        assert {key: found[f"net/hidden/{key}"] for key in expected} == expected
        assert all(
            "model" not in found[path] for path in found if "hidden" not in path
        )
        # Written from the host, it lies where it did.
        weight = kso.prunable_weights(model)[0]
        before = weight.raw_value()
        weight.parametrization.assign_raw(before)
        np.testing.assert_array_equal(weight.raw_value(), before)
        assert specs(model) == found
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model.optimizer.build(model.trainable_variables)
        slots = {
            v.path: tuple(v.value.sharding.spec)
            for v in model.optimizer.variables
        }
        kept = [
            spec
            for path, spec in slots.items()
            if "hidden_kernel" in path and spec != ()
        ]
        assert any("model" in spec for spec in kept)


def blocks():
    hidden = kso.layers.BlockSparseDense(
        24, density=0.5, block=4, seed=0, name="hidden"
    )
    layers = [L.Dense(16, name="first"), hidden]
    return keras.Sequential([keras.Input((3, 16)), *layers], name="net")


def gates():
    sizes = {
        "density": 0.5,
        "recurrent_density": 0.5,
        "block": 4,
        "recurrent_block": 4,
    }
    cell = kso.layers.BlockSparseLSTMCell(16, seed=0, name="cell", **sizes)
    rnn = kso.layers.BlockSparseRNN(cell)
    return keras.Sequential([keras.Input((3, 16)), rnn], name="net")


@pytest.mark.parametrize(
    ("make", "patterns"),
    [
        (blocks, ["net/hidden/kernel"]),
        (gates, [".*cell/kernel", ".*cell/recurrent_kernel"]),
        (gates, [".*kernel"]),
    ],
)
def test_blocks_are_cut_by_output_blocks(make, patterns):
    whole = make()
    with layouts(**dict.fromkeys(patterns, HALVES)):
        model = make()
        found = specs(model)
        places = [
            path.removesuffix("blocks")
            for path in found
            if path.endswith("blocks")
        ]
        assert len(places) == len(KERNELS if make is gates else KERNELS[:1])
        for place in places:
            assert found[f"{place}blocks"] == ("model", None, None, None)
            assert found[f"{place}inputs_of"] == ("model", None)
            assert found[f"{place}slots_of"] == WHOLE
        model.set_weights(whole.get_weights())
        x = np.random.default_rng(0).normal(size=(4, 3, 16)).astype("float32")
        np.testing.assert_allclose(
            np.asarray(model(x)), np.asarray(whole(x)), atol=1e-6
        )


def test_blocks_have_an_entry_of_their_own():
    with layouts(**{"net/hidden/kernel": HALVES, "net/hidden/blocks": (None,)}):
        assert specs(blocks())["net/hidden/blocks"] == (None, None, None, None)


def test_blocks_that_devices_do_not_divide():
    layer = kso.layers.BlockSparseDense(
        12, density=1 / 3, block=4, seed=0, name="hidden"
    )
    with (
        layouts(**{"hidden/kernel": HALVES}),
        pytest.raises(LayoutError, match="Received: 3 output blocks"),
    ):
        layer.build((4, 24))


def test_the_paths_of_a_wrapped_layer_are_those_without_its_wrapper():
    plain, wrapped = dense(), kso.sparsify(dense(), 0.5, seed=0)
    paths = {v.path for v in wrapped.variables}
    assert {v.path for v in plain.variables} <= paths
    assert paths - {v.path for v in plain.variables} == {
        "net/hidden/kernel_mask",
        "net/head/kernel_mask",
    }
