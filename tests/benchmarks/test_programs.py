"""What workers exchange in a step, by the compiled program; and layers that are scanned."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array


@pytest.mark.jax_only
def test_collectives_are_counted_by_their_shapes(memory):
    program = """
      %all-reduce.1 = f32[4,3]{1,0} all-reduce(%a), channel_id=1
      %both = (f32[2]{0}, s32[]) all-reduce-start(%b, %c), channel_id=2
      %g = bf16[8]{0} all-gather(%d), channel_id=3
      %not = f32[100]{0} add(%a, %all-reduce.1)
    """
    assert memory.collectives(program) == {
        "all-reduce": 48 + 8 + 4,
        "all-gather": 16,
    }
    with pytest.raises(ValueError, match="in a loop"):
        memory.collectives("%w = (s32[]) while(%x), condition=%c")


@pytest.mark.jax_only
def test_live_values_and_blocks_are_a_tenth_of_what_a_dense_model_exchanges(
    memory,
):
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        lines = {
            form: memory.traffic_measure(form, 320, 0.1, 32, 16)
            for form in ("dense", "compact", "blocks")
        }
    finally:
        keras.distribution.set_distribution(None)
    totals = {
        form: sum(n for kind, n in line.items() if "-" in kind)
        for form, line in lines.items()
    }
    kernels = 4 * 4 * 320**2
    assert kernels <= totals["dense"] <= 1.01 * kernels
    assert totals["blocks"] <= 0.12 * totals["dense"]
    assert totals["compact"] <= 0.12 * totals["dense"]


@pytest.mark.core
def test_a_sparse_stack_is_its_layers_in_a_row(networks):
    stack = networks.ScannedStack(
        keras.layers.Dense(8, activation="tanh"), 3, name="stack"
    )
    model = kso.sparsify(
        keras.Sequential([keras.Input((8,)), stack]), 0.5, seed=0
    )
    (weight,) = kso.prunable_weights(model)
    assert (weight.shape, weight.live) == ((3, 8, 8), 96)
    assert kso.report(model).rows[0].orthogonality_error < 1e-6
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    expected = x
    for kernel in weight.value:
        expected = np.tanh(expected @ kernel)
    np.testing.assert_allclose(array(model(x)), expected, atol=1e-6)
    np.testing.assert_allclose(array(kso.strip(model)(x)), expected, atol=1e-6)


@pytest.mark.jax_only
def test_whole_networks_are_made_by_name(blocks):
    live = {}
    for rival in ("dense", "one word"):
        model = blocks.model_of("lstm512", rival, 0.125)
        live[rival] = sum(weight.live for weight in kso.prunable_weights(model))
    assert 0 < live["one word"] <= 0.15 * live["dense"]
