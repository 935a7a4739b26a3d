"""Calibration data: what too few rows are, and rows that are held out."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.calibration import _shares
from tests.helpers import array

L = keras.layers
pytestmark = pytest.mark.core


def network(inputs=6):
    keras.utils.set_random_seed(0)
    layers = [L.Dense(8, name="a"), L.BatchNormalization(), L.Dense(3, name="b")]
    return keras.Sequential([keras.Input((inputs,)), *layers])


def rows(count, inputs=6):
    return np.random.default_rng(0).normal(size=(count, inputs)).astype("float32")


USES = {
    "obs": lambda model, x: kso.prune(model, 0.5, score="obs", data=x),
    "wanda": lambda model, x: kso.prune(model, 0.5, score="wanda", data=x),
    "refit": lambda model, x: kso.prune(model, 0.5, data=x),
    "statistics": kso.restore_statistics,
}


@pytest.mark.parametrize("use", USES)
def test_few_rows_and_equal_rows_warn_at_the_line_of_the_user(use):
    for x, received in (
        (rows(15), "15 different among 15 rows"),
        (np.repeat(rows(1), 70, axis=0), "1 different among 70 rows"),
        ([(rows(10),)] * 3, "10 different among 30 rows"),
    ):
        with pytest.warns(UserWarning, match=f"at least 16 different rows.*{received}") as told:
            USES[use](network(), x)
        ours = {warning.filename for warning in told if "different" in str(warning.message)}
        assert ours == {__file__}
    USES[use](network(), rows(16))  # no warning


def test_rows_of_several_inputs_differ_where_one_input_does():
    inputs = [keras.Input((3,)), keras.Input((3,))]
    model = keras.Model(inputs, L.Dense(2)(L.Concatenate()(inputs)))
    x = [np.ones((20, 3), "float32"), rows(20, 3)]
    kso.prune(model, 0.5, score="obs", data=(x,))  # no warning
    with pytest.warns(UserWarning, match="1 different among 20 rows"):
        kso.prune(model, 0.5, score="obs", data=([x[0], x[0]],))


def test_budgets_by_error_are_judged_on_rows_that_are_held_out(monkeypatch):
    curves = {}
    by_error = _shares._by_error

    def noted(found, *rest):
        curves.update(found)
        return by_error(found, *rest)

    monkeypatch.setattr(_shares, "_by_error", noted)
    keras.utils.set_random_seed(0)
    dense = keras.Sequential([keras.Input((48,)), L.Dense(16, use_bias=False, name="a")])
    x, fresh = rows(32, 48), np.random.default_rng(1).normal(size=(2000, 48))
    kso.prune(dense, 0.3, score="obs", data=x, budget="error")
    counts, errors = curves["a/kernel"]
    kernel = array(dense.layers[0].kernel)
    at = int(np.argmin(np.abs(counts - 0.3 * kernel.size)))
    # The network that OBS makes of these rows with so many entries, on others.
    pruned = kso.prune(dense, counts[at] / kernel.size, score="obs", data=x, budget="uniform")
    lost = fresh @ (kso.prunable_weights(pruned)[0].value - kernel)
    error = np.sum(lost**2) / np.sum((fresh @ kernel) ** 2)
    assert errors[at] > 0.7 * error
    assert errors[-1] == 0


def test_too_few_rows_to_hold_any_out_are_used_as_they_are():
    with pytest.warns(UserWarning, match="3 different among 3 rows"):
        pruned = kso.prune(network(), 0.5, score="obs", data=rows(3), budget="error")
    assert sum(w.live for w in kso.prunable_weights(pruned)) == 36
