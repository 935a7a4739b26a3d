"""The search for widths: within the cost, near the best ones, never behind uniform widths."""

import itertools

import numpy as np
import pytest

from keras_sparse_ortho.calibration import (
    Ladder,
    WidthSearch,
    least_error_within,
)

pytestmark = pytest.mark.numpy_only


def ladders(count, seed, rungs=5):
    """Groups whose errors rise faster and faster, each by a scale of its own."""
    rng = np.random.default_rng(seed)
    made = []
    for k in range(count):
        widths = [8 * step for step in range(rungs, 0, -1)]
        rises = np.cumsum(np.cumsum(rng.uniform(size=rungs - 1)))
        scale = 10.0 ** rng.uniform(-3, 0)
        made.append(Ladder(f"group_{k}", widths, [0.0, *(scale * rises)]))
    return made


def chain(widths):
    """The parameters of a chain of layers, which are no sum over groups."""
    sizes = [10, *widths.values(), 10]
    return float(sum(a * b for a, b in itertools.pairwise(sizes)))


def error_of(made, widths):
    return sum(
        ladder.errors[ladder.widths.index(widths[ladder.name])]
        for ladder in made
    )


def all_widths(made):
    for widths in itertools.product(*(ladder.widths for ladder in made)):
        yield {
            ladder.name: width
            for ladder, width in zip(made, widths, strict=True)
        }


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("share", [0.7, 0.4, 0.15])
def test_widths_are_within_the_cost_and_near_the_best(seed, share):
    made = ladders(4, seed)
    target = share * chain({ladder.name: ladder.widths[0] for ladder in made})
    search = WidthSearch(made, chain)
    widths, uniform = search.within(target), search.uniform(target)
    assert chain(widths) <= target
    assert chain(uniform) <= target
    best = min(
        error_of(made, w) for w in all_widths(made) if chain(w) <= target
    )
    assert best <= error_of(made, widths) <= 1.05 * best
    assert error_of(made, widths) <= error_of(made, uniform)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_uniform_widths_have_one_share_but_for_a_step(share):
    """A ResNet-8 at a quarter had 18,091 parameters for 19,434: its steps came all at once."""
    made = ladders(3, 0)
    full = chain({ladder.name: 40 for ladder in made})
    widths = WidthSearch(made, chain).uniform(share * full)
    narrowest, widest = min(widths.values()), max(widths.values())
    assert widest - narrowest in (0, 8)
    assert chain(widths) <= share * full
    # Another step would cost more.
    for name, width in widths.items():
        if width == narrowest:
            assert chain(widths | {name: width + 8}) > share * full


def test_a_cost_in_steps_is_reached():
    made = ladders(3, 1)

    def stairs(widths):
        return sum(16 * -(-width // 16) for width in widths.values())

    widths = WidthSearch(made, stairs).within(
        0.5 * stairs({k: 40 for k in "abc"})
    )
    assert stairs(widths) <= 72


def test_no_widths_are_cheap_enough():
    made = ladders(2, 0)
    least = chain({ladder.name: 8 for ladder in made})
    assert WidthSearch(made, chain).within(least) == {
        "group_0": 8,
        "group_1": 8,
    }
    assert WidthSearch(made, chain).within(least - 1) is None


def test_many_groups_take_few_costs():
    made = ladders(24, 2, rungs=12)
    calls = []

    def cost(widths):
        calls.append(1)
        return chain(widths)

    widths = WidthSearch(made, cost).within(
        0.3 * chain({k: 96 for k in range(24)})
    )
    assert widths is not None
    assert len(calls) < 20_000


def long_ladders(count):
    """Ladders of all multiples of 4 up to 400: more than a search tries at once."""
    made = []
    for group in range(count):
        widths = [*range(400, 12, -4)]
        errors = [(group + 1) * (400 / width - 1) ** 2 for width in widths]
        made.append(Ladder(f"group_{group}", widths, errors))
    return made


@pytest.mark.parametrize("share", [0.7, 0.5, 0.2])
def test_single_multiples_are_exchanged_last(share):
    made = long_ladders(3)
    full = chain({ladder.name: 400 for ladder in made})
    thinned = [ladder.thinned() for ladder in made]
    assert all(len(ladder.widths) <= 24 for ladder in thinned)
    coarse = WidthSearch(thinned, chain).within(share * full)
    widths = least_error_within(made, chain, share * full)
    assert 0.98 * share * full <= chain(widths) <= share * full
    assert error_of(made, widths) < error_of(made, coarse)


def test_searched_widths_are_never_worse_than_uniform_ones():
    made = long_ladders(1) + long_ladders(1)
    made[1] = Ladder("twin", made[1].widths, made[1].errors)
    for share in (0.9, 0.6, 0.35, 0.1):
        target = share * chain({"a": 400, "b": 400})
        widths = least_error_within(made, chain, target)
        uniform = WidthSearch(made, chain).uniform(target)
        assert error_of(made, widths) <= error_of(made, uniform)


def test_no_uniform_widths_are_cheap_enough():
    made = ladders(2, 0)
    least = chain({ladder.name: 8 for ladder in made})
    assert WidthSearch(made, chain).uniform(least) == {
        "group_0": 8,
        "group_1": 8,
    }
    assert WidthSearch(made, chain).uniform(least - 1) is None
    assert least_error_within(made, chain, least - 1) is None
