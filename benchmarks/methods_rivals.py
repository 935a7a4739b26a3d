"""Rivals that the reviewers of the two papers asked for, for `METHODS` of methods_table.py.

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

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.initializers import ExactOrthogonal, SparseInitializer
from keras_sparse_ortho.orthogonal import exact_orthogonal, live_count

Method = Callable[[Any, dict[str, Any]], tuple[Any, list[Any]]]


def beside_kernels(model: Any) -> int:
    """Entries of biases, normalizations and whatever else is trained and never sparse."""
    trained = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    return trained - sum(weight.size for weight in kso.prunable_weights(model))


def narrowed(
    build: Callable[[dict[str, Any]], Any], options: dict[str, Any], density: float, shallow: bool
) -> Any:
    """The network of the largest width whose kernels have at most `density` of the entries."""
    depths = {name: 1 for name in ("depth", "blocks") if shallow and name in options}
    if shallow and not depths:
        raise BudgetError(f"Only a network of some depth can be shallower. Received: {options}")

    def made(share: float) -> Any:
        own = options | depths
        if "width" in own:
            own["width"] = max(round(own["width"] * share), 1)
        if "alpha" in own:
            own["alpha"] = max(own["alpha"] * share, 1 / 32)
        if "filters" in own:
            own["filters"] = [max(round(width * share), 1) for width in own["filters"]]
        return build(own)

    def entries(model: Any) -> int:
        return sum(weight.size for weight in kso.prunable_weights(model))

    most = live_count(density, entries(build(options)))
    low, high = 0.0, 8.0 if shallow else 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if entries(made(middle)) <= most else (low, middle)
    return made(low)


def scored_budget(model: Any, plan: dict[str, Any], score: str) -> tuple[kso.Budget, Any]:
    """The densities that a score gives, and the model with its own masks."""
    include = plan.get("include")
    if score == "synflow":
        masked = kso.prune(model, plan["density"], score=score, include=include)
    else:
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        options = {"batch_size": plan["batch_size"], "batches": 10, "seed": plan["seed"]}
        saliency = getattr(kso.saliency, score)
        scored = saliency(model, plan["density"], plan["data"], include=include, **options)
        masked = kso.prune(model, score=scored)
    held = [w for w in kso.prunable_weights(masked) if w.parametrization is not None]
    return kso.Budget({w.path: w.density for w in held}, {w.path: w.size for w in held}), masked


def rewound(shuffled: bool) -> Method:
    """Trains the dense network first, for as many steps, in the method itself."""

    def method(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
        early = max(plan["steps"] // 20, 1)
        epochs = plan["steps"] * plan["batch_size"] // len(plan["data"][0])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        rate = keras.optimizers.schedules.CosineDecay(plan["learning_rate"], plan["steps"])
        model.compile(keras.optimizers.Adam(rate), loss)
        keep = Keep(early)
        size = plan["batch_size"]
        model.fit(*plan["data"], batch_size=size, epochs=epochs, verbose=0, callbacks=[keep])
        pruned = kso.prune(model, plan["density"], include=plan.get("include"))
        masks = {w.path: w.mask for w in kso.prunable_weights(pruned) if w.storage is not None}
        if shuffled:
            rng = np.random.default_rng(plan["seed"])
            masks = {
                path: rng.permutation(m.reshape(-1)).reshape(m.shape) for path, m in masks.items()
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

    def method(model: Any, plan: dict[str, Any]) -> tuple[Any, list[Any]]:
        made, callbacks = start(model, plan)
        for weight in kso.prunable_weights(made):
            if len(weight.shape) == 2 and weight.shape[0] == weight.shape[1]:
                weight.variable.regularizer = regularizer = OnMask(factor, "columns")
                if weight.storage is not None:
                    regularizer.live = weight.mask.astype("float32")
        return made, callbacks

    return method


class WholePairs(SparseInitializer):
    """EIS: exactly orthogonal at the center tap, and live pairs of channels are so at all taps."""

    isometry = "exact"

    def __init__(
        self, density: float | None = None, gain: float = 1.0, seed: int | None = 0
    ) -> None:
        super().__init__(seed)
        self.density, self.gain = density, gain

    def sample(self, shape: Any, dtype: Any = None, layout: Any = None) -> tuple:
        """Kernel and mask."""
        *taps, inputs, outputs = shape
        pairs = max(round(self.density * inputs * outputs), min(inputs, outputs))
        matrix, live = exact_orthogonal(
            (inputs, outputs), pairs / (inputs * outputs), gain=self.gain, seed=self._draw_seed
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

    def sample(self, shape: Any, dtype: Any = None, layout: Any = None) -> tuple:
        """Kernel and mask."""
        from keras_sparse_ortho.orthogonal import _eoi

        uniform = _eoi.cos_sin
        angle = math.radians(self.degrees)
        cos_sin = math.cos(angle), math.sin(angle)
        _eoi.cos_sin = lambda count, rng: tuple(np.full(count, value) for value in cos_sin)
        try:
            return super().sample(shape, dtype, layout)
        finally:
            _eoi.cos_sin = uniform


class Angles80(FixedAngles):
    """By 80 degrees."""

    degrees = 80.0
