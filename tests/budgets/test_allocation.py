"""Uniform, ER and ERK: exact totals, hand formulas, and the bounds of every kernel."""

import math

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keras_sparse_ortho as kso
from keras_sparse_ortho.budgets import (
    Budget,
    allocate,
    er,
    erk,
    fit_structure,
    lift,
    uniform,
)
from keras_sparse_ortho.errors import (
    BudgetError,
    DensityError,
    UnknownWeightError,
)
from keras_sparse_ortho.initializers import ExactOrthogonal, KernelLayout
from keras_sparse_ortho.orthogonal import (
    Block,
    NByM,
    covering_count,
    dead_outputs,
    depthwise_outputs,
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
    layers = [
        L.Dense(width, name=f"d{k}") for k, width in enumerate(widths[1:])
    ]
    return keras.Sequential([keras.Input((widths[0],)), *layers])


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
def test_the_global_count_is_exact_and_no_bound_is_passed(
    kinds, density, seed, orthogonal
):
    weights = [Weight(f"w{k}", *kind) for k, kind in enumerate(kinds)]
    relative = [seed.uniform(1e-3, 1.0) for _ in weights]
    size = sum(weight.size for weight in weights)
    lower = [
        least_count(w.shape, w.layout) if orthogonal else 1 for w in weights
    ]
    if round(density * size) < sum(lower):
        with pytest.raises(
            BudgetError, match=f"is {sum(lower) / size:.6g}.*Received: density="
        ):
            allocate(weights, density, relative, orthogonal=orthogonal)
        return
    budget = allocate(weights, density, relative, orthogonal=orthogonal)
    assert budget.size == size
    assert budget.live == round(density * size)
    upper = [w.size for w in weights]
    if orthogonal:
        covering = [
            max(
                least_count(w.shape, w.layout),
                covering_count(w.shape, w.layout),
            )
            for w in weights
        ]
    else:  # each output of a depthwise kernel has a live entry
        covering = [
            max(1, depthwise_outputs(w.shape, w.layout)) for w in weights
        ]
    if budget.live >= sum(covering):
        lower = covering
    elif orthogonal:
        upper = covering
    for weight, least, most in zip(weights, lower, upper, strict=True):
        assert least <= budget.counts[weight.path] <= most
    # Between the bounds all have the same scale, up to the rounding by one entry.
    free = [
        (budget.counts[w.path], share * w.size)
        for w, share, least, most in zip(
            weights, relative, lower, upper, strict=True
        )
        if least < budget.counts[w.path] < most
    ]
    low = max(((count - 1) / share for count, share in free), default=0.0)
    high = min(((count + 1) / share for count, share in free), default=math.inf)
    assert low < high


THREE = [(3, 7), (1, 7), (2, 7)]
SQUARES = [(10, 10), (10, 10), (20, 50)]


@pytest.mark.parametrize(
    ("shapes", "density", "relative", "expected"),
    [
        (
            THREE,
            0.5,
            (1, 1, 1),
            [11, 3, 7],
        ),  # shares 10.5, 3.5, 7: ties go to earlier ones
        (
            THREE,
            0.3,
            (1, 1, 1),
            [7, 2, 4],
        ),  # 13 entries, shares 6.5, 2.17, 4.33
        # The first would get 300 / 2.6 = 115 of its 100; then 200 * .6 / 1.6 = 75, 125 are left.
        (SQUARES, 0.25, (1.0, 0.6, 0.1), [100, 75, 125]),
        # 420 / 2.6 = 162; then 320 * .6 / 1.6 = 120 > 100 as well.
        (SQUARES, 0.35, (1.0, 0.6, 0.1), [100, 100, 220]),
    ],
)
def test_largest_remainders_and_rescaling(shapes, density, relative, expected):
    weights = [Weight(f"w{k}", shape) for k, shape in enumerate(shapes)]
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
    check_proportional(
        budget, {"d0/kernel": 300, "d1/kernel": 150, "d2/kernel": 90}
    )
    assert budget.lifted == ()


def test_er_leaves_the_taps_out_and_erk_does_not():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 64)),
            L.Conv2D(64, 3, name="a"),
            L.Conv2D(32, 5, name="b"),
        ]
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
    names = ("query", "key", "value", "attention_output")
    shares = {f"mha/{name}/kernel": 40 + 40 for name in names}
    shares["grouped/kernel"] = 60 + 10 + 3
    shares["depthwise/kernel"] = 60 + 1 + 5
    shares["lstm/lstm_cell/kernel"] = 60 + 80
    shares["lstm/lstm_cell/recurrent_kernel"] = 20 + 80
    check_proportional(budget, shares)


