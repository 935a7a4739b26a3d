"""Uniform, ER and ERK: exact totals, hand formulas, and the bounds of every kernel."""

import math

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_sparse_ortho as kso
from keras_sparse_ortho.budgets import Budget, allocate, er, erk, fit_structure, lift, uniform
from keras_sparse_ortho.errors import BudgetError, DensityError, UnknownWeightError
from keras_sparse_ortho.initializers import ExactOrthogonal, KernelLayout, RamanujanOrthogonal
from keras_sparse_ortho.orthogonal import (
    Block,
    NByM,
    covering_count,
    dead_outputs,
    exact_orthogonal,
    least_count,
)

pytestmark = pytest.mark.numpy_only


L = keras.layers
# Of which no output need be alive.
PUBLISHED = ExactOrthogonal(start="published", seed=0)


class Weight:
    """What `allocate` asks of a weight."""

    def __init__(self, path, shape, layout=None):
        self.path, self.shape, self.layout = path, shape, layout
        self.size = math.prod(shape)


def mlp(*widths):
    layers = [L.Dense(width, name=f"d{k}") for k, width in enumerate(widths[1:])]
    return keras.Sequential([keras.Input((widths[0],)), *layers])


def convnet():
    return keras.Sequential(
        [
            keras.Input((8, 8, 16)),
            L.Conv2D(32, 3, name="wide"),
            L.Conv2D(24, (1, 5), groups=4, padding="same", name="grouped"),
            L.DepthwiseConv2D(3, name="depthwise"),
            L.Conv2DTranspose(8, 2, name="transposed"),
            L.Flatten(),
            L.Dense(10, name="head"),
        ]
    )


# --- totals -----------------------------------------------------------------------------------

SHAPES = [
    ((20, 30), None),
    ((1, 17), None),
    ((300, 100), None),
    ((3, 3, 8, 16), None),
    ((3, 3, 24, 1), KernelLayout.depthwise()),
    ((3, 3, 4, 12), KernelLayout.convolution(groups=3)),
    ((16, 64), KernelLayout.recurrent(4)),
    ((4, 8, 24), KernelLayout.einsum("abde,dec->abc")),
]


@given(
    kinds=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=8),
    density=st.floats(1e-3, 1.0),
    seed=st.randoms(use_true_random=False),
    orthogonal=st.booleans(),
)
@settings(max_examples=100)
def test_the_global_count_is_exact_and_no_bound_is_passed(kinds, density, seed, orthogonal):
    weights = [Weight(f"w{k}", *kind) for k, kind in enumerate(kinds)]
    relative = [seed.uniform(1e-3, 1.0) for _ in weights]
    size = sum(weight.size for weight in weights)
    lower = [least_count(w.shape, w.layout) if orthogonal else 1 for w in weights]
    if round(density * size) < sum(lower):
        with pytest.raises(BudgetError, match=f"is {sum(lower) / size:.6g}.*Received: density="):
            allocate(weights, density, relative, orthogonal=orthogonal)
        return
    budget = allocate(weights, density, relative, orthogonal=orthogonal)
    assert budget.size == size
    assert budget.live == round(density * size)
    upper = [w.size for w in weights]
    if orthogonal:
        covering = [
            max(least_count(w.shape, w.layout), covering_count(w.shape, w.layout)) for w in weights
        ]
        if budget.live >= sum(covering):
            lower = covering
        else:
            upper = covering
    for weight, least, most in zip(weights, lower, upper, strict=True):
        assert least <= budget.counts[weight.path] <= most
    # Between the bounds all have the same scale, up to the rounding by one entry.
    free = [
        (budget.counts[w.path], share * w.size)
        for w, share, least, most in zip(weights, relative, lower, upper, strict=True)
        if least < budget.counts[w.path] < most
    ]
    low = max(((count - 1) / share for count, share in free), default=0.0)
    high = min(((count + 1) / share for count, share in free), default=math.inf)
    assert low < high


