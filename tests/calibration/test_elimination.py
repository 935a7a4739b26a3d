"""Structured OBS: the order of channels, and kernels refitted to those that stay."""

import numpy as np
import pytest

from keras_sparse_ortho.calibration import damped, eliminate, refitted_without

pytestmark = pytest.mark.numpy_only


def problem(channels, rows_of_channel, outputs, others=0, seed=0):
    """A kernel, the Gram matrix of correlated inputs, and the rows of each channel."""
    rng = np.random.default_rng(seed)
    size = channels * rows_of_channel + others
    inputs = rng.normal(size=(4 * size, size)) @ rng.normal(size=(size, size))
    rows = rng.permutation(size)[: channels * rows_of_channel].reshape(
        channels, rows_of_channel
    )
    return rng.normal(size=(size, outputs)), inputs.T @ inputs, rows


def lost(kernel, gram, rows):
    """The relative error of the kernel of least error without some rows."""
    hessian = damped(gram[None])[0]
    change = refitted_without(kernel, gram, rows) - kernel
    return np.sum(change * (hessian @ change)) / np.sum(
        kernel * (hessian @ kernel)
    )


def test_stages_have_the_kernels_of_least_error():
    kernels, grams, rows = {}, {}, {}
    for name, of_channel, others in (("a", 1, 0), ("b", 3, 7)):
        kernels[name], grams[name], rows[name] = problem(
            70, of_channel, 5, others
        )
    stages = [*eliminate(kernels, grams, rows, [8, 40])]
    assert [stage.width for stage in stages] == [40, 8]
    np.testing.assert_array_equal(stages[0].gone, stages[1].gone[:30])
    for stage in stages:
        assert len(np.unique(stage.gone)) == 70 - stage.width
        for name in kernels:
            gone = rows[name][stage.gone].ravel()
            assert not stage.kernels[name][gone].any()
            expected = refitted_without(kernels[name], grams[name], gone)
            np.testing.assert_allclose(stage.kernels[name], expected, atol=1e-9)


def test_the_channel_of_least_loss_in_all_readers_goes_first():
    kernels, grams, rows = {}, {}, {}
    for seed, name in enumerate("ab"):
        kernels[name], grams[name], rows[name] = problem(9, 2, 4, seed=seed)
    # The second reader counts by its relative error, however large its outputs are.
    kernels["b"] = 1e3 * kernels["b"]
    order = []
    for _ in range(3):
        losses = {
            channel: sum(
                lost(
                    kernels[name],
                    grams[name],
                    rows[name][[*order, channel]].ravel(),
                )
                for name in kernels
            )
            for channel in range(9)
            if channel not in order
        }
        order.append(min(losses, key=losses.__getitem__))
    [stage] = eliminate(kernels, grams, rows, [6])
    assert [*stage.gone] == order


def test_one_of_two_equal_channels_goes_even_where_many_go_at_once():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(1000, 128))
    inputs = np.concatenate(
        [inputs, inputs + 1e-3 * rng.normal(size=inputs.shape)], axis=1
    )
    kernel = rng.normal(size=(256, 6))
    rows = np.arange(256)[:, None]
    [stage] = eliminate(
        {"a": kernel}, {"a": inputs.T @ inputs}, {"a": rows}, [128]
    )
    assert sorted(stage.gone % 128) == [*range(128)]


def test_inputs_of_no_use_cost_nothing():
    kernel, gram, rows = problem(10, 1, 3)
    dead = rows[:4].ravel()
    kernel[dead] = 0.0
    gram[dead] = gram[:, dead] = 0.0
    [stage] = eliminate({"a": kernel}, {"a": gram}, {"a": rows}, [6])
    assert sorted(stage.gone) == [0, 1, 2, 3]
    np.testing.assert_allclose(stage.kernels["a"], kernel, atol=1e-9)