def test_kernels_that_would_pass_density_one_are_dense_and_the_rest_is_rescaled():
    # in + out = 1100, 110, 14: at density 0.2 the last two would pass 1 (one after the other).
    budget = er(mlp(1000, 100, 10, 4), 0.2)
    total = round(0.2 * (100_000 + 1000 + 40))
    assert budget.counts == {
        "d0/kernel": total - 1040,
        "d1/kernel": 1000,
        "d2/kernel": 40,
    }


def test_bounds_are_fixed_where_more_is_at_stake():
    # Shares 60 : 20 : 20 of 100. The first would pass its 55 entries by 5, the second lacks 20 of
    # the 40 that it needs; once it has them, the first no longer passes.
    weights = [
        Weight("a", (1, 55)),
        Weight("b", (40, 40)),
        Weight("c", (1, 100)),
    ]
    budget = allocate(
        weights, 100 / 1755, [60 / 55, 20 / 1600, 20 / 100], orthogonal=True
    )
    assert list(budget.counts.values()) == [45, 40, 15]


# --- the least orthogonal density -----------------------------------------------------------------


WIDE = (500, 16, 64, 10)  # 16, 16 and 10 entries are needed
WIDENING = (16, 64, 8)  # 64 and 8 for all outputs, 16 and 8 at least


@pytest.mark.parametrize(
    ("widths", "density", "orthogonal", "counts", "lifted"),
    [
        (WIDE, 0.03, PUBLISHED, [240, 31, 19], {}),
        (
            WIDE,
            0.012,
            PUBLISHED,
            [90, 16, 10],
            {"d1/kernel": 12, "d2/kernel": 8},
        ),
        (WIDE, 0.012, False, [96, 12, 8], {}),  # each has its share
        (
            (100, 2, 4),
            0.15,
            PUBLISHED,
            [29, 2],
            {"d1/kernel": 1},
        ),  # a share of 1.2 entries
        ((100, 2, 4), 0.2, PUBLISHED, [40, 2], {}),  # of 1.6, which rounds to 2
        ((100, 2, 4), 0.25, PUBLISHED, [50, 2], {}),  # of exactly 2
        (WIDENING, 0.05, True, [64, 13], {"d0/kernel": 51}),
        (
            WIDENING,
            0.03,
            True,
            [38, 8],
            {"d0/kernel": 31},
        ),  # 46 for both: no more than 64 and 8
        (WIDENING, 0.03, PUBLISHED, [31, 15], {}),
    ],
)
def test_what_needs_more_than_its_share_is_lifted_and_the_rest_pays(
    widths, density, orthogonal, counts, lifted
):
    budget = uniform(mlp(*widths), density, orthogonal=orthogonal)
    assert [*budget.counts.values()] == counts
    assert budget.lifted_from == lifted
    assert budget.lifted == tuple(lifted)
    lines = repr(budget).splitlines()[1:]
    assert ["lifted from" in line for line in lines] == [
        path in lifted for path in budget
    ]


def test_less_than_all_kernels_need_is_refused_with_the_least_density():
    model = mlp(500, 16, 64, 10)
    least = (16 + 16 + 10) / 9664
    with pytest.raises(
        BudgetError,
        match=rf"{least:.6g}\. .d0/kernel. needs most.*density=0.004",
    ):
        erk(model, 0.004)
    assert erk(model, 42 / 9664).counts == {
        "d0/kernel": 16,
        "d1/kernel": 16,
        "d2/kernel": 10,
    }
    with pytest.raises(BudgetError, match="a live entry in every weight"):
        erk(model, 2 / 9664, orthogonal=False)


# --- choosing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"include": "d1"}, ["d1/kernel"]),  # a layer
        ({"include": ["d0", "d2/kernel"]}, ["d0/kernel", "d2/kernel"]),
        (
            {"include": r"d[12]/.*"},
            ["d1/kernel", "d2/kernel"],
        ),  # a regular expression
        (
            {"include": lambda w: w.size > 500},
            ["d0/kernel", "d1/kernel"],
        ),  # a predicate
        ({"exclude": "d0"}, ["d1/kernel", "d2/kernel"]),
        ({"exclude": lambda w: w.shape[-1] == 10}, ["d0/kernel", "d1/kernel"]),
        ({"include": r"d\d/kernel", "exclude": ["d1", "d2"]}, ["d0/kernel"]),
        ({"exclude": "1/kernel$"}, ["d0/kernel", "d2/kernel"]),
    ],
)
@pytest.mark.parametrize("rule", [uniform, er, erk])
def test_the_budget_is_over_what_is_chosen(rule, chosen, expected):
    budget = rule(mlp(100, 50, 20, 10), 0.4, **chosen)
    assert list(budget) == expected
    assert budget.live == round(0.4 * budget.size)


