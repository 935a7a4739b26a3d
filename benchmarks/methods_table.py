"""The methods of methods.py: from a dense network to a model and its callbacks.

`plan` holds density, seed, steps of the whole run, data, batch_size, budget_file;
`frequency` of SET's and RigL's updates (`None` for the default, which follows the length of the
run); `gain`: the critical gain of the activation in networks without normalization, else `None`:
then orthogonal kernels have gain 1, and the others their usual scale.
"""

import warnings
from collections.abc import Callable
from typing import Any

import keras
from candidates import CANDIDATES, positive, scheduled, sign_in

import keras_sparse_ortho as kso
from keras_sparse_ortho._gathers import divisor_near
from keras_sparse_ortho.contrib import ScannedStack
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.initializers import (
    ApproximateIsometry,
    ExactOrthogonal,
    RamanujanOrthogonal,
    RandomSparse,
    SparseInitializer,
)

Method = Callable[[Any, dict[str, Any]], tuple[Any, list[Any]]]
Pattern = str | SparseInitializer


def scaled(gain: float | None) -> Pattern:
    """A random mask, each output scaled to its live fan-in."""
    if gain is None:
        return RandomSparse(None, "glorot_uniform", rescale=True)
    dense = keras.initializers.VarianceScaling(gain**2, "fan_in", "untruncated_normal", seed=0)
    return RandomSparse(None, dense, rescale=True)


INITIALIZERS: dict[str, Callable[[float | None], Pattern]] = {
    "base_erk": lambda gain: "random_sparse",
    "base_scaled": scaled,
    "base_orthogonal": lambda gain: RandomSparse(
        None, keras.initializers.Orthogonal(gain or 1.0, seed=0)
    ),
    "ai": lambda gain: ApproximateIsometry(1.0, gain or 1.0, max_iterations=300),
    "eoi_published": lambda gain: ExactOrthogonal(gain=gain or 1.0, start="published"),
    "eoi_erk": lambda gain: ExactOrthogonal(gain=gain or 1.0),
    "eoi_auto": lambda gain: ExactOrthogonal(gain="auto", taps="auto"),
    "eoi_shift": lambda gain: ExactOrthogonal(gain="auto", taps="shift"),
}
"""What draws kernels and fixed masks, by name, for a gain:

- base_erk: the usual initializer times a random mask; base_scaled: scaled to the live fan-in;
  base_orthogonal: a dense orthogonal kernel times a random mask, the baseline of the EOI paper;
- ai: a random mask, with values as orthogonal as possible (Lee et al.);
- eoi_published: exactly orthogonal as published; eoi_erk: without dead outputs; eoi_auto:
  gain and taps by what follows each layer; eoi_shift: all on all taps.
"""


def sparse(name: str, model: Any, plan: dict[str, Any], budget: str | kso.Budget = "erk") -> Any:
    """The model with kernels of an entry of `INITIALIZERS`."""
    pattern = INITIALIZERS[name](plan.get("gain"))
    with warnings.catch_warnings():
        # The table shows their number.
        warnings.filterwarnings("ignore", "These kernels have outputs", UserWarning)
        return kso.sparsify(
            model,
            plan["density"] if isinstance(budget, str) else None,
            budget,
            pattern,
            seed=plan["seed"],
            include=plan.get("include"),
        )


def fixed(name: str) -> Method:
    """Fixed masks."""
    return lambda model, plan: (sparse(name, model, plan), [])