@pytest.mark.parametrize(
    ("density", "relative", "expected"),
    [
        (0.5, (1, 1, 1), [11, 3, 7]),  # shares 10.5, 3.5, 7: the tie goes to the earlier one
        (0.3, (1, 1, 1), [7, 2, 4]),  # 13 entries, shares 6.5, 2.17, 4.33
        (0.5, (2, 1, 1), [14, 2, 5]),  # 21 entries, shares 14, 2.33, 4.67
    ],
)
def test_counts_go_by_largest_remainder(density, relative, expected):
    weights = [Weight("a", (3, 7)), Weight("b", (1, 7)), Weight("c", (2, 7))]
    budget = allocate(weights, density, relative, orthogonal=False)
    assert list(budget.counts.values()) == expected


# --- hand formulas ------------------------------------------------------------------------------


def check_proportional(budget, shares):
    """Counts are those shares of the total, but for rounding."""
    total = math.fsum(shares.values())
    assert list(budget.counts) == list(shares)
    for path, share in shares.items():
        assert abs(budget.counts[path] - budget.live * share / total) < 1


def test_er_by_hand():
    # density ~ (in + out) / (in out), so the count ~ in + out
    budget = er(mlp(200, 100, 50, 40), 0.1)
    assert budget.live == 2700
    check_proportional(budget, {"d0/kernel": 300, "d1/kernel": 150, "d2/kernel": 90})
    assert budget.lifted == ()


def test_er_leaves_the_taps_out_and_erk_does_not():
    model = keras.Sequential(
        [keras.Input((8, 8, 64)), L.Conv2D(64, 3, name="a"), L.Conv2D(32, 5, name="b")]
    )
    by_taps = {"a/kernel": 9 * (64 + 64), "b/kernel": 25 * (64 + 32)}
    check_proportional(er(model, 0.02), by_taps)
    by_kernel = {"a/kernel": 64 + 64 + 3 + 3, "b/kernel": 64 + 32 + 5 + 5}
    check_proportional(erk(model, 0.002), by_kernel)


def test_erk_of_other_layouts_by_hand():
    # Groups: (out + in / groups + taps) / size. Depthwise: (channels + multiplier + taps) / size.
    # Attention: heads and features flattened. Gates: all of them are outputs.
    inputs = keras.Input((12, 40))
    x = L.MultiHeadAttention(4, 10, name="mha")(inputs, inputs)
    x = L.Conv1D(60, 3, groups=4, name="grouped")(x)
    x = L.DepthwiseConv1D(5, name="depthwise")(x)
    model = keras.Model(inputs, L.LSTM(20, name="lstm")(x))
    budget = erk(model, 0.12, orthogonal=False)
    shares = {"mha/" + name: 40 + 40 for name in ("query", "key", "value", "attention_output")}
    shares = {f"{path}/kernel": share for path, share in shares.items()}
    shares["grouped/kernel"] = 60 + 10 + 3
    shares["depthwise/kernel"] = 60 + 1 + 5
    shares["lstm/lstm_cell/kernel"] = 60 + 80
    shares["lstm/lstm_cell/recurrent_kernel"] = 20 + 80
    check_proportional(budget, shares)


def test_kernels_that_would_pass_density_one_are_dense_and_the_rest_is_rescaled():
    # in + out = 1100, 110, 14: at density 0.2 the last two would pass 1 (one after the other).
    budget = er(mlp(1000, 100, 10, 4), 0.2)
    total = round(0.2 * (100_000 + 1000 + 40))
    assert budget.counts == {"d0/kernel": total - 1040, "d1/kernel": 1000, "d2/kernel": 40}


def test_rescaling_goes_on_until_none_passes_one():
    # Shares at first 1.6 : 0.9 : ... so that the second only passes 1 after the first is capped.
    weights = [Weight("a", (10, 10)), Weight("b", (10, 10)), Weight("c", (20, 50))]
    budget = allocate(weights, 0.25, [1.0, 0.6, 0.1], orthogonal=False)
    # a: 300 * 1 / 2.6 = 115 > 100; then b: 200 * .6 / 1.6 = 75 ... c: 125
    assert list(budget.counts.values()) == [100, 75, 125]
    budget = allocate(weights, 0.35, [1.0, 0.6, 0.1], orthogonal=False)
    # a: 420 / 2.6 = 162; then b: 320 * .6 / 1.6 = 120 > 100; c gets what is left
    assert list(budget.counts.values()) == [100, 100, 220]


