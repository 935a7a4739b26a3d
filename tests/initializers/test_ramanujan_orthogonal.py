"""SAO: orthogonal where admissible, its degree exact, and refused elsewhere."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.initializers import RamanujanOrthogonal


@pytest.mark.parametrize(("width", "degree"), [(1, 1), (12, 3), (64, 16), (30, 30)])
def test_orthogonal_with_exact_degrees(width, degree):
    kernel, mask = RamanujanOrthogonal(degree, 1.5, seed=1).sample((3, width, width))
    assert not kernel[[0, 2]].any()
    matrix = kernel[1].astype(np.float64)
    assert np.abs(matrix.T @ matrix - 2.25 * np.eye(width)).max() < 1e-6
    assert set(mask[1].sum(axis=0)) == set(mask[1].sum(axis=1)) == {degree}
    support = np.linalg.svd(mask[1].astype(float), compute_uv=False)
    np.testing.assert_allclose(support[: width // degree], degree, rtol=1e-9)


def test_relu_form():
    kernel, mask = RamanujanOrthogonal(4, seed=1, relu=True).sample((16, 16))
    eye = np.eye(8)
    np.testing.assert_allclose(kernel.T @ kernel, np.block([[eye, -eye], [-eye, eye]]), atol=1e-6)
    np.testing.assert_array_equal(mask.sum(axis=0), 4)


def test_refusals_and_configuration():
    with pytest.raises(LayoutError, match=r"degrees that do are \[4, 6\]. Received: degree=5"):
        RamanujanOrthogonal(5)((12, 12))
    with pytest.raises(LayoutError, match=r"RamanujanOrthogonal needs square kernels"):
        RamanujanOrthogonal(4)((12, 16))
    with pytest.raises(ValueError, match=r"positive integer"):
        RamanujanOrthogonal(0)
    first = RamanujanOrthogonal(4, seed=3, relu=True)
    twin = keras.initializers.get(keras.initializers.serialize(first))
    np.testing.assert_array_equal(twin.sample((16, 16))[0], first.sample((16, 16))[0])
