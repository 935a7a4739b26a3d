"""The methods of methods.py: from a dense network to a model and its callbacks.

`plan` holds density, seed, steps of the whole run, frequency, data, batch_size and budget_file.
"""

from collections.abc import Callable
from typing import Any

import keras

import keras_sparse_ortho as kso

Method = Callable[[Any, dict[str, Any]], tuple[Any, list[Any]]]


def dense(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The network itself."""
    return model, []


def learnt_thresholds(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """STR with the density asked for."""
    model = kso.parametrize(model, kso.parametrizations.SoftThreshold())
    return model, [kso.callbacks.TargetDensity(plan["density"], frequency=plan["frequency"])]


def eoi_erk(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Exactly orthogonal, fixed masks, ERK."""
    return kso.sparsify(model, plan["density"], "erk", seed=plan["seed"]), []


def eoi_center(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """As `eoi_erk`, with the reference's denser center taps (`more_nonzeros`)."""
    pattern = kso.initializers.ExactOrthogonal(1.0, center_density="more_nonzeros")
    return kso.sparsify(model, plan["density"], "erk", pattern, seed=plan["seed"]), []


def snip(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """SNIP's own mask, of ten batches, on the usual initializer."""
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    options = {"batch_size": plan["batch_size"], "batches": 10, "seed": plan["seed"]}
    scored = kso.saliency.snip(model, plan["density"], plan["data"], **options)
    return kso.prune(model, score=scored), []


def synflow(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """SynFlow's own mask, of 100 rounds, on the usual initializer."""
    return kso.prune(model, plan["density"], score="synflow"), []


def eoi_str(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Exactly orthogonal, fixed masks, the densities that STR ended with on the same seed."""
    budget = kso.Budget.load(plan["budget_file"])
    return kso.sparsify(model, budget=budget, seed=plan["seed"]), []


def base_erk(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The usual initializer times a random mask, ERK."""
    return kso.sparsify(model, plan["density"], "erk", "random_sparse", seed=plan["seed"]), []


def magnitude(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """GMP: the cubic schedule from 10% to 70% of the run, ERK."""
    begin, end = plan["steps"] // 10, 7 * plan["steps"] // 10
    schedule = kso.schedules.Cubic(1.0, begin, end, frequency=plan["frequency"])
    template = kso.parametrizations.MagnitudeMask(schedule)
    model = kso.parametrize(model, template, plan["density"], "erk")
    return model, [kso.callbacks.UpdateMasks()]


def straight_through(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """DNW, ERK."""
    template = kso.parametrizations.StraightThroughTopK(1.0, frequency=plan["frequency"])
    model = kso.parametrize(model, template, plan["density"], "erk")
    return model, [kso.callbacks.UpdateMasks()]


def evolutionary(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """SET from an exactly orthogonal start, ERK."""
    callback = kso.callbacks.SET(plan["frequency"], 0.3, seed=plan["seed"])
    return eoi_erk(model, plan)[0], [callback]


def rigged(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """RigL from an exactly orthogonal start, ERK."""
    callback = kso.callbacks.RigL(
        plan["data"], plan["batch_size"], plan["frequency"], 0.3, seed=plan["seed"]
    )
    return eoi_erk(model, plan)[0], [callback]


METHODS: dict[str, Method] = {
    "dense": dense,
    "str": learnt_thresholds,
    "eoi_erk": eoi_erk,
    "eoi_center": eoi_center,
    "eoi_str": eoi_str,
    "base_erk": base_erk,
    "snip": snip,
    "synflow": synflow,
    "gmp": magnitude,
    "dnw": straight_through,
    "set": evolutionary,
    "rigl": rigged,
}
"""By name, in the order in which they are run: `str` before what takes its budget."""
