"""Models that an earlier commit (71f6923) saved, one for each storage, load and compute the same.

`outputs.npz` has their outputs for one input, drawn as below.
"""

from pathlib import Path

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array

SAVED = Path(__file__).with_name("saved")
OUTPUTS = dict(np.load(SAVED / "outputs.npz"))


@pytest.mark.core
@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_a_saved_model_loads_and_computes_the_same(name):
    model = keras.saving.load_model(SAVED / f"{name}.keras")
    x = np.random.default_rng(0).normal(size=(4, *model.inputs[0].shape[1:])).astype("float32")
    np.testing.assert_allclose(array(model(x)), OUTPUTS[name], atol=1e-5)
    assert any(weight.storage is not None for weight in kso.prunable_weights(model))
