"""Convolutions on all taps: exact isometries, by convolving with circular padding."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.orthogonal import (
    KernelLayout,
    covering_count,
    dead_outputs,
    exact_orthogonal,
    least_count,
    to_polyphase,
)

pytestmark = pytest.mark.numpy_only


def convolve(x, kernel, strides):
    """`y[p, o] = sum K[u, i, o] x[s p + u, i]` with circular padding; `x` is `(*size, in)`."""
    axes = tuple(range(len(strides)))
    every = tuple(slice(None, None, stride) for stride in strides)
    return sum(
        np.roll(x, [-k for k in tap], axes)[every] @ kernel[tap]
        for tap in np.ndindex(kernel.shape[: len(strides)])
    )


def adjoint(y, kernel, strides):
    """The transposed map, which is a transposed convolution."""
    axes = tuple(range(len(strides)))
    size = [n * stride for n, stride in zip(y.shape, strides, strict=False)]
    wide = np.zeros((*size, y.shape[-1]))
    wide[tuple(slice(None, None, stride) for stride in strides)] = y
    return sum(
        np.roll(wide, tap, axes) @ kernel[tap].T for tap in np.ndindex(kernel.shape[: len(strides)])
    )


def check_isometry(kernel, strides, rng):
    """Of one `(*taps, in, out)` convolution, or of its adjoint if it has more inputs to keep."""
    kernel = kernel.astype(np.float64)
    *taps, inputs, outputs = kernel.shape
    size = [stride * -(-5 // stride) for stride in strides]
    reached = math.prod(map(min, taps, strides)) * inputs
    if reached <= outputs:
        x = rng.normal(size=(*size, inputs))
        for axis, (k, stride) in enumerate(zip(taps, strides, strict=True)):
            # Phases that the window does not reach are no part of the input.
            x[(slice(None),) * axis + (np.arange(size[axis]) % stride >= k,)] = 0.0
        y = convolve(x, kernel, strides)
        assert abs(np.linalg.norm(y) / np.linalg.norm(x) - 1) < 1e-6
        np.testing.assert_allclose(adjoint(y, kernel, strides), x, atol=1e-5)
    else:
        y = rng.normal(size=(*(n // s for n, s in zip(size, strides, strict=True)), outputs))
        x = adjoint(y, kernel, strides)
        assert abs(np.linalg.norm(x) / np.linalg.norm(y) - 1) < 1e-6
        np.testing.assert_allclose(convolve(x, kernel, strides), y, atol=1e-5)


@st.composite
def windows(draw, axes=(1, 3)):
    taps = draw(st.lists(st.integers(1, 4), min_size=axes[0], max_size=axes[1]))
    strides = draw(st.lists(st.integers(1, 3), min_size=len(taps), max_size=len(taps)))
    if draw(st.booleans()):
        strides = [1] * len(taps)
    return tuple(taps), tuple(strides)


def draw_kernel(shape, layout, share, **kwargs):
    least, size = least_count(shape, layout, taps=kwargs["taps"]), math.prod(shape)
    count = least + round(share**2 * (size - least))
    kernel, mask = exact_orthogonal(shape, count / size, layout=layout, **kwargs)
    assert kernel.shape == mask.shape == shape
    assert mask.sum() == count
    assert not kernel[~mask].any()
    if count >= covering_count(shape, layout, taps=kwargs["taps"]):
        assert dead_outputs(kernel, layout) == 0
    return kernel


@given(
    window=windows(),
    inputs=st.integers(1, 9),
    outputs=st.integers(1, 24),
    groups=st.sampled_from([1, 1, 2, 3]),
    share=st.floats(0.0, 1.0),
    start=st.sampled_from(["covering", "published"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_convolutions_are_isometries(window, inputs, outputs, groups, share, start, seed):
    taps, strides = window
    layout = KernelLayout.convolution(groups, strides)
    shape = (*taps, inputs, outputs * groups)
    if start == "published":
        size = math.prod(shape)
        kernel, _ = exact_orthogonal(
            shape, 1.0, layout=layout, taps="shift", start=start, seed=seed
        )
        assert kernel.size == size
    else:
        kernel = draw_kernel(shape, layout, share, taps="shift", seed=seed)
    for part in np.split(kernel, groups, axis=-1):
        check_isometry(part, strides, np.random.default_rng(seed))


@given(
    window=windows(),
    inputs=st.integers(1, 24),
    outputs=st.integers(1, 9),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_transposed_convolutions_are_isometries(window, inputs, outputs, share, seed):
    taps, strides = window
    layout = KernelLayout.transposed_convolution(strides)
    shape = (*taps, outputs, inputs)
    kernel = draw_kernel(shape, layout, share, taps="shift", seed=seed)
    # A transposed convolution is the adjoint of the convolution from its outputs to its inputs.
    check_isometry(kernel, strides, np.random.default_rng(seed))


@given(
    window=windows((1, 2)),
    channels=st.integers(1, 6),
    multiplier=st.integers(1, 6),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=50, deadline=None)
def test_depthwise_convolutions_are_isometries(window, channels, multiplier, share, seed):
    taps, strides = window
    layout = KernelLayout.depthwise(strides)
    kernel = draw_kernel((*taps, channels, multiplier), layout, share, taps="shift", seed=seed)
    for channel in range(channels):
        part = kernel[..., channel : channel + 1, :]
        check_isometry(part, strides, np.random.default_rng(seed))


@pytest.mark.parametrize("shape", [(3, 3, 16, 16), (3, 3, 24, 48), (3, 3, 48, 24), (5, 30, 30)])
def test_entries_lie_on_all_taps(shape):
    by_tap = np.zeros(shape[:-2])
    for seed in range(5):
        kernel, _ = exact_orthogonal(shape, 0.08, taps="shift", seed=seed)
        by_tap += np.count_nonzero(kernel, axis=(-2, -1))
    assert (by_tap > 0).all()


def test_the_count_of_the_kernel_is_that_of_its_nonzero_entries():
    """`d_K = d_H / taps`: the matrix has the whole count."""
    for shape, density in (((3, 3, 32, 32), 0.05), ((3, 3, 24, 48), 0.02), ((3, 3, 32, 32), 0.1)):
        kernel, mask = exact_orthogonal(shape, density, taps="shift", seed=0)
        assert mask.sum() - np.count_nonzero(kernel) < 9 * min(shape[-2:])
        assert np.count_nonzero(kernel) > 0.9 * mask.sum()
        entries = np.count_nonzero(np.abs(kernel).sum(axis=(0, 1)))
        assert entries == np.count_nonzero(kernel)


def test_matrices_and_pointwise_kernels_are_as_at_the_center():
    for shape in ((20, 50), (1, 1, 20, 50), (1, 20, 50)):
        expected, mask = exact_orthogonal(shape, 0.2, seed=4)
        kernel, same = exact_orthogonal(shape, 0.2, seed=4, taps="shift")
        np.testing.assert_array_equal(kernel, expected)
        np.testing.assert_array_equal(mask, same)


def test_polyphase_counts():
    layout = KernelLayout.convolution(strides=2)
    assert layout.polyphase_shape((3, 3, 24, 48)) == (96, 48)
    assert layout.polyphase_shape((1, 1, 24, 48)) == (24, 48)
    assert layout.polyphase_shape((3, 1, 24, 48)) == (48, 48)
    assert layout.matrix_shape((3, 3, 24, 48)) == (24, 48)
    transposed = KernelLayout.transposed_convolution((2, 3))
    assert transposed.polyphase_shape((4, 4, 5, 9)) == (9, 30)
    assert least_count((3, 3, 24, 48), layout) == 24
    assert least_count((3, 3, 24, 48), layout, taps="shift") == 48
    assert covering_count((3, 3, 24, 48), layout, taps="shift", inputs=True) == 96
    assert KernelLayout.convolution(strides=(1, 1)) == KernelLayout.convolution()
    assert KernelLayout(**layout.get_config()) == layout


def autocorrelation(matrices):
    """`sum_v A[v] A[v + w]^T` for every `w` at which places overlap, `w = 0` first."""
    places = matrices.shape[:-2]
    grams = []
    for w in np.ndindex(*(2 * k - 1 for k in places)):
        step = [a - k + 1 for a, k in zip(w, places, strict=True)]
        here = tuple(slice(max(0, -s), k - max(0, s)) for s, k in zip(step, places, strict=True))
        there = tuple(slice(max(0, s), k - max(0, -s)) for s, k in zip(step, places, strict=True))
        a, b = (part.reshape(-1, *part.shape[-2:]) for part in (matrices[here], matrices[there]))
        grams.insert(0 if not any(step) else len(grams), np.einsum("vio,vjo->ij", a, b))
    return np.stack(grams)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((3, 3, 8, 40), KernelLayout.convolution(strides=2)),
        ((3, 2, 20, 12), KernelLayout.convolution(strides=(1, 2))),
        ((3, 3, 6, 30), KernelLayout.convolution(groups=3)),
        ((4, 9, 4), KernelLayout.transposed_convolution(3)),
        ((3, 3, 5, 2), KernelLayout.depthwise(2)),
    ],
)
def test_all_coefficients_of_the_polyphase_product_are_those_of_the_identity(shape, layout):
    kernel, _ = exact_orthogonal(shape, 0.4, layout=layout, taps="shift", seed=0)
    matrices = to_polyphase(kernel, layout)
    assert matrices.shape[-2:] == layout.polyphase_shape(shape)
    assert np.count_nonzero(matrices) == np.count_nonzero(kernel)
    for index in np.ndindex(matrices.shape[:2]):
        part = matrices[index]
        if part.shape[-2] > part.shape[-1]:
            part = np.swapaxes(part, -1, -2)
        first, *others = autocorrelation(part)
        np.testing.assert_allclose(first, np.eye(len(first)), atol=1e-6)
        assert np.abs(others).max(initial=0.0) < 1e-6


def test_strides_need_more_entries_on_all_taps():
    layout = KernelLayout.convolution(strides=2)
    shape = (3, 3, 8, 64)
    exact_orthogonal(shape, 8 / 4608, layout=layout, seed=0)
    with pytest.raises(DensityError, match=r"at least 32 live entries.*With taps=\"center\" this"):
        exact_orthogonal(shape, 31 / 4608, layout=layout, taps="shift")


@pytest.mark.parametrize("strides", [0, -1, 1.5, (2, "2"), True, None, (2, 0)])
def test_bad_strides(strides):
    with pytest.raises(LayoutError, match=r"`strides` must be positive integers. Received: str"):
        KernelLayout.convolution(strides=strides)


def test_strides_of_other_ranks():
    layout = KernelLayout.convolution(strides=(2, 2))
    with pytest.raises(LayoutError, match=r"each of the 1 spatial axes .*Received: strides="):
        exact_orthogonal((3, 8, 16), 0.5, layout=layout, taps="shift")
