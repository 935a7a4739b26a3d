"""`sparsify` with a structure: budgets in whole blocks, and masks that stay so in training."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.orthogonal import Block
from tests.helpers import classifier_loss, data

pytestmark = pytest.mark.core


def network():
    return keras.Sequential(
        [
            keras.Input((256,)),
            keras.layers.Dense(128, activation="relu", name="a"),
            keras.layers.Dense(256, activation="relu", name="b"),
            keras.layers.Dense(10, name="head"),
        ]
    )


def test_whole_blocks_before_and_after_training():
    pattern = ExactOrthogonal(0.1, structure=Block(16, 1))
    model = kso.sparsify(network(), 0.1, "erk", initializer=pattern, seed=1, exclude="head")
    model.compile("sgd", classifier_loss())
    model.fit(*data(model, 10, count=64), epochs=1, verbose=0)
    found = kso.prunable_weights(model, flops=False)
    found = [weight for weight in found if "head" not in weight.path]
    live = 0
    for weight in found:
        mask = weight.parametrization.mask_value()
        blocks = mask.reshape(-1, 16, mask.shape[1]).sum(axis=1)
        assert set(np.unique(blocks)) == {0, 16}
        assert not weight.raw_value()[~mask].any()
        live += mask.sum()
    assert 0 <= round(0.1 * sum(weight.size for weight in found)) - live < 16


def test_a_head_that_does_not_fit_is_named():
    pattern = ExactOrthogonal(0.1, structure=Block(1, 16))
    with pytest.raises(LayoutError, match=r"'head/kernel'.*outputs divisible by 16.*`exclude`"):
        kso.sparsify(network(), 0.3, initializer=pattern)
