"""The covering start: no output and no input is zero, as far as the count allows."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.orthogonal import (
    KernelLayout,
    covering_count,
    dead_outputs,
    exact_orthogonal,
    least_count,
)
from keras_sparse_ortho.orthogonal._eoi import covering_rotations

pytestmark = pytest.mark.numpy_only


def dead_inputs(kernel):
    """Of a kernel `(*spatial, in, out)` that is one matrix at each tap."""
    return int((~kernel.any(axis=(*range(kernel.ndim - 2), kernel.ndim - 1))).sum())


@given(
    taps=st.lists(st.integers(1, 3), max_size=3),
    inputs=st.one_of(st.integers(1, 30), st.sampled_from([1, 31, 53])),
    outputs=st.one_of(st.integers(1, 30), st.sampled_from([1, 37, 60])),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_every_entry_of_the_count_goes_to_an_output_and_input_of_its_own_first(
    taps, inputs, outputs, share, seed
):
    shape = (*taps, inputs, outputs)
    least, size = least_count(shape), math.prod(shape)
    # Half of the draws between the least count and twice what covers all.
    count = least + round(share * min(2 * max(inputs, outputs), size - least))
    kernel, mask = exact_orthogonal(shape, count / size, seed=seed)
    assert mask.sum() == count
    assert dead_outputs(kernel) == max(0, covering_count(shape) - count)
    assert dead_inputs(kernel) == (max(0, inputs - count) if inputs > outputs else 0)
    center = kernel[tuple((size - 1) // 2 for size in taps)].astype(np.float64)
    center = center if inputs <= outputs else center.T
    np.testing.assert_allclose(center @ center.T, np.eye(len(center)), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((3, 3, 4, 64), KernelLayout.convolution(groups=4)),
        ((8, 160), KernelLayout.recurrent(4)),
        ((3, 3, 12, 3), KernelLayout.depthwise()),
        ((3, 48, 20), KernelLayout.transposed_convolution()),
        ((16, 4, 10), KernelLayout.einsum("abc,cde->abde")),
    ],
)
def test_groups_gates_and_depthwise_kernels_are_covered(shape, layout):
    covering = covering_count(shape, layout)
    least = least_count(shape, layout)
    assert covering == layout.matrices(shape) * layout.matrix_shape(shape)[1]
    for count in (least, (least + covering) // 2, covering, 2 * covering):
        kernel, mask = exact_orthogonal(shape, count / math.prod(shape), seed=3, layout=layout)
        assert mask.sum() == count
        assert dead_outputs(kernel, layout) == max(0, covering - count)


def test_the_counts():
    assert covering_count((24, 48)) == covering_count((24, 48), inputs=True) == 48
    assert covering_count((48, 24)) == 24
    assert covering_count((48, 24), inputs=True) == 48
    assert covering_count((3, 3, 1, 24)) == 24
    assert covering_count((16, 64), KernelLayout.recurrent(4)) == 64
    assert covering_count((3, 3, 12, 3), KernelLayout.depthwise()) == 36
    assert covering_count((3, 3, 4, 8), KernelLayout.convolution(groups=2), inputs=True) == 8


def test_dead_outputs_are_counted_along_the_layout():
    mask = np.zeros((3, 3, 6, 4), dtype=bool)
    assert dead_outputs(mask) == 4
    assert dead_outputs(mask, KernelLayout.transposed_convolution()) == 6
    assert dead_outputs(mask, KernelLayout.depthwise()) == 24
    mask[2, 0, 5, 1] = True
    assert dead_outputs(mask) == 3
    assert dead_outputs(mask, KernelLayout.depthwise()) == 23


def test_the_published_start_leaves_outputs_dead():
    kernel, _ = exact_orthogonal((3, 3, 24, 48), 0.02, seed=0, start="published")
    assert dead_outputs(kernel) == 24


def test_columns_of_a_row_share_its_norm_in_a_balanced_way():
    """By `log2(r)` rotations each: if one column were rotated with all, half would end at 4^-32."""
    medians = []
    for seed in range(50):
        kernel, _ = exact_orthogonal((1, 64), 1.0, seed=seed, dtype=np.float64)
        medians.append(np.median(kernel[0] ** 2))
    # E[ln cos^2] is -2 ln 2 for a uniform angle, so that the median is about 4^-6.
    assert 4.0**-7 < np.exp(np.mean(np.log(medians))) < 4.0**-5


def test_which_columns_stay_empty_is_random():
    hits = np.zeros(20)
    for seed in range(400):
        rotations = covering_rotations(4, 20, 12, np.random.default_rng(seed))
        assert len(rotations) == 8
        assert len(set(rotations.second.tolist())) == 8
        hits[rotations.second] += 1
    assert not hits[:4].any()
    # 16 columns, 8 of them at a time: chi-square with 15 degrees of freedom, p = 0.001.
    assert ((hits[4:] - 200) ** 2 / 100).sum() * 15 / 16 < 37.7


def test_an_angle_law_holds_for_the_covering_rotations_as_well():
    kernel, _ = exact_orthogonal((8, 16), 1 / 8, seed=0, angles=0.3, dtype=np.float64)
    np.testing.assert_allclose(
        np.unique(np.abs(kernel[kernel != 0]).round(12)), [np.sin(0.3).round(12), np.cos(0.3)]
    )
