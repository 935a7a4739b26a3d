"""Equal norms: every output of a wide kernel has the same; orthogonal and counted as ever."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal import (
    KernelLayout,
    Rotations,
    covering_count,
    dead_outputs,
    exact_orthogonal,
    least_count,
)
from keras_sparse_ortho.orthogonal._equal_norms import (
    draw_within_classes,
    equal_norms_count,
    equal_norms_start,
)
from keras_sparse_ortho.orthogonal._product import rotate_rows
from keras_sparse_ortho.orthogonal._supports import Supports

pytestmark = pytest.mark.numpy_only

SIDE = st.one_of(st.integers(1, 48), st.sampled_from([31, 37, 53, 64]))


def product(rows, width, *sequences):
    columns = np.eye(width, rows)
    for sequence in sequences:
        rotate_rows(columns, sequence)
    return columns.T


@given(
    taps=st.sampled_from([(), (), (3,), (3, 3), (2, 1, 3)]),
    inputs=SIDE,
    outputs=SIDE,
    share=st.floats(0.0, 1.0),
    gain=st.sampled_from([1.0, 0.5]),
    place=st.sampled_from(["center", "shift", "cascade"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_outputs_have_equal_norms(taps, inputs, outputs, share, gain, place, seed):
    shape = (*taps, inputs, outputs)
    least, size = least_count(shape, norms="equal"), math.prod(shape)
    count = least + round(share**2 * (size - least))
    kernel, mask = exact_orthogonal(
        shape, count / size, norms="equal", taps=place, gain=gain, seed=seed
    )
    assert mask.sum() == count
    assert not kernel[~mask].any()
    assert dead_outputs(kernel) == 0
    squares = (kernel.astype(np.float64) ** 2).reshape(-1, outputs).sum(axis=0)
    np.testing.assert_allclose(squares, gain**2 * min(1.0, inputs / outputs), rtol=1e-6)
    # The coefficients of K(z) K(1/z)^T or its transpose at shift zero: the sum over taps.
    matrices = kernel.astype(np.float64).reshape(-1, inputs, outputs)
    rule = "uio,ujo->ij" if inputs <= outputs else "uio,uip->op"
    gram = np.einsum(rule, matrices, matrices)
    np.testing.assert_allclose(gram, gain**2 * np.eye(len(gram)), atol=1e-6)


@given(rows=st.integers(1, 60), more=st.integers(0, 120), seed=st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_the_start_and_rotations_within_its_classes(rows, more, seed):
    width = rows + 1 + more
    rng = np.random.default_rng(seed)
    start, classes = equal_norms_start(rows, width, rng)
    supports = Supports(rows, width)
    supports.apply(start)
    assert supports.live == equal_norms_count(rows, width)
    within = draw_within_classes(classes, 3 * width, rng)
    assert (classes[within.first] == classes[within.second]).all()
    assert (within.first != within.second).all()
    for sequences in ((start,), (start, within)):
        matrix = product(rows, width, *sequences)
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(rows), atol=1e-12)
        np.testing.assert_allclose((matrix**2).sum(axis=0), rows / width, rtol=1e-12)
        for k in range(classes.max() + 1):
            part = matrix[:, classes == k]
            gram = part.T @ part
            np.testing.assert_allclose(gram, np.eye(len(gram)) * rows / width, atol=1e-12)


def test_every_column_of_a_class_is_rotated_with_every_other():
    classes = np.array([0, 1, 0, 2, 0, 1])
    drawn = draw_within_classes(classes, 6000, np.random.default_rng(0))
    counts = np.zeros((6, 6))
    np.add.at(counts, (drawn.first, drawn.second), 1)
    assert counts[3].sum() == counts[:, 3].sum() == 0
    # Five columns that have another one are equally likely; so are the others of its class.
    for column, others in ((0, [2, 4]), (2, [0, 4]), (4, [0, 2])):
        assert abs(counts[column].sum() - 1200) < 150
        assert all(abs(counts[column, k] - 600) < 110 for k in others)
    assert abs(counts[1, 5] - 1200) < 150
    assert abs(counts[5, 1] - 1200) < 150


def test_the_start_has_the_fewest_entries_that_any_such_matrix_has():
    for rows, width in ((1, 7), (3, 7), (27, 64), (100, 256), (64, 128), (1000, 4099)):
        fewest = width + 2 * (rows - math.gcd(rows, width))
        assert equal_norms_count(rows, width) == fewest
    # Below twice as many columns as rows somewhat more, but for small matrices not.
    assert [equal_norms_count(n, n + 1) for n in (2, 3)] == [5, 8]
    for rows, width in ((100, 101), (96, 160), (784, 1000)):
        fewest = width + 2 * (rows - math.gcd(rows, width))
        assert fewest < equal_norms_count(rows, width) <= width * (2 + math.log2(width))


def test_least_counts():
    assert least_count((100, 256), norms="equal") == 448
    assert least_count((256, 100), norms="equal") == 100
    assert least_count((64, 64), norms="equal") == 64
    assert least_count((20, 160), KernelLayout.recurrent(4), norms="equal") == 160
    assert least_count((3, 3, 12, 3), KernelLayout.depthwise(), norms="equal") == 36
    strided = KernelLayout.convolution(strides=2)
    assert least_count((3, 3, 8, 64), strided, norms="equal", taps="shift") == 64


def test_too_few_entries_are_refused_with_what_is_possible():
    shape = (100, 256)
    message = r"equal norms only from 448 live entries on: the least density is 0\.0175\. "
    with pytest.raises(
        DensityError, match=message + r"With norms=None .* from 0\.01 on\. Received"
    ):
        exact_orthogonal(shape, 447 / 25600, norms="equal")
    with pytest.raises(DensityError, match=message + r"Received: density=0.005 \(128 entries\)"):
        exact_orthogonal(shape, 0.005, norms="equal")
    assert covering_count(shape) == 256
    exact_orthogonal(shape, 448 / 25600, norms="equal", seed=0)


@pytest.mark.parametrize("shape", [(30, 90), (100, 256), (48, 64), (60, 61), (256, 640), (1, 9)])
def test_dense_kernels_and_supports(shape):
    kernel, mask = exact_orthogonal(shape, 1.0, norms="equal", seed=1)
    assert mask.all()
    assert np.count_nonzero(kernel) == kernel.size
    for density in (0.1, 0.3, 0.7):
        count = round(density * math.prod(shape))
        if count >= least_count(shape, norms="equal"):
            kernel, mask = exact_orthogonal(shape, density, norms="equal", seed=1)
            assert mask.sum() == count
            # A rotation of columns adds at most an entry in each row, one of rows in each column.
            assert count - np.count_nonzero(kernel) < max(shape)


def test_large_kernels_go_through_the_sparse_product():
    for shape in ((256, 1024), (300, 700)):
        kernel, _ = exact_orthogonal(shape, 0.05, norms="equal", seed=2, dtype=np.float64)
        np.testing.assert_allclose(kernel @ kernel.T, np.eye(shape[0]), atol=1e-12)
        np.testing.assert_allclose((kernel**2).sum(axis=0), shape[0] / shape[1], rtol=1e-12)


def test_square_and_tall_kernels_are_as_without():
    for shape in ((40, 40), (60, 25), (3, 3, 30, 20)):
        equal, mask = exact_orthogonal(shape, 0.2, norms="equal", seed=3)
        plain, plain_mask = exact_orthogonal(shape, 0.2, seed=3)
        np.testing.assert_array_equal(equal, plain)
        np.testing.assert_array_equal(mask, plain_mask)


def test_each_group_and_gate_has_equal_norms():
    for layout, shape in (
        (KernelLayout.recurrent(4), (12, 160)),
        (KernelLayout.convolution(groups=4), (3, 6, 80)),
    ):
        kernel, _ = exact_orthogonal(shape, 0.4, layout=layout, norms="equal", seed=0)
        squares = (kernel.astype(np.float64) ** 2).reshape(-1, shape[-1]).sum(axis=0)
        rows, columns = layout.matrix_shape(shape)
        np.testing.assert_allclose(squares, rows / columns, rtol=1e-6)


def test_rows_of_supports():
    supports = Supports(5, 9)
    supports.apply(Rotations.draw(9, 12, np.random.default_rng(0)))
    live = [[bits >> row & 1 for bits in supports._bits] for row in range(5)]
    by_row = supports.transposed(5)
    assert by_row.live == supports.live
    assert [[bits >> k & 1 for k in range(9)] for bits in by_row._bits] == live
