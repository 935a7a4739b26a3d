"""`SET`, sparse evolutionary training, and `DynamicSparseTraining`, its base and that of RigL."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._checks import check_density, check_integer, other_keywords
from keras_sparse_ortho._keras_internals import applied_batches, warn_user
from keras_sparse_ortho.callbacks._step_callback import StepCallback
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import ExactOrthogonal, layout_for
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose, derived_seed
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.orthogonal import Block, matched_by_score, to_blocks
from keras_sparse_ortho.schedules import default_frequency

Array = np.ndarray
Generator = np.random.Generator


class DynamicSparseTraining(StepCallback):
    """Moves live entries every `frequency` steps to the places of largest `growth_scores`."""

    @other_keywords
    def __init__(
        self,
        frequency: int | None = None,
        fraction: float = 0.3,
        end_step: int | None = None,
        include: Selection = None,
        exclude: Selection = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.frequency = None if frequency is None else check_integer("frequency", frequency)
        self.fraction = check_density(fraction, "fraction")
        self.end_step = None if end_step is None else check_integer("end_step", end_step)
        self.include, self.exclude = include, exclude
        # An integer: a resumed run draws the same as an uninterrupted one.
        self.seed = check_integer("seed", seed, least=0)
        self._weights: list[PrunableWeight] = []
        self._until = self.end_step or 0
        self._every = self.frequency or 1
        self._moved = 0

    @abc.abstractmethod
    def growth_scores(self, weights: Sequence[PrunableWeight], step: int) -> list[np.ndarray]:
        """Scores in the shape of each weight (of blocks `(I, J)`); NaN or inf skips the update."""

    def drop_fraction(self, step: int) -> float:
        if step >= self._until:
            return 0.0
        return self.fraction / 2 * (1 + math.cos(math.pi * step / self._until))

    def prepare(self) -> None:
        self._weights = self._find(self._watched)
        if self.end_step is None:
            epochs, steps = self.length()
            if not epochs or not steps:
                raise ValueError(
                    "`end_step` must be given if the number of steps is not known before training. "
                    f"Received: end_step=None, {epochs=}, {steps=}"
                )
            accumulated = 1 if self.in_loop else applied_batches(self._watched.optimizer)[1]
            # The RigL paper stops at three quarters of the training.
            self._until = math.floor(0.75 * epochs * steps / accumulated)
        self._every = self.frequency or default_frequency(self._until)
        if self._until <= self._every:
            warn_user(
                f"{type(self).__name__} will make no update: the first would be at step "
                f"{self._every}, and masks do not change from step {self._until} on."
            )

    def on_run_begin(self, step: int, start: int, steps: int | None) -> None:
        self.sync()
        if start < 0 and not step:
            found = f"in a run that had made {-start} steps before"
            raise self.restart_error(0, found, can_begin=True)
        if start > 0 and self.end_step is None and step >= self._until:
            warn_user(
                f"{type(self).__name__} will make no update: its default `end_step` is three "
                f"quarters of this `fit`, step {self._until}, and earlier ones have passed it. "
                "For several calls of `fit` give the last step of all: `end_step=...`. "
                f"Received: end_step=None, the optimizer at step {step}"
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._moved = 0

    def is_due(self, step: int, executed: int) -> bool:
        reached = step // self._every
        return 0 < reached > (step - executed) // self._every and step < self._until

    def on_step(self, step: int, executed: int) -> None:
        self._moved += self.move(step)

    def logged(self) -> dict[str, float]:
        return {"moved": self._moved / sum(weight.live for weight in self._weights)}

    def move(self, step: int) -> int:
        """Drops and grows now, for the cosine at `step`; returns how many have moved."""

        def update() -> int:
            pairs = [*zip(self._weights, self.growth_scores(self._weights, step), strict=True)]
            wrong = [weight.path for weight, score in pairs if not np.isfinite(score).all()]
            if wrong:
                warn_user(
                    f"{type(self).__name__} skipped its update at step {step}: the scores of "
                    f"{wrong[:3]} are not finite."
                )
                return 0
            grown = 0
            for weight, scores in pairs:
                storage: Any = weight.storage
                rng = np.random.default_rng(derived_seed(self.seed, f"{step}/{weight.path}"))
                moved = _moved_blocks if storage.in_blocks else _moved_entries
                live = moved(weight, self.drop_fraction(step), scores, rng)
                grown += np.count_nonzero(live & ~storage.live_places()) * storage.place_size
                storage.move(live, self.optimizer)
            return int(grown)

        return self.change_masks(step, update)

    def _find(self, model: Any) -> list[PrunableWeight]:
        sparse = [w for w in prunable_weights(model) if w.storage is not None]
        rule = f"{type(self).__name__} trains weights with a `FixedMask` or live blocks: "
        for weight in sparse:
            if weight.storage is not None and not weight.storage.movable:
                raise NotPrunableError(
                    f"{rule}other parametrizations choose their own live entries. "
                    f"Received: {weight.path!r} with {type(weight.parametrization).__name__}"
                )
        chosen = choose(sparse, self.include, self.exclude) if sparse else []
        chosen = [weight for weight in chosen if weight.variable.trainable]
        if not chosen:
            raise NotPrunableError(
                f"{rule}make the model sparse first, with keras_sparse_ortho.sparsify. Received: "
                f"the model {model.name!r} with no such trainable weight"
            )
        for weight in chosen:
            structure = _structure(weight)
            if structure is not None and not isinstance(structure, Block):
                raise NotPrunableError(
                    f"No update keeps the structure of {weight.path!r}: `exclude` it. "
                    f"Received: structure={structure}"
                )
        return chosen


class SET(DynamicSparseTraining):
    """Sparse evolutionary training (SET): drops small weights and grows as many at random.

    Before step `t = frequency, 2 frequency, ... < T_end` each layer with `n` live entries drops the

        floor(f(t) n),  f(t) = alpha / 2 (1 + cos(pi t / T_end))

    of smallest magnitude. Then as many dead entries, drawn uniformly, become live; one that was
    just dropped may return. Grown entries, and moments and averages of grown and dropped ones,
    start from zero. In masks that `ExactOrthogonal` drew with a `Block` structure, and in layers of
    live blocks, whole blocks move, by the sums over their entries; regular ones keep all fans.

    Random choices follow from `seed`, the step and the weight's path. `moved` in the logs is the
    fraction of live entries that moved in an epoch. In a custom training loop call `update(step)`:
    see docs/custom_loops.md. `move` does an update at once.

    Args:
        frequency: int. Optimizer steps between updates. Default: a hundredth of `T_end`, at least 1
            and at most 100, the paper's.
        fraction: float in (0, 1]. `alpha`, the part of the live weights to drop at first.
        end_step: int. `T_end`, from which step on masks do not change. Default: three quarters of
            this `fit`; set it for runs in several calls of `fit`.
        include, exclude: Paths, regular expressions or a predicate. Default: all trainable weights
            with a `FixedMask` or live blocks.
        seed: int.

    Raises:
        NotPrunableError: When training begins: another parametrization than `FixedMask`, another
            structure than `Block`, or no such weight.
        WorkerError: On all processes that train one model, if their masks differ.
        ValueError: An argument out of range; no `end_step` where an epoch's length is not known.

    Limits: weights are ranked on the host. With `steps_per_execution` of `k > 1` an update waits
    for the end of an execution; if `k` does not divide an epoch it may be made twice.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, use_bias=False)])
        >>> model = kso.sparsify(dense, 0.25, seed=0)
        >>> model.compile("adam", "mse")
        >>> history = model.fit(np.ones((8, 8)), np.ones((8, 8)), batch_size=2, verbose=0,
        ...                     callbacks=[kso.callbacks.SET(frequency=2, end_step=100)])
        >>> kso.prunable_weights(model)[0].live
        16

    References: Mocanu et al. (Nature Communications 9, 2018), arXiv 1707.04780 (new weights are
    random there); Evci et al., "Rigging the lottery" (ICML 2020), arXiv 1911.11134
    """

    def growth_scores(self, weights: Sequence[PrunableWeight], step: int) -> list[np.ndarray]:
        seeds = [derived_seed(self.seed, f"{step}/{weight.path}/grow") for weight in weights]
        storages: list[Any] = [weight.storage for weight in weights]
        shapes = [storage.live_places().shape for storage in storages]
        pairs = zip(shapes, seeds, strict=True)
        return [np.random.default_rng(seed).random(shape) for shape, seed in pairs]


def _structure(weight: PrunableWeight) -> Any:
    drawn_by = getattr(weight.parametrization, "drawn_by", None)
    return drawn_by.structure if isinstance(drawn_by, ExactOrthogonal) else None


def _moved_entries(weight: PrunableWeight, fraction: float, scores: Array, rng: Generator) -> Array:
    """The mask after a fraction of it has moved, within the structure it was drawn with."""
    value, mask = weight.finite_raw_value(), weight.parametrization.mask_value()
    count = math.floor(fraction * np.count_nonzero(mask))
    structure = _structure(weight)
    if structure is None:
        return drop_and_grow(value, mask, count, scores, rng)
    layout = layout_for(weight, weight.parametrization.drawn_by)
    canonical = [np.ascontiguousarray(layout.to_canonical(a)) for a in (value, mask, scores)]
    after = move_blocks(structure, canonical[0], canonical[1], count, canonical[2], rng)
    if np.count_nonzero(after) != np.count_nonzero(mask):
        raise NotPrunableError(
            f"The mask of {weight.path!r} does not have the structure of its initializer: set "
            f"another mask, or `exclude` the weight. Received: {structure=}"
        )
    return np.ascontiguousarray(layout.from_canonical(after, weight.shape))


def _moved_blocks(weight: PrunableWeight, fraction: float, scores: Array, rng: Generator) -> Array:
    """The live blocks after a fraction of them has moved; see `move_regular`."""
    storage: Any = weight.storage
    live, magnitudes = storage.live_places(), storage.live_sums()
    if wrong := np.count_nonzero(~np.isfinite(magnitudes)):
        raise NotPrunableError(
            f"The blocks of {weight.owner.name!r} are not finite. "
            f"Received: {wrong} blocks with infinite or NaN entries"
        )
    count = int(fraction * storage.live) // storage.place_size
    return move_regular(magnitudes, live, count, scores, rng)


# --- one update of one weight, in NumPy -----------------------------------------------------------


def drop_and_grow(value: Array, mask: Array, count: int, scores: Array, rng: Generator) -> Array:
    """Drops the `count` live entries of smallest magnitude, then grows as many by score."""
    result = mask.reshape(-1).copy()
    result[smallest(value, mask, count, rng)] = False
    dead = np.flatnonzero(~result)
    result[dead[largest(scores.reshape(-1)[dead], count, rng)]] = True
    return result.reshape(mask.shape)


def smallest(value: Array, live: Array, count: int, rng: Generator) -> Array:
    entries = np.flatnonzero(live)
    return entries[largest(-np.abs(value.reshape(-1)[entries]), count, rng)]


def largest(scores: Array, count: int, rng: Generator) -> Array:
    """Indices of the `count` largest of a vector of scores; ties are drawn."""
    # A fixed rule would pile up new entries at one end of kernels without gradients.
    if count == 0:
        return np.zeros(0, dtype=np.intp)
    least = np.partition(scores, scores.size - count)[scores.size - count]
    above, equal = np.flatnonzero(scores > least), np.flatnonzero(scores == least)
    if (needed := count - above.size) < equal.size:
        equal = rng.choice(equal, needed, replace=False)
    return np.concatenate([above, equal])


def move_regular(
    magnitudes: Array, live: Array, count: int, scores: Array, rng: Generator
) -> Array:
    """Moves the `count` smallest live entries of matrices to (nearly) the best that keep fans."""
    result = live.copy()
    result.reshape(-1)[smallest(magnitudes, live, count, rng)] = False
    for place in np.ndindex(live.shape[:-2]):
        kept, lost = result[place], live[place] & ~result[place]
        kept |= matched_by_score(kept, lost.sum(axis=1), lost.sum(axis=0), scores[place], rng)
    return result


def move_blocks(
    structure: Block, value: Array, mask: Array, count: int, scores: Array, rng: Generator
) -> Array:
    """Drops as many whole blocks as `count` entries make, then grows as many by sums of scores."""
    # Arrays are canonical (`KernelLayout`). Regular blocks span all taps.
    rows, cols = structure.rows, structure.cols
    taps = range(2, mask.ndim - 2)
    inside = (*(taps if structure.regular else ()), -3, -1)
    arrays = [to_blocks(array, rows, cols) for array in (np.abs(value), scores)]
    magnitudes, totals = (np.asarray(array.sum(axis=inside)) for array in arrays)
    live = np.asarray(to_blocks(mask, rows, cols).any(axis=inside))
    count = int(count * np.count_nonzero(live) // np.count_nonzero(mask))
    move = move_regular if structure.regular else drop_and_grow
    moved = move(magnitudes, live, count, totals, rng).repeat(rows, axis=-2).repeat(cols, axis=-1)
    if structure.regular:
        moved = moved.reshape(*mask.shape[:2], *(1 for _ in taps), *mask.shape[-2:])
    return np.broadcast_to(moved, mask.shape).copy()
