"""Several steps in one execution, which Keras has on TensorFlow and JAX."""

import pytest

import keras_sparse_ortho as kso
from tests.parametrizations.models import compiled, fit


@pytest.mark.parametrize("method", ["soft", pytest.param("magnitude", marks=pytest.mark.slow)])
def test_steps_per_execution_ends_with_the_same_counts(method):
    model = compiled(method, steps_per_execution=4)
    fit(model, method, epochs=4)
    weights = kso.prunable_weights(model)
    assert sum(w.live for w in weights) == round(0.2 * sum(w.size for w in weights))
