"""Budgets that leave no output of an orthogonal kernel dead, where the count allows."""

import math

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_sparse_ortho as kso
from keras_sparse_ortho.budgets import Budget, allocate, fit_structure, lift, uniform
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.initializers import ExactOrthogonal, KernelLayout, RamanujanOrthogonal
from keras_sparse_ortho.orthogonal import (
    Block,
    NByM,
    covering_count,
    dead_outputs,
    exact_orthogonal,
    least_count,
)

L = keras.layers
pytestmark = pytest.mark.core


class Weight:
    """What budgets ask of a weight."""

    def __init__(self, path, shape, layout=None):
        self.path, self.shape, self.layout = path, shape, layout
        self.size = math.prod(shape)


KINDS = [
    ((20, 30), None),
    ((1, 17), None),
    ((60, 20), None),
    ((3, 3, 8, 16), KernelLayout.convolution()),
    ((3, 3, 24, 2), KernelLayout.depthwise()),
    ((3, 3, 4, 12), KernelLayout.convolution(groups=3)),
    ((16, 128), KernelLayout.recurrent(4)),
]


@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=6),
    density=st.floats(1e-3, 0.3),
    seed=st.randoms(use_true_random=False),
)
@settings(max_examples=60)
def test_as_few_outputs_are_dead_as_the_count_allows(kinds, density, seed):
    weights = [Weight(f"w{k}", *kind) for k, kind in enumerate(kinds)]
    relative = [seed.uniform(1e-3, 1.0) for _ in weights]
    least = [least_count(w.shape, w.layout) for w in weights]
    enough = [
        max(covering_count(w.shape, w.layout), few) for w, few in zip(weights, least, strict=True)
    ]
    total = round(density * sum(w.size for w in weights))
    pattern = ExactOrthogonal(seed=0)
    if total < sum(least):
        with pytest.raises(BudgetError, match="exactly orthogonal kernels"):
            allocate(weights, density, relative, orthogonal=pattern)
        return
    budget = allocate(weights, density, relative, orthogonal=pattern)
    assert budget.live == total
    for w, few, full in zip(weights, least, enough, strict=True):
        count = budget.counts[w.path]
        if total >= sum(enough):
            assert full <= count <= w.size
        else:
            assert few <= count <= full
        kernel, _ = exact_orthogonal(w.shape, budget[w.path], layout=w.layout, seed=0)
        if count >= full:
            assert dead_outputs(kernel, w.layout) == 0


def mlp():
    layers = [L.Dense(64, name="wide"), L.Dense(8, name="head")]
    return keras.Sequential([keras.Input((16,)), *layers])


def test_the_lift_by_hand_and_in_words():
    # Uniform: 0.05 * (1024, 512) = 51, 26; the wide kernel needs 64 for all of its outputs.
    budget = uniform(mlp(), 0.05)
    assert budget.counts == {"wide/kernel": 64, "head/kernel": 13}
    assert budget.lifted_from == {"wide/kernel": 51}
    assert budget.lifted == ("wide/kernel",)
    assert "64 of 1024  (lifted from 51)" in repr(budget)
    assert repr(budget).count("lifted") == 1
    # At 0.03 there are 46 for both: 16 and 8 at least, and no more than 64 and 8.
    scarce = uniform(mlp(), 0.03)
    assert scarce.counts == {"wide/kernel": 38, "head/kernel": 8}
    assert scarce.lifted_from == {"wide/kernel": 31}
    published = uniform(mlp(), 0.03, orthogonal=ExactOrthogonal(start="published"))
    assert published.counts == {"wide/kernel": 31, "head/kernel": 15}
    assert published.lifted == ()


def test_lifting_a_given_budget():
    given_ = Budget({"wide/kernel": 0.02, "head/kernel": 0.4})
    lifted = lift(mlp(), given_)
    assert lifted.lifted_from == {"wide/kernel": 20}
    assert lifted.counts == {"wide/kernel": 64, "head/kernel": 161}
    assert lifted.live == given_.for_weights(kso.prunable_weights(mlp())).live
    published = lift(mlp(), given_, ExactOrthogonal(start="published"))
    assert published.counts["wide/kernel"] == 20


def test_files_keep_what_was_lifted_from_where(tmp_path):
    budget = uniform(mlp(), 0.05)
    for name in ("budget.csv", "budget.json"):
        budget.save(tmp_path / name)
        assert Budget.load(tmp_path / name).lifted_from == {"wide/kernel": 51}
    older = Budget({"a": 0.5}, {"a": 8}, ["a"])
    assert older.lifted_from == {"a": None}
    assert repr(older).endswith("4 of 8  (lifted)>")
    older.save(tmp_path / "older.csv")
    assert Budget.load(tmp_path / "older.csv").lifted_from == {"a": None}


def test_a_layout_of_the_initializer_counts():
    weight = Weight("w", (16, 64), KernelLayout.dense())
    gates = ExactOrthogonal(layout=KernelLayout.recurrent(4), seed=0)
    with pytest.raises(BudgetError, match=f"is {64 / 1024:.6g}.*Received"):
        allocate([weight], 0.05, [1.0], orthogonal=gates)
    assert allocate([weight], 0.05, [1.0], orthogonal=True).live == 51


STRUCTURES = [
    *(Block(4, 1), Block(1, 4), Block(4, 4, regular=True), NByM(2, 4)),
]


@pytest.mark.parametrize("structure", STRUCTURES)
def test_structures_cover_where_they_can(structure):
    weights = [Weight("wide", (16, 64)), Weight("tall", (64, 16))]
    pattern = ExactOrthogonal(structure=structure, seed=0)
    patterns = dict.fromkeys(("wide", "tall"), pattern)
    shape = (1, 1, 16, 64)
    enough = structure.covering(shape) + structure.least((1, 1, 64, 16))
    plan = Budget({"wide": 16 / 1024, "tall": (enough + 8) / 1024}, {"wide": 1024, "tall": 1024})
    fitted = fit_structure(plan, weights, patterns)
    assert structure.covering(shape) <= fitted.counts["wide"]
    assert plan.live - min(map(structure.unit, (shape, (1, 1, 64, 16)))) < fitted.live <= plan.live
    assert fitted.lifted_from["wide"] == 16
    kernel, _ = exact_orthogonal((16, 64), fitted["wide"], structure=structure, seed=0)
    assert dead_outputs(kernel) == 0


def test_what_else_draws_orthogonal_kernels():
    assert RamanujanOrthogonal(2).least_counts((24, 24)) == (24, 24)
    assert kso.initializers.RandomSparse(0.5).least_counts((24, 48)) == (1, 1)
    assert ExactOrthogonal().least_counts((24, 48)) == (24, 48)
    assert ExactOrthogonal(start="published").least_counts((24, 48)) == (24, 24)