def under_synflow(name: str) -> Method:
    """Fixed masks, layer by layer as dense as SynFlow's; for ours lifted: no output is dead.

    SynFlow's 100 rounds choose the densities alone: masks and kernels are those of `name`.
    """

    def method(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
        include = plan.get("include")
        scored = kso.prune(model, plan["density"], score="synflow", include=include)
        masked = [w for w in kso.prunable_weights(scored) if w.parametrization is not None]
        budget = kso.Budget({w.path: w.density for w in masked}, {w.path: w.size for w in masked})
        if isinstance(INITIALIZERS[name](None), ExactOrthogonal):
            budget = kso.budgets.lift(model, budget)
        return sparse(name, model, plan, budget), []

    return method


def rigl_from(name: str) -> Method:
    """RigL, ERK."""

    def method(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
        callback = kso.callbacks.RigL(
            plan["data"], plan["batch_size"], plan["frequency"], 0.3, seed=plan["seed"]
        )
        return sparse(name, model, plan), [callback]

    return method


def blocks_of(size: int, moved: bool = False) -> Method:
    """Live blocks of `size x size`, exactly orthogonal, stored and computed as such; RigL on them.

    Regular blocks have few densities: the nearest that all kernels can have.
    """

    def method(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
        model = kso.sparsify(
            model,
            plan["density"],
            "uniform",
            ExactOrthogonal(gain="auto"),
            structure=kso.Block(size, size, regular=True),
            storage="auto",
            seed=plan["seed"],
            include=plan.get("include"),
        )
        if not moved:
            return model, []
        options = {"frequency": plan["frequency"], "fraction": 0.3, "seed": plan["seed"]}
        return model, [kso.callbacks.RigL(plan["data"], plan["batch_size"], **options)]

    return method


def sao(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """SAO in the square kernels, at the degree nearest to ERK's; the others as `base_scaled`."""
    gain = plan.get("gain")
    weights = kso.prunable_weights(model)
    erk = kso.budgets.erk(model, plan["density"], orthogonal=False)
    square = {}
    for weight in weights:
        *_, inputs, outputs = canonical = weight.layout.canonical_shape(weight.shape)
        if inputs == outputs:
            matrices = canonical[0] * canonical[1]  # of a ScannedStack many
            degree = divisor_near(outputs, erk.counts[weight.path] / (matrices * outputs))
            square[weight.path] = matrices * degree * outputs / weight.size
    if not square:
        raise BudgetError("SAO needs square kernels. Received: a model that has none")
    pattern, seed = RamanujanOrthogonal(1, gain or 1.0), plan["seed"]
    model = kso.sparsify(model, None, square, pattern, seed=seed, include=[*square])
    rest = {path: density for path, density in erk.items() if path not in square}
    return kso.sparsify(model, None, rest, scaled(gain), seed=seed, include=[*rest]), []


def dense_orthogonal(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Dense orthogonal kernels, at the center tap of convolutions (delta-orthogonal)."""
    pattern = ExactOrthogonal(gain=plan.get("gain") or 1.0)
    model = kso.sparsify(model, 1.0, "uniform", pattern, seed=plan["seed"])
    if any(isinstance(getattr(layer, "layer", None), ScannedStack) for layer in model.layers):
        return model, []  # `strip` would unroll it; masks of ones change nothing
    return kso.strip(model), []


def dense(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The network itself."""
    return model, []


def learnt_thresholds(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """STR with a target density."""
    template = kso.parametrizations.SoftThreshold()
    model = kso.parametrize(model, template, include=plan.get("include"))
    return model, [kso.callbacks.TargetDensity(plan["density"])]


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
    """Exactly orthogonal, fixed masks, the densities that STR ended with on the same seed.

    Lifted, so that no output is dead.
    """
    budget = kso.budgets.lift(model, kso.Budget.load(plan["budget_file"]))
    return kso.sparsify(model, budget=budget, seed=plan["seed"]), []


def straight_through(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """DNW, ERK."""
    template = kso.parametrizations.StraightThroughTopK()
    model = kso.parametrize(model, template, plan["density"], "erk", include=plan.get("include"))
    return model, [kso.callbacks.UpdateMasks()]


def evolutionary(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """SET from an exactly orthogonal start, ERK."""
    callback = kso.callbacks.SET(plan["frequency"], 0.3, seed=plan["seed"])
    return sparse("eoi_erk", model, plan), [callback]


METHODS: dict[str, Method] = {
    "dense": dense,
    "dense_orthogonal": dense_orthogonal,
    "str": learnt_thresholds,
    **{name: fixed(name) for name in INITIALIZERS},
    "base_sign_in": sign_in(fixed("base_erk")),
    "eoi_sign_in": sign_in(fixed("eoi_auto")),
    "eoi_positive": positive(fixed("eoi_auto")),
    "base_synflow": under_synflow("base_erk"),
    "eoi_synflow": under_synflow("eoi_auto"),
    "sao": sao,
    "eoi_str": eoi_str,
    "snip": snip,
    "synflow": synflow,
    "gmp": scheduled(kso.parametrizations.MagnitudeMask),
    "dnw": straight_through,
    **CANDIDATES,
    "set": evolutionary,
    "rigl": rigl_from("eoi_erk"),
    "rigl_auto": rigl_from("eoi_auto"),
    "rigl_shift": rigl_from("eoi_shift"),
    "rigl_random": rigl_from("base_erk"),
    **{f"blocks_{size}": blocks_of(size) for size in (8, 16, 32, 64)},
    "rigl_blocks_32": blocks_of(32, moved=True),
}
"""By name, in running order: `str` before the methods that use its budget."""

DENSE = ("dense", "dense_orthogonal")
"""Those without a density."""
