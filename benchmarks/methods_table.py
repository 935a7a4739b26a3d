"""The methods of methods.py: from a dense network to a model and its callbacks.

`plan` holds density, seed, steps of the whole run, data, batch_size; `budgets`, a file
of the budgets that STR has learnt, and `str`, which of them this run starts with;
`frequency` of SET's and RigL's updates (`None` for the default, which follows the length of the
run); `gain`: the critical gain of the activation in networks without normalization, else `None`:
then orthogonal kernels have gain 1, and the others their usual scale.

`CANDIDATES` are tried against GMP or EOI, and join the package only if they are ahead. Against GMP;
each starts dense, keeps ERK densities of the largest magnitudes, and follows GMP's cubic schedule
from 10% to 70% of the run where its paper says nothing else:

- Feather (Glentis Georgoulakis et al., 2023, arXiv 2310.02448): it is ahead, and in the package;
- Top-KAST (Jayakumar et al., NeurIPS 2020);
- cyclical pruning (Srinivas et al., 2022, arXiv 2202.01290).

Against EOI, with its fixed masks (ERK) and exactly orthogonal kernels:

- Sign-In (Gadhikar et al., NeurIPS 2025, arXiv 2504.12801): kernels are products, whose signs
  change more easily;
- outputs turned to a positive sum: what a start for ReLU on the Stiefel manifold (Lee et al., 2025,
  arXiv 2509.00362) can do without another mask.

Rivals that the reviewers of the two papers asked for:

- dense_narrow: the dense network whose layers are narrower, so that it has as many kernel entries
  as the sparse ones have live ones: what one would take instead; dense_shallow: of one layer for
  the stack, or one block a stage, and so wide as that allows;
- base, ai, eoi under uniform, snip, grasp and synflow densities (App. of Nowak et al.): random
  masks of these densities; `snip`, `grasp` and `synflow` are the scores' own masks;
- lottery: the mask of the largest magnitudes of a trained network, from the weights after a
  twentieth of its steps (Frankle et al., 2020); lottery_shuffled: its mask shuffled in each kernel;
- near_orthogonal: kernels kept near orthogonal by Keras' regularizer (Dense layers only);
- eis: pairs of channels live at all taps together; angles: rotations by 1 or 80 degrees, not
  uniform ones.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from record import finished

import keras_sparse_ortho as kso
from keras_sparse_ortho._gathers import divisor_near
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.initializers import (
    ApproximateIsometry,
    ExactOrthogonal,
    RamanujanOrthogonal,
    RandomSparse,
    SparseInitializer,
)
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import _eoi, exact_orthogonal, live_count

ops = keras.ops
P = kso.parametrizations
Plan = dict[str, Any]
"""The settings of a run, for its method: see above."""
Method = Callable[[keras.Model, Plan], tuple[keras.Model, list[Any]]]

# --- rivals of the papers -------------------------------------------------------------------------


def beside_kernels(model: Any) -> int:
    """Entries of biases, normalizations and whatever else is trained and never sparse."""
    trained = sum(
        math.prod(variable.shape) for variable in model.trainable_variables
    )
    return trained - sum(weight.size for weight in kso.prunable_weights(model))


def narrowed(
    build: Callable[[dict[str, Any]], Any],
    options: dict[str, Any],
    density: float,
    shallow: bool,
) -> Any:
    """The network of the largest width whose kernels have at most `density` of the entries.

    Where the options `include` some kernels only, as many as these would leave live.
    """
    depths = {
        name: 1 for name in ("depth", "blocks") if shallow and name in options
    }
    if shallow and not depths:
        raise BudgetError(
            f"Only a network of some depth can be shallower. Received: {options}"
        )

    def made(share: float) -> Any:
        own = options | depths
        if "width" in own:
            own["width"] = max(round(own["width"] * share), 1)
        if "alpha" in own:
            own["alpha"] = max(own["alpha"] * share, 1 / 32)
        if "filters" in own:
            own["filters"] = [
                max(round(width * share), 1) for width in own["filters"]
            ]
        return build(own)

    def entries(model: Any) -> int:
        return sum(weight.size for weight in kso.prunable_weights(model))

    whole = build(options)
    sparse_names = options.get("include")
    if sparse_names:
        chosen = kso.budgets.uniform(whole, 1.0, include=sparse_names)
        size = sum(chosen.sizes.values())
        most = entries(whole) - size + live_count(density, size)
    else:
        most = live_count(density, entries(whole))
    low, high = 0.0, 8.0 if shallow else 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if entries(made(middle)) <= most else (low, middle)
        )
    return made(low)


def scored_budget(
    model: keras.Model, plan: Plan, score: str
) -> tuple[kso.Budget, Any]:
    """The densities that a score gives, and the model with its own masks."""
    include = plan.get("include")
    if score == "synflow":
        masked = kso.prune(model, plan["density"], score=score, include=include)
    else:
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        options = {
            "batch_size": plan["batch_size"],
            "batches": 10,
            "seed": plan["seed"],
        }
        saliency = getattr(kso.saliency, score)
        scored = saliency(
            model, plan["density"], plan["data"], include=include, **options
        )
        masked = kso.prune(model, score=scored)
    held = [
        w for w in kso.prunable_weights(masked) if w.parametrization is not None
    ]
    return kso.Budget(
        {w.path: w.density for w in held}, {w.path: w.size for w in held}
    ), masked


def rewound(shuffled: bool) -> Method:
    """Trains the dense network first, for as many steps, in the method itself."""

    def method(model: keras.Model, plan: Plan) -> tuple[keras.Model, list[Any]]:
        early = max(plan["steps"] // 20, 1)
        epochs = plan["steps"] * plan["batch_size"] // len(plan["data"][0])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        rate = keras.optimizers.schedules.CosineDecay(
            plan["learning_rate"], plan["steps"]
        )
        model.compile(keras.optimizers.Adam(rate), loss)
        keep = Keep(early)
        size = plan["batch_size"]
        model.fit(
            *plan["data"],
            batch_size=size,
            epochs=epochs,
            verbose=0,
            callbacks=[keep],
        )
        pruned = kso.prune(model, plan["density"], include=plan.get("include"))
        masks = {
            w.path: w.mask
            for w in kso.prunable_weights(pruned)
            if w.storage is not None
        }
        if shuffled:
            rng = np.random.default_rng(plan["seed"])
            masks = {
                path: rng.permutation(m.reshape(-1)).reshape(m.shape)
                for path, m in masks.items()
            }
        model.set_weights(keep.weights)
        return kso.apply_masks(model, masks), []

    return method


class Keep(keras.callbacks.Callback):
    """Keeps the weights that the model has after a step."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step, self.seen = step, 0
        self.weights: list[np.ndarray] = []

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Once."""
        self.seen += 1
        if self.seen == self.step:
            if keras.backend.backend() == "jax":
                self.model.jax_state_sync()
            self.weights = self.model.get_weights()


class OnMask(keras.regularizers.OrthogonalRegularizer):
    """Keras' orthogonal regularizer of the live entries: the others must not come to life."""

    live: Any = 1.0

    def __call__(self, inputs: Any) -> Any:
        """The mean cosine of two columns."""
        return super().__call__(inputs * self.live)