@pytest.mark.parametrize("argument", ["include", "exclude"])
@pytest.mark.parametrize(
    "name", ["d7", "d1/bias", "d", "kernel", "((", "^kernel"]
)
def test_names_that_no_weight_has_are_refused(argument, name):
    with pytest.raises(
        UnknownWeightError,
        match=rf"`{argument}` names no prunable weight.*d0/ker",
    ):
        erk(mlp(10, 10), 0.5, **{argument: name})


def test_a_pattern_that_matches_a_part_is_told_how_to_match():
    with pytest.raises(
        UnknownWeightError, match=r"r'.\*kern.\*' names 'd0/kernel'\. Received"
    ):
        erk(mlp(10, 10), 0.5, include="kern")


@pytest.mark.parametrize("density", [0.0, 1.1, None])
@pytest.mark.parametrize("rule", [uniform, er, erk])
def test_what_is_no_density_is_refused(rule, density):
    with pytest.raises(
        DensityError, match=r"`density` .*must be in .*Received: density="
    ):
        rule(mlp(10, 10), density)


def test_nothing_to_share_among():
    bare = keras.Sequential([keras.Input((4,)), L.BatchNormalization()])
    for rule in (er, erk, uniform):
        with pytest.raises(BudgetError, match="no weights to share"):
            rule(bare, 0.5)


def test_a_unit_that_just_fits_goes_to_the_kernel_that_lacks_most():
    weights = kso.prunable_weights(mlp(32, 32, 32))
    pattern = ExactOrthogonal(0.5, structure=kso.Block(4, 4), seed=0)
    # Of the unit of 16 entries the first has 4 too many and the second 12: together one unit.
    plan = kso.Budget({"d0/kernel": 516 / 1024, "d1/kernel": 524 / 1024})
    found = fit_structure(
        plan.for_weights(weights), weights, dict.fromkeys(plan, pattern)
    )
    assert found.counts == {"d0/kernel": 512, "d1/kernel": 528}


def test_lifting_a_given_budget():
    model, given_ = (
        mlp(*WIDENING),
        Budget({"d0/kernel": 0.02, "d1/kernel": 0.4}),
    )
    lifted = lift(model, given_)
    assert lifted.lifted_from == {"d0/kernel": 20}
    assert lifted.counts == {"d0/kernel": 64, "d1/kernel": 161}
    assert lifted.live == given_.for_weights(kso.prunable_weights(model)).live
    assert lift(model, given_, PUBLISHED).counts["d0/kernel"] == 20


def test_a_layout_of_the_initializer_counts():
    weight = Weight("w", (16, 64), KernelLayout.dense())
    gates = ExactOrthogonal(layout=KernelLayout.recurrent(4), seed=0)
    with pytest.raises(BudgetError, match=f"is {64 / 1024:.6g}.*Received"):
        allocate([weight], 0.05, [1.0], orthogonal=gates)
    assert allocate([weight], 0.05, [1.0], orthogonal=True).live == 51


@pytest.mark.parametrize(
    "structure",
    [Block(4, 1), Block(1, 4), Block(4, 4, regular=True), NByM(2, 4)],
)
def test_structures_cover_where_they_can(structure):
    weights = [Weight("wide", (16, 64)), Weight("tall", (64, 16))]
    pattern = ExactOrthogonal(structure=structure, seed=0)
    patterns = dict.fromkeys(("wide", "tall"), pattern)
    shape = (1, 1, 16, 64)
    enough = structure.covering(shape) + structure.least((1, 1, 64, 16))
    plan = Budget(
        {"wide": 16 / 1024, "tall": (enough + 8) / 1024},
        {"wide": 1024, "tall": 1024},
    )
    fitted = fit_structure(plan, weights, patterns)
    assert structure.covering(shape) <= fitted.counts["wide"]
    assert (
        plan.live - min(map(structure.unit, (shape, (1, 1, 64, 16))))
        < fitted.live
        <= plan.live
    )
    assert fitted.lifted_from["wide"] == 16
    kernel, _ = exact_orthogonal(
        (16, 64), fitted["wide"], structure=structure, seed=0
    )
    assert dead_outputs(kernel) == 0