def test_bounds_are_fixed_where_more_is_at_stake():
    # Shares 60 : 20 : 20 of 100. The first would pass its 55 entries by 5, the second lacks 20 of
    # the 40 that it needs; once it has them, the first no longer passes.
    weights = [Weight("a", (1, 55)), Weight("b", (40, 40)), Weight("c", (1, 100))]
    budget = allocate(weights, 100 / 1755, [60 / 55, 20 / 1600, 20 / 100], orthogonal=True)
    assert list(budget.counts.values()) == [45, 40, 15]


# --- the least orthogonal density -----------------------------------------------------------------


def test_kernels_below_the_least_orthogonal_density_are_lifted_and_the_rest_pays():
    # Uniform 0.03: the head (64 x 10) would get 19 of the 10 entries it needs, the middle one
    # (16 x 64) 31 of 16, and d0 (500 x 16) 240 of 16: none is lifted.
    model = mlp(500, 16, 64, 10)
    assert uniform(model, 0.03, orthogonal=PUBLISHED).lifted == ()
    # At 0.012: 96, 12.3 and 7.7 entries wanted, 16, 16 and 10 needed.
    budget = uniform(model, 0.012, orthogonal=PUBLISHED)
    assert budget.lifted == ("d1/kernel", "d2/kernel")
    total = round(0.012 * (8000 + 1024 + 640))
    assert budget.counts == {"d0/kernel": total - 26, "d1/kernel": 16, "d2/kernel": 10}
    assert budget.lifted_from == {"d1/kernel": 12, "d2/kernel": 8}
    assert repr(budget).count("(lifted from ") == 2
    lines = repr(budget).splitlines()
    assert "lifted" not in lines[1]
    assert lines[2].split()[:2] == ["d1/kernel", "0.015625"]
    # Without the bound each has its share, and nothing is called lifted.
    free = uniform(model, 0.012, orthogonal=False)
    assert free.counts == {"d0/kernel": 96, "d1/kernel": 12, "d2/kernel": 8}
    assert free.lifted == ()


def test_only_what_was_raised_is_called_lifted():
    model = mlp(100, 2, 4)  # 200 and 8 entries, of which 2 are needed in each

    def lifted(density):
        return uniform(model, density, orthogonal=PUBLISHED).lifted

    assert lifted(0.15) == ("d1/kernel",)  # a share of 1.2 entries
    assert lifted(0.2) == ()  # of 1.6, which rounds to 2
    assert lifted(0.25) == ()  # of exactly 2


def test_less_than_all_kernels_need_is_refused_with_the_least_density():
    model = mlp(500, 16, 64, 10)
    least = (16 + 16 + 10) / 9664
    with pytest.raises(BudgetError, match=rf"{least:.6g}\. Most needs .d0.*density=0.004"):
        erk(model, 0.004)
    assert erk(model, 42 / 9664).counts == {"d0/kernel": 16, "d1/kernel": 16, "d2/kernel": 10}
    with pytest.raises(BudgetError, match="a live entry in every weight"):
        erk(model, 2 / 9664, orthogonal=False)


# --- choosing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"include": "d1/kernel"}, ["d1/kernel"]),  # a path
        ({"include": "d1"}, ["d1/kernel"]),  # a layer
        ({"include": ["d0", "d2/kernel"]}, ["d0/kernel", "d2/kernel"]),
        ({"include": r"d[12]/.*"}, ["d1/kernel", "d2/kernel"]),  # a regular expression
        ({"include": lambda w: w.size > 500}, ["d0/kernel", "d1/kernel"]),  # a predicate
        ({"exclude": "d0"}, ["d1/kernel", "d2/kernel"]),
        ({"exclude": lambda w: w.shape[-1] == 10}, ["d0/kernel", "d1/kernel"]),
        ({"include": r"d\d/kernel", "exclude": ["d1", "d2"]}, ["d0/kernel"]),
        ({"include": r"^d[01]"}, ["d0/kernel", "d1/kernel"]),
        ({"exclude": "1/kernel$"}, ["d0/kernel", "d2/kernel"]),
    ],
)
@pytest.mark.parametrize("rule", [uniform, er, erk])
def test_the_budget_is_over_what_is_chosen(rule, chosen, expected):
    budget = rule(mlp(100, 50, 20, 10), 0.4, **chosen)
    assert list(budget) == expected
    assert budget.live == round(0.4 * budget.size)


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize("name", ["d7", "d1/bias", "d", "kernel", "((", "^kernel"])
def test_names_that_no_weight_has_are_refused(argument, name):
    with pytest.raises(UnknownWeightError, match=rf"`{argument}` names no prunable weight.*d0/ker"):
        erk(mlp(10, 10), 0.5, **{argument: name})