def near_orthogonal(start: Method, factor: float = 1.0) -> Method:
    """Another method, whose square kernels have that regularizer."""

    def method(model: keras.Model, plan: Plan) -> tuple[keras.Model, list[Any]]:
        made, callbacks = start(model, plan)
        for weight in kso.prunable_weights(made):
            if len(weight.shape) == 2 and weight.shape[0] == weight.shape[1]:
                weight.variable.regularizer = regularizer = OnMask(
                    factor, "columns"
                )
                if weight.storage is not None:
                    regularizer.live = weight.mask.astype("float32")
        return made, callbacks

    return method


class WholePairs(SparseInitializer):
    """EIS: exactly orthogonal at the center tap, and live pairs of channels are so at all taps."""

    isometry = "exact"

    def __init__(
        self,
        density: float | None = None,
        gain: float = 1.0,
        seed: int | None = 0,
    ) -> None:
        super().__init__(seed)
        self.density, self.gain = density, gain

    def sample(
        self, shape: Any, dtype: Any = None, layout: Any = None
    ) -> tuple:
        """Kernel and mask."""
        *taps, inputs, outputs = shape
        pairs = max(
            round(self.density * inputs * outputs), min(inputs, outputs)
        )
        matrix, live = exact_orthogonal(
            (inputs, outputs),
            pairs / (inputs * outputs),
            gain=self.gain,
            seed=self._draw_seed,
        )
        kernel = np.zeros(shape, dtype=np.float32)
        kernel[tuple((k - 1) // 2 for k in taps)] = matrix
        return kernel, np.broadcast_to(live, shape).copy()

    def get_config(self) -> dict[str, Any]:
        """Its arguments."""
        return {"density": self.density, "gain": self.gain, "seed": self.seed}


class FixedAngles(ExactOrthogonal):
    """Rotations by one angle, in degrees, in place of uniform ones."""

    degrees = 1.0

    def sample(
        self, shape: Any, dtype: Any = None, layout: Any = None
    ) -> tuple:
        """Kernel and mask."""
        uniform = _eoi.cos_sin
        angle = math.radians(self.degrees)
        cos_sin = math.cos(angle), math.sin(angle)
        _eoi.cos_sin = lambda count, rng: tuple(
            np.full(count, value) for value in cos_sin
        )
        try:
            return super().sample(shape, dtype, layout)
        finally:
            _eoi.cos_sin = uniform


class Angles80(FixedAngles):
    """By 80 degrees."""

    degrees = 80.0


# --- candidates -----------------------------------------------------------------------------------


class TopKast(P.StraightThroughTopK):
    """Gradients of the `wider` times as many largest magnitudes, values of the largest ones."""

    wider = 4.0

    def build(
        self, weight: PrunableWeight, add_weight: Callable[..., Any]
    ) -> None:
        """Creates the wider mask, too."""
        super().build(weight, add_weight)
        shape = tuple(weight.shape)
        self.reached = add_weight(
            name="reached", shape=shape, initializer="ones", trainable=False
        )
        self.share = add_weight(
            name="share", shape=(), initializer="ones", trainable=False
        )

    def update(
        self, step: int, density: float | None = None
    ) -> tuple[Any, int]:
        """Sets the wider mask, too."""
        done = super().update(step, density)
        share = self.schedule.at(step) if density is None else density
        ranked = self._ranked(min(self.wider * share, 1.0))
        self.reached.assign(
            ops.cast(ops.convert_to_tensor(ranked), self.reached.dtype)
        )
        self.share.assign(share)
        return done

    def effective(self, value: Any) -> Any:
        """Exactly the live values, and 0."""
        hard = ops.where(self.mask.value, value, ops.zeros((), value.dtype))
        passed = value * self.reached.value
        return passed + ops.stop_gradient(hard - passed)

    def penalty(self, value: Any) -> Any:
        """The exploration loss: decay of live entries, and 1 / density times that of the others."""
        scale = ops.where(
            self.mask.value, 1.0, self.reached.value / self.share.value
        )
        return 1e-4 * ops.sum(ops.square(ops.convert_to_tensor(value)) * scale)


class Cycles(kso.schedules.Cubic):
    """Three falls from dense to the density, one after the other."""

    cycles = 3

    def at(self, step: int) -> float:
        """That of the cycle."""
        begin, end = self.begin_step, self.end_step
        if not begin <= step < end:
            return super().at(step)
        share = self.cycles * (step - begin) / (end - begin) % 1
        return super().at(begin + int(share * (end - begin)))


def scheduled(
    template: type, schedule: type = kso.schedules.Cubic, tenths: int = 7
) -> Callable:
    """A method for `METHODS`: masks of the template, ERK, on a schedule from 10% of the run on."""

    def method(model: keras.Model, plan: Plan) -> tuple[keras.Model, list[Any]]:
        begin, last = plan["steps"] // 10, tenths * plan["steps"] // 10
        made = template(schedule(1.0, begin, last))
        model = kso.parametrize(
            model, made, plan["density"], "erk", include=plan.get("include")
        )
        return model, [kso.callbacks.UpdateMasks()]

    return method


def top_kast(model: keras.Model, plan: Plan) -> tuple[keras.Model, list[Any]]:
    """Sparse from the first step on, as published."""
    made = TopKast(1.0, max(plan["steps"] // 100, 1))
    model = kso.parametrize(
        model, made, plan["density"], "erk", include=plan.get("include")
    )
    for weight in kso.prunable_weights(model):
        if isinstance(weight.parametrization, TopKast):
            weight.variable.regularizer = weight.parametrization.penalty
    return model, [kso.callbacks.UpdateMasks()]


class SignIn(P.FixedMask):
    """`m * w` on the mask. Every epoch begins with `m^2 - w^2 = 1`, at the same product."""

    def build(
        self, weight: PrunableWeight, add_weight: Callable[..., Any]
    ) -> None:
        """Creates the factor, too."""
        super().build(weight, add_weight)
        self.factor = add_weight(
            name="factor", shape=tuple(weight.shape), initializer="ones"
        )

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

    def method(model: keras.Model, plan: Plan) -> tuple[keras.Model, list[Any]]:
        drawn, _ = start(model, plan)
        masked = [
            w
            for w in kso.prunable_weights(drawn)
            if w.parametrization is not None
        ]
        budget = kso.Budget(
            {w.path: w.density for w in masked},
            {w.path: w.size for w in masked},
        )
        names = [weight.path for weight in masked]
        # The live entries are the largest magnitudes, as many as the mask has.
        made = kso.parametrize(
            kso.strip(drawn), SignIn(), budget=budget, include=names
        )
        return made, [Balance()]

    return method


def positive(start: Callable) -> Callable:
    """The kernels of another method, each output turned so that its entries have a sum above 0."""

    def method(model: keras.Model, plan: Plan) -> tuple[keras.Model, list[Any]]:
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


Pattern = str | SparseInitializer


def scaled(gain: float | None) -> Pattern:
    """A random mask, each output scaled to its live fan-in."""
    if gain is None:
        return RandomSparse(None, "glorot_uniform", rescale=True)
    dense = keras.initializers.VarianceScaling(
        gain**2, "fan_in", "untruncated_normal", seed=0
    )
    return RandomSparse(None, dense, rescale=True)


INITIALIZERS: dict[str, Callable[[float | None], Pattern]] = {
    "base_erk": lambda gain: "random_sparse",
    "base_scaled": scaled,
    "base_orthogonal": lambda gain: RandomSparse(
        None, keras.initializers.Orthogonal(gain or 1.0, seed=0)
    ),
    "ai": lambda gain: ApproximateIsometry(
        1.0, gain or 1.0, max_iterations=300
    ),
    "eoi_published": lambda gain: ExactOrthogonal(
        gain=gain or 1.0, start="published"
    ),
    # Where normalization follows, the authors' runs have a denser center tap.
    "eoi_authors": lambda gain: ExactOrthogonal(
        gain=gain or 1.0,
        start="published",
        taps="center" if gain else "dense_center",
    ),
    "eoi_erk": lambda gain: ExactOrthogonal(gain=gain or 1.0),
    "eoi_auto": lambda gain: ExactOrthogonal(gain="auto", taps="center"),
    "eoi_mirrored": lambda gain: ExactOrthogonal(
        gain=gain or 1.0, mirrored=True
    ),
    "eis": lambda gain: WholePairs(gain=gain or 1.0),
    "angles_1": lambda gain: FixedAngles(gain=gain or 1.0, start="published"),
    "angles_80": lambda gain: Angles80(gain=gain or 1.0, start="published"),
    "eoi_all": lambda gain: ExactOrthogonal(gain="auto", taps="all"),
}
"""Initializers of kernels and fixed masks, by name, for a gain:

- base_erk: the usual initializer times a random mask; base_scaled: scaled to the live fan-in;
  base_orthogonal: Keras' dense orthogonal kernel, one matrix of all taps, times a random mask; in
  convolutions the baseline of the EOI paper is an orthogonal convolution instead;
- ai: a random mask, with values as orthogonal as possible (Lee et al.);
- eoi_published: exactly orthogonal, `[I | 0]` rotated; eoi_authors: so, as the authors ran networks
  with normalization; eoi_erk: without dead outputs; eoi_auto:
  with gain "auto"; eoi_all: so, as one matrix on all taps of a convolution,
  which is what `sparsify` draws where normalization follows;
- eoi_mirrored: exactly orthogonal halves in the form `[[H, -H], [-H, H]]`.

The arms `eoi_shift` and `rigl_shift` of the tables (entries spread over all taps) were measured at
936aadd, `eoi_even` and `eoi_even_all` (even degrees) at 72dda44a; the package does not draw such
kernels any more.
"""


def sparse(
    name: str, model: keras.Model, plan: Plan, budget: str | kso.Budget = "erk"
) -> Any:
    """The model with kernels of an entry of `INITIALIZERS`."""
    pattern = INITIALIZERS[name](plan.get("gain"))
    with warnings.catch_warnings():
        # The table shows their number.
        warnings.filterwarnings(
            "ignore", "These kernels have outputs", UserWarning
        )
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


def under(name: str, score: str) -> Method:
    """Fixed masks, layer by layer as dense as a score's; for ours lifted: no output is dead.

    The score chooses the densities alone: masks and kernels are those of `name`.
    """

    def method(model: keras.Model, plan: Plan) -> tuple[keras.Model, list[Any]]:
        budget: Any = "uniform"
        if score != "uniform":
            budget, _ = scored_budget(model, plan, score)
        if score != "uniform" and isinstance(
            INITIALIZERS[name](None), ExactOrthogonal
        ):
            budget = kso.budgets.lift(model, budget)
        return sparse(name, model, plan, budget), []

    return method


def rigl_from(name: str) -> Method:
    """RigL, ERK."""

    def method(model: keras.Model, plan: Plan) -> tuple[keras.Model, list[Any]]:
        callback = kso.callbacks.RigL(
            plan["data"],
            plan["batch_size"],
            plan["frequency"],
            0.3,
            seed=plan["seed"],
        )
        return sparse(name, model, plan), [callback]

    return method


def blocks_of(size: int, moved: bool = False) -> Method:
    """Live blocks of `size x size`, exactly orthogonal, stored and computed as such; RigL on them.

    Regular blocks have few densities: the nearest that all kernels can have.
    """

    def method(model: keras.Model, plan: Plan) -> tuple[keras.Model, list[Any]]:
        model = kso.sparsify(
            model,
            plan["density"],
            "uniform",
            ExactOrthogonal(gain="auto"),
            structure=kso.Block(size, size, regular=True),
            seed=plan["seed"],
            include=plan.get("include"),
        )
        model = kso.convert(model, "blocks")
        if not moved:
            return model, []
        options = {
            "frequency": plan["frequency"],
            "fraction": 0.3,
            "seed": plan["seed"],
        }
        return model, [
            kso.callbacks.RigL(plan["data"], plan["batch_size"], **options)
        ]

    return method


def sao(
    model: keras.Model, plan: Plan, *, relu: bool = False
) -> tuple[keras.Model, list[Any]]:
    """SAO in the square kernels, at the degree nearest to ERK's; the others as `base_scaled`.

    With `relu` in the form for ReLU that its authors published.
    """
    gain = plan.get("gain")
    weights = kso.prunable_weights(model)
    erk = kso.budgets.erk(model, plan["density"], orthogonal=False)
    square = {}
    for weight in weights:
        *_, inputs, outputs = canonical = weight.layout.canonical_shape(
            weight.shape
        )
        if inputs == outputs:
            matrices = canonical[0] * canonical[1]  # of a ScannedStack many
            step = 2 if relu else 1  # degree and width are multiples of it
            degree = step * divisor_near(
                outputs // step,
                erk.counts[weight.path] / (matrices * outputs * step),
            )
            square[weight.path] = matrices * degree * outputs / weight.size
    if not square:
        raise BudgetError(
            "SAO needs square kernels. Received: a model that has none"
        )
    pattern = RamanujanOrthogonal(2, gain or 1.0, relu=relu)
    seed = plan["seed"]
    model = kso.sparsify(
        model, None, square, pattern, seed=seed, include=[*square]
    )
    rest = {
        path: density for path, density in erk.items() if path not in square
    }
    return kso.sparsify(
        model, None, rest, scaled(gain), seed=seed, include=[*rest]
    ), []


def sao_uniform(
    model: keras.Model, plan: Plan
) -> tuple[keras.Model, list[Any]]:
    """The masks of SAO, with uniform values of the same variance ("RG-U")."""
    rng = np.random.default_rng(plan["seed"])
    model, callbacks = sao(model, plan)
    for weight in kso.prunable_weights(model):
        *_, inputs, outputs = weight.layout.canonical_shape(weight.shape)
        if inputs == outputs:
            raw = ops.convert_to_numpy(weight.variable.value)
            live = raw != 0
            values = rng.uniform(-1, 1, raw.shape) * np.sqrt(
                3 * np.square(raw[live]).mean()
            )
            weight.variable.assign(np.where(live, values, 0).astype(raw.dtype))
    return model, callbacks


def dense_orthogonal(
    model: keras.Model, plan: Plan
) -> tuple[keras.Model, list[Any]]:
    """Dense orthogonal kernels, at the center tap of convolutions (delta-orthogonal)."""
    pattern = ExactOrthogonal(gain=plan.get("gain") or 1.0)
    model = kso.sparsify(model, 1.0, "uniform", pattern, seed=plan["seed"])
    return kso.strip(model), []


def dense_mirrored(
    model: keras.Model, plan: Plan
) -> tuple[keras.Model, list[Any]]:
    """Mirrored kernels of dense orthogonal halves."""
    pattern = ExactOrthogonal(gain=plan.get("gain") or 1.0, mirrored=True)
    model = kso.sparsify(model, 1.0, "uniform", pattern, seed=plan["seed"])
    return kso.strip(model), []


def dense(model: keras.Model, plan: Plan) -> tuple[keras.Model, list[Any]]:
    """The network itself."""
    return model, []


def dense_he(model: keras.Model, plan: Plan) -> tuple[keras.Model, list[Any]]:
    """The network itself, from He's normal start."""
    for k, weight in enumerate(kso.prunable_weights(model)):
        start = keras.initializers.HeNormal(seed=1000 * plan["seed"] + k)
        weight.variable.assign(start(weight.shape))
    return model, []


def learnt_thresholds(
    model: keras.Model, plan: Plan
) -> tuple[keras.Model, list[Any]]:
    """STR with a target density."""
    template = kso.parametrizations.SoftThreshold()
    model = kso.parametrize(model, template, include=plan.get("include"))
    return model, [kso.callbacks.TargetDensity(plan["density"])]


def eoi_str(model: keras.Model, plan: Plan) -> tuple[keras.Model, list[Any]]:
    """Exactly orthogonal, fixed masks, the densities that STR ended with on the same seed.

    Lifted, so that no output is dead.
    """
    (kept, *_) = [
        line
        for line in reversed(finished(plan["budgets"]))
        if {key: line[key] for key in plan["str"]} == plan["str"]
    ]
    budget = kso.budgets.lift(
        model, kso.Budget(kept["densities"], kept["sizes"])
    )
    return kso.sparsify(model, budget=budget, seed=plan["seed"]), []


def straight_through(
    model: keras.Model, plan: Plan
) -> tuple[keras.Model, list[Any]]:
    """DNW, ERK."""
    template = kso.parametrizations.StraightThroughTopK()
    model = kso.parametrize(
        model, template, plan["density"], "erk", include=plan.get("include")
    )
    return model, [kso.callbacks.UpdateMasks()]


def evolutionary(
    model: keras.Model, plan: Plan
) -> tuple[keras.Model, list[Any]]:
    """SET from an exactly orthogonal start, ERK."""
    callback = kso.callbacks.SET(plan["frequency"], 0.3, seed=plan["seed"])
    return sparse("eoi_erk", model, plan), [callback]


METHODS: dict[str, Method] = {
    "dense": dense,
    "dense_he": dense_he,
    "dense_orthogonal": dense_orthogonal,
    "dense_mirrored": dense_mirrored,
    "str": learnt_thresholds,
    **{name: fixed(name) for name in INITIALIZERS},
    "base_sign_in": sign_in(fixed("base_erk")),
    "eoi_sign_in": sign_in(fixed("eoi_auto")),
    "eoi_positive": positive(fixed("eoi_auto")),
    **{
        f"{name}_{score}": under(start, score)
        for score in ("uniform", "snip", "grasp", "synflow")
        for name, start in (
            ("base", "base_erk"),
            ("ai", "ai"),
            ("eoi", "eoi_auto"),
        )
    },
    "grasp": lambda model, plan: (scored_budget(model, plan, "grasp")[1], []),
    "lottery": rewound(shuffled=False),
    "lottery_shuffled": rewound(shuffled=True),
    "base_near_orthogonal": near_orthogonal(fixed("base_erk")),
    "eoi_near_orthogonal": near_orthogonal(fixed("eoi_erk")),
    "dense_near_orthogonal": near_orthogonal(dense_orthogonal),
    **dict.fromkeys(("dense_narrow", "dense_shallow"), dense),
    "sao": sao,
    "sao_relu": functools.partial(sao, relu=True),
    "sao_uniform": sao_uniform,
    "eoi_str": eoi_str,
    "snip": lambda model, plan: (scored_budget(model, plan, "snip")[1], []),
    "synflow": lambda model, plan: (
        scored_budget(model, plan, "synflow")[1],
        [],
    ),
    "gmp": scheduled(kso.parametrizations.MagnitudeMask),
    "dnw": straight_through,
    **CANDIDATES,
    "set": evolutionary,
    "rigl": rigl_from("eoi_erk"),
    "rigl_auto": rigl_from("eoi_auto"),
    "rigl_random": rigl_from("base_erk"),
    **{f"blocks_{size}": blocks_of(size) for size in (8, 16, 32, 64)},
    "rigl_blocks_32": blocks_of(32, moved=True),
}
"""By name, in running order: `str` before the methods that use its budget."""

METHODS_SHOWN = [*METHODS]
"""The order of rows, with methods that are gone; their lines stay."""
METHODS_SHOWN.insert(METHODS_SHOWN.index("eoi_all") + 1, "eoi_even")
METHODS_SHOWN.insert(METHODS_SHOWN.index("eoi_even") + 1, "eoi_even_all")

DENSE = (
    "dense",
    "dense_he",
    "dense_orthogonal",
    "dense_mirrored",
    "dense_near_orthogonal",
)
"""Those without a density."""
