"""`Feather`: its values and gradients, its threshold beside its mask."""

import numpy as np
import pytest

from keras_sparse_ortho.parametrizations import Feather
from tests.parametrizations.test_gradients import COEFFICIENTS, KERNEL, built, differentiated

pytestmark = pytest.mark.core


def by_hand(w, live, power):
    order = np.argsort(-np.abs(w), axis=None, kind="stable")
    mask = np.zeros(w.size, bool)
    mask[order[:live]] = True
    mask = mask.reshape(w.shape)
    threshold = np.abs(w[~mask]).max()
    smooth = np.sign(w) * (np.abs(w) ** power - threshold**power).clip(0) ** (1 / power)
    return np.where(mask, smooth, 0), mask


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_values_are_those_of_the_paper(power):
    _, made = built(Feather(0.4, power=power))
    expected, mask = by_hand(KERNEL.astype("float64"), 12, power)
    found = made.value()
    np.testing.assert_array_equal(found != 0, mask)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("theta", [0.0, 0.3, 1.0])
def test_gradients_pass_with_a_share_for_dead_entries(theta):
    model, made = built(Feather(0.4, theta=theta))
    expected = np.where(made.mask_value(), COEFFICIENTS, np.float32(theta) * COEFFICIENTS)
    np.testing.assert_allclose(differentiated(model)["kernel"], expected, rtol=1e-6)


def test_the_threshold_follows_the_mask():
    _, made = built(Feather(0.4))
    made.assign_raw(10 * KERNEL[::-1])
    made.update(5, 0.2)
    expected, _ = by_hand(10.0 * KERNEL[::-1].astype("float64"), 6, 3.0)
    np.testing.assert_allclose(made.value(), expected, atol=1e-4)
    made.assign_mask(np.ones_like(KERNEL, bool))  # none is dead: no threshold
    np.testing.assert_array_equal(made.value(), 10 * KERNEL[::-1])


@pytest.mark.parametrize("options", [{"power": 0}, {"theta": -0.1}, {"theta": 1.1}, {"power": "3"}])
def test_what_is_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"`{name}` must be .*Received: {name}="):
        Feather(0.5, **options)
    with pytest.raises(ValueError, match=r"holds .*`theta`.*Received: "):
        Feather.from_config({"schedule": None})
