"""Methods that are tried against GMP or EOI, and join the package only if they are ahead.

Against GMP; each starts dense, keeps ERK densities of the largest magnitudes, and follows GMP's
cubic schedule from 10% to 70% of the run where its paper says nothing else:

- Feather (Glentis Georgoulakis et al., 2023, arXiv 2310.02448): it is ahead, and in the package;
- Top-KAST (Jayakumar et al., NeurIPS 2020);
- cyclical pruning (Srinivas et al., 2022, arXiv 2202.01290).

Against EOI, with its fixed masks (ERK) and exactly orthogonal kernels:

- Sign-In (Gadhikar et al., NeurIPS 2025, arXiv 2504.12801): kernels are products, whose signs
  change more easily;
- outputs turned to a positive sum: what a start for ReLU on the Stiefel manifold (Lee et al., 2025,
  arXiv 2509.00362) can do without another mask.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho.kernels import PrunableWeight

ops = keras.ops
P = kso.parametrizations


class TopKast(P.StraightThroughTopK):
    """Gradients of the `wider` times as many largest magnitudes, values of the largest ones."""

    wider = 4.0

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        """Creates the wider mask, too."""
        super().build(weight, add_weight)
        shape = tuple(weight.shape)
        self.reached = add_weight(name="reached", shape=shape, initializer="ones", trainable=False)
        self.share = add_weight(name="share", shape=(), initializer="ones", trainable=False)

    def update(self, step: int, density: float | None = None) -> tuple[Any, int]:
        """Sets the wider mask, too."""
        done = super().update(step, density)
        share = self.schedule.at(step) if density is None else density
        ranked = self._ranked(min(self.wider * share, 1.0))
        self.reached.assign(ops.cast(ops.convert_to_tensor(ranked), self.reached.dtype))
        self.share.assign(share)
        return done

    def effective(self, value: Any) -> Any:
        """Exactly the live values, and 0."""
        hard = ops.where(self.mask.value, value, ops.zeros((), value.dtype))
        passed = value * self.reached.value
        return passed + ops.stop_gradient(hard - passed)

    def penalty(self, value: Any) -> Any:
        """The exploration loss: decay of live entries, and 1 / density times that of the others."""
        scale = ops.where(self.mask.value, 1.0, self.reached.value / self.share.value)
        return 1e-4 * ops.sum(ops.square(ops.convert_to_tensor(value)) * scale)


class Cycles(kso.schedules.Cubic):
    """Three falls from dense to the density, one after the other."""

    cycles = 3

    def density(self, step: int) -> float:
        """That of the cycle."""
        begin, end = self.begin_step, self.end_step
        if not begin <= step < end:
            return super().at(step)
        share = self.cycles * (step - begin) / (end - begin) % 1
        return super().at(begin + int(share * (end - begin)))


def scheduled(template: type, schedule: type = kso.schedules.Cubic, tenths: int = 7) -> Callable:
    """A method for `METHODS`: masks of the template, ERK, on a schedule from 10% of the run on."""

    def method(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
        begin, last = plan["steps"] // 10, tenths * plan["steps"] // 10
        made = template(schedule(1.0, begin, last))
        model = kso.parametrize(model, made, plan["density"], "erk", include=plan.get("include"))
        return model, [kso.callbacks.UpdateMasks()]

    return method


def top_kast(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Sparse from the first step on, as published."""
    made = TopKast(1.0, max(plan["steps"] // 100, 1))
    model = kso.parametrize(model, made, plan["density"], "erk", include=plan.get("include"))
    for weight in kso.prunable_weights(model):
        if isinstance(weight.parametrization, TopKast):
            weight.variable.regularizer = weight.parametrization.penalty
    return model, [kso.callbacks.UpdateMasks()]


class SignIn(P.FixedMask):
    """`m * w` on the mask. Every epoch begins with `m^2 - w^2 = 1`, at the same product."""

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        """Creates the factor, too."""
        super().build(weight, add_weight)
        self.factor = add_weight(name="factor", shape=tuple(weight.shape), initializer="ones")

    def effective(self, value: Any) -> Any:
        """The product."""
        return super().effective(value) * self.factor.value

    def balance(self) -> None:
        """Restores the difference of squares."""
        product = self.weight.variable.value * self.factor.value
        factor = ops.sqrt((1 + ops.sqrt(1 + 4 * product**2)) / 2)
        self.weight.variable.assign(product / factor)
        self.factor.assign(factor)


class Balance(keras.callbacks.Callback):
    """Calls `SignIn.balance` for every kernel."""

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Between two epochs the variables hold the state."""
        for weight in kso.prunable_weights(self.model):
            if isinstance(weight.parametrization, SignIn):
                weight.parametrization.balance()


def sign_in(start: Callable) -> Callable:
    """Sign-In from the kernels and masks of another method."""

    def method(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
        drawn, _ = start(model, plan)
        masked = [w for w in kso.prunable_weights(drawn) if w.parametrization is not None]
        budget = kso.Budget({w.path: w.density for w in masked}, {w.path: w.size for w in masked})
        names = [weight.path for weight in masked]
        # The largest magnitudes, as many as there are, are those that are live.
        made = kso.parametrize(kso.strip(drawn), SignIn(), budget=budget, include=names)
        return made, [Balance()]

    return method


def positive(start: Callable) -> Callable:
    """The kernels of another method, each output turned so that its entries have a sum above 0."""

    def method(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
        drawn, callbacks = start(model, plan)
        for weight in kso.prunable_weights(drawn):
            raw = ops.convert_to_numpy(weight.variable.value)
            sums = raw.sum(tuple(range(raw.ndim - 1)))
            weight.variable.assign(raw * np.where(sums < 0, -1, 1))
        return drawn, callbacks

    return method


CANDIDATES = {
    "feather": scheduled(P.Feather),
    "top_kast": top_kast,
    "cyclical": scheduled(P.MagnitudeMask, Cycles, tenths=8),
}
"""By name, as `METHODS`."""
