"""Approximate isometry: never upwards, to the optimum of a long run, and what is refused."""

import types

import numpy as np
import pytest

from keras_sparse_ortho.orthogonal import (
    KernelLayout,
    approximate_isometry,
)

pytestmark = pytest.mark.numpy_only


def problem(shape, density, seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < density
    return rng.normal(size=shape, scale=1 / np.sqrt(density * max(shape))), mask


def error(matrix, gain=1.0):
    """Of one matrix, in its own terms: the Frobenius error for each of its shorter side."""
    short = min(matrix.shape)
    gram = matrix @ matrix.T if matrix.shape[0] == short else matrix.T @ matrix
    return np.linalg.norm(gram / gain**2 - np.eye(short)) / np.sqrt(short)


@pytest.mark.parametrize(
    ("shape", "density"), [((12, 12), 0.3), ((8, 30), 0.2), ((30, 8), 0.5)]
)
def test_the_error_never_rises(shape, density):
    start, mask = problem(shape, density)
    settings = {"gain": 2.0, "tolerance": 0.0, "min_decrease": 0.0}
    kernels = [
        approximate_isometry(2.0 * start, mask, max_iterations=k, **settings)
        for k in range(1, 15)
    ]
    errors = [
        error(2.0 * start * mask, 2.0),
        *(error(kernel, 2.0) for kernel in kernels),
    ]
    assert np.diff(errors).max() <= 0
    assert errors[1] < errors[0]
    kernel = kernels[-1]
    assert not kernel[~mask].any()


def test_the_gradient_is_that_of_the_objective(monkeypatch):
    """L-BFGS gets along with a wrong scale, only slower."""
    seen = {}

    def minimize(objective, start, **options):
        _, slope = objective(start)
        step = 1e-6 * np.random.default_rng(0).normal(size=start.shape)
        seen["rise"] = objective(start + step)[0] - objective(start - step)[0]
        seen["expected"] = 2.0 * slope @ step
        return types.SimpleNamespace(x=start)

    monkeypatch.setattr("scipy.optimize.minimize", minimize)
    start, mask = problem((8, 20), 0.4)
    approximate_isometry(start, mask, gain=1.5)
    assert seen["rise"] == pytest.approx(seen["expected"], rel=1e-5)


def test_the_optimum_of_masks_without_an_isometry():
    # Two of five rows share their only input a: min of (a^2 + b^2 - 1)^2 as one row, so that
    # of the two squared singular values one is 1 and one 0.
    mask = np.eye(5, dtype=bool)
    mask[1] = mask[0]
    kernel = approximate_isometry(
        problem((5, 5), 1.0)[0], mask, min_decrease=0.0, tolerance=0.0
    )
    np.testing.assert_allclose(error(kernel) ** 2 * 5, 1.0, rtol=1e-9)
    np.testing.assert_allclose(
        np.linalg.svd(kernel, compute_uv=False), [1, 1, 1, 1, 0], atol=1e-6
    )


def test_stops():
    start, mask = problem((16, 24), 0.5)

    def run(**settings):
        return approximate_isometry(
            start, mask, **{"tolerance": 0, "min_decrease": 0, **settings}
        )

    history = [error(run(max_iterations=k)) for k in range(1, 33)]
    first = next(k for k, e in enumerate(history) if e <= 0.02)
    assert error(run(tolerance=0.02)) == history[first]
    ratios = np.square(history) / np.square(
        [error(start * mask), *history[:-1]]
    )
    first = next(k for k, ratio in enumerate(ratios) if ratio > 0.8)
    assert error(run(min_decrease=0.2)) == history[first]
    kernel = run(tolerance=1e-3)
    np.testing.assert_array_equal(
        approximate_isometry(kernel, mask, tolerance=1e-3), kernel
    )


def test_matrices_of_layouts():
    start, mask = problem((3, 3, 4, 12), 0.4)
    groups = KernelLayout.convolution(groups=3)
    kernel = approximate_isometry(start, mask, layout=groups)
    for k in range(3):
        assert error(kernel[..., 4 * k : 4 * k + 4].reshape(36, 4)) < 1e-4
    start, mask = problem((3, 3, 6, 1), 0.6)
    kernel = approximate_isometry(start, mask, layout=KernelLayout.depthwise())
    np.testing.assert_allclose(
        np.linalg.norm(kernel.reshape(9, 6), axis=0), 1.0, atol=1e-4
    )
    start, mask = problem((10, 40), 0.6)
    kernel = approximate_isometry(start, mask, layout=KernelLayout.recurrent(4))
    for k in range(4):
        assert error(kernel[:, 10 * k : 10 * k + 10]) < 0.5


def test_refusals():
    start, mask = problem((4, 4), 0.5)
    cases = [
        ({"mask": mask.astype(float)}, "bool array of the kernel's shape"),
        ({"mask": mask[:3]}, r"shape \(3, 4\)"),
        ({"mask": np.zeros((4, 4), bool)}, "with at least one live entry"),
        ({"kernel": start * np.inf}, "must be finite"),
        ({"gain": 0.0}, "Received: gain=0.0"),
        ({"max_iterations": 0}, "Received: max_iterations=0"),
        ({"tolerance": -1.0}, "Received: tolerance=-1.0"),
        ({"min_decrease": 1.0}, "min_decrease=1.0"),
    ]
    for change, message in cases:
        with (
            pytest.raises(ValueError, match=message),
            np.errstate(invalid="ignore"),
        ):
            approximate_isometry(**{"kernel": start, "mask": mask, **change})