def test_a_pattern_that_matches_a_part_is_told_how_to_match():
    with pytest.raises(UnknownWeightError, match=r"r'.\*kern.\*' names 'd0/kernel'\. Received"):
        erk(mlp(10, 10), 0.5, include="kern")


@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, math.nan, "0.1", True, None])
@pytest.mark.parametrize("rule", [uniform, er, erk])
def test_what_is_no_density_is_refused(rule, density):
    with pytest.raises(DensityError, match=r"`density` .*must be in .*Received: density="):
        rule(mlp(10, 10), density)


def test_nothing_to_share_among():
    bare = keras.Sequential([keras.Input((4,)), L.BatchNormalization()])
    for rule in (er, erk, uniform):
        with pytest.raises(BudgetError, match="no weights to share"):
            rule(bare, 0.5)
    with pytest.raises(BudgetError, match="no weights to share"):
        erk(mlp(10, 10), 0.5, exclude="d0")


def test_a_unit_that_just_fits_goes_to_the_kernel_that_lacks_most():
    model = keras.Sequential([keras.Input((32,)), *(L.Dense(32, name=name) for name in "ab")])
    weights = kso.prunable_weights(model)
    pattern = ExactOrthogonal(0.5, structure=kso.Block(4, 4), seed=0)
    # Of the unit of 16 entries the first has 4 too many and the second 12: together one unit.
    plan = kso.Budget({"a/kernel": 516 / 1024, "b/kernel": 524 / 1024})
    found = fit_structure(plan.for_weights(weights), weights, dict.fromkeys(plan, pattern))
    assert found.counts == {"a/kernel": 512, "b/kernel": 528}


def two_layers():
    layers = [L.Dense(64, name="wide"), L.Dense(8, name="head")]
    return keras.Sequential([keras.Input((16,)), *layers])


def test_the_lift_by_hand_and_in_words():
    # Uniform: 0.05 * (1024, 512) = 51, 26; the wide kernel needs 64 for all of its outputs.
    budget = uniform(two_layers(), 0.05)
    assert budget.counts == {"wide/kernel": 64, "head/kernel": 13}
    assert budget.lifted_from == {"wide/kernel": 51}
    assert budget.lifted == ("wide/kernel",)
    assert "64 of 1024  (lifted from 51)" in repr(budget)
    assert repr(budget).count("lifted") == 1
    # At 0.03 there are 46 for both: 16 and 8 at least, and no more than 64 and 8.
    scarce = uniform(two_layers(), 0.03)
    assert scarce.counts == {"wide/kernel": 38, "head/kernel": 8}
    assert scarce.lifted_from == {"wide/kernel": 31}
    published = uniform(two_layers(), 0.03, orthogonal=ExactOrthogonal(start="published"))
    assert published.counts == {"wide/kernel": 31, "head/kernel": 15}
    assert published.lifted == ()


def test_lifting_a_given_budget():
    given_ = Budget({"wide/kernel": 0.02, "head/kernel": 0.4})
    lifted = lift(two_layers(), given_)
    assert lifted.lifted_from == {"wide/kernel": 20}
    assert lifted.counts == {"wide/kernel": 64, "head/kernel": 161}
    assert lifted.live == given_.for_weights(kso.prunable_weights(two_layers())).live
    published = lift(two_layers(), given_, ExactOrthogonal(start="published"))
    assert published.counts["wide/kernel"] == 20


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
