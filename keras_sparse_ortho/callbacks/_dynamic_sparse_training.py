"""`SET`, sparse evolutionary training, and `DynamicSparseTraining`, its base and that of RigL."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence

import keras
import numpy as np

from keras_sparse_ortho._checks import (
    check_density,
    check_integer,
    other_keywords,
)
from keras_sparse_ortho._keras_internals import applied_batches, warn_user
from keras_sparse_ortho._types import Config
from keras_sparse_ortho.callbacks._moves import (
    drop_and_grow,
    move_blocks,
    move_regular,
)
from keras_sparse_ortho.callbacks._step_callback import StepCallback
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import ExactOrthogonal, layout_for
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    Selection,
    Storage,
    choose,
    derived_seed,
)
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.orthogonal import Block, Structure
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
        if frequency is not None:
            frequency = check_integer("frequency", frequency)
        if end_step is not None:
            end_step = check_integer("end_step", end_step)
        self.frequency = frequency
        self.fraction = check_density(fraction, "fraction")
        self.end_step = end_step
        self.include = include
        self.exclude = exclude
        # An integer: a resumed run draws the same as an uninterrupted one.
        self.seed = check_integer("seed", seed, least=0)
        self._weights: list[PrunableWeight] = []
        self._until = self.end_step or 0
        self._every = self.frequency or 1
        self._moved = 0

    @abc.abstractmethod
    def growth_scores(
        self,
        weights: Sequence[PrunableWeight],
        step: int,
    ) -> list[np.ndarray]:
        """Scores in the shape of each weight (of blocks `(I, J)`); NaN or inf skips the update."""

    def drop_fraction(self, step: int) -> float:
        if step >= self._until:
            return 0.0
        position = step / self._until
        return self.fraction / 2 * (1 + math.cos(math.pi * position))

    def prepare(self) -> None:
        self._weights = self._movable_weights(self._watched)
        if self.end_step is None:
            self._until = self._default_end()
        self._every = self.frequency or default_frequency(self._until)
        if self._until <= self._every:
            warn_user(
                f"{type(self).__name__} will make no update: the first would be at step "
                f"{self._every}, and masks do not change from step {self._until} on."
            )

    def _default_end(self) -> int:
        """Three quarters of the training, as in the RigL paper."""
        epochs, steps = self.length()
        if not epochs or not steps:
            raise ValueError(
                "`end_step` must be given if the number of steps is not known before training. "
                f"Received: end_step=None, {epochs=}, {steps=}"
            )
        accumulated = 1
        if not self.in_loop:
            _, accumulated = applied_batches(self._watched.optimizer)
        return math.floor(0.75 * epochs * steps / accumulated)

    def on_run_begin(
        self,
        step: int,
        start: int,
        steps: int | None,
    ) -> None:
        self.sync()
        if start < 0 and not step:
            place = f"in a run that had made {-start} steps before"
            raise self.restart_error(0, place, can_begin=True)
        if start > 0 and self.end_step is None and step >= self._until:
            warn_user(
                f"{type(self).__name__} will make no update: its default `end_step` is three "
                f"quarters of this `fit`, step {self._until}, and earlier ones have passed it. "
                "For several calls of `fit` give the last step of all: `end_step=...`. "
                f"Received: end_step=None, the optimizer at step {step}"
            )

    def on_epoch_begin(
        self,
        epoch: int,
        logs: Config | None = None,
    ) -> None:
        super().on_epoch_begin(epoch, logs)
        self._moved = 0

    def is_due(
        self,
        step: int,
        executed: int,
    ) -> bool:
        updates = step // self._every
        updates_before = (step - executed) // self._every
        return 0 < updates > updates_before and step < self._until

    def on_step(
        self,
        step: int,
        executed: int,
    ) -> None:
        self._moved += self.move(step)

    def logged(self) -> dict[str, float]:
        live = sum(weight.live for weight in self._weights)
        return {"moved": self._moved / live}

    def move(self, step: int) -> int:
        """Drops and grows now, for the cosine at `step`; returns how many have moved."""

        def update() -> int:
            scores = self.growth_scores(self._weights, step)
            pairs = list(zip(self._weights, scores, strict=True))
            wrong_paths = [
                weight.path
                for weight, score in pairs
                if not np.isfinite(score).all()
            ]
            if wrong_paths:
                warn_user(
                    f"{type(self).__name__} skipped its update at step {step}: the scores of "
                    f"{wrong_paths[:3]} are not finite."
                )
                return 0
            return sum(
                self._move_weight(weight, score, step)
                for weight, score in pairs
            )

        return self.change_masks(step, update)

    def _move_weight(
        self,
        weight: PrunableWeight,
        scores: Array,
        step: int,
    ) -> int:
        """Moves live entries or blocks of one weight; returns how many entries have moved."""
        storage = _storage_of(weight)
        rng = np.random.default_rng(
            derived_seed(self.seed, f"{step}/{weight.path}")
        )
        move = _moved_entries
        if storage.in_blocks:
            move = _moved_blocks
        live = move(weight, self.drop_fraction(step), scores, rng)
        grown = np.count_nonzero(live & ~storage.live_places())
        storage.move(live, self.optimizer)
        return int(grown) * storage.place_size

    def _movable_weights(self, model: keras.Model) -> list[PrunableWeight]:
        """The weights to train; raises NotPrunableError where no update can move one."""
        sparse = [
            weight
            for weight in prunable_weights(model)
            if weight.storage is not None
        ]
        rule = f"{type(self).__name__} trains weights with a `FixedMask` or live blocks: "
        for weight in sparse:
            if weight.storage is not None and not weight.storage.movable:
                raise NotPrunableError(
                    f"{rule}other parametrizations choose their own live entries. "
                    f"Received: {weight.path!r} with {type(weight.parametrization).__name__}"
                )
        selected = sparse
        if sparse:
            selected = choose(sparse, self.include, self.exclude)
        trainable = [weight for weight in selected if weight.variable.trainable]
        if not trainable:
            raise NotPrunableError(
                f"{rule}make the model sparse first, with keras_sparse_ortho.sparsify. Received: "
                f"the model {model.name!r} with no such trainable weight"
            )
        for weight in trainable:
            structure = _structure(weight)
            if structure is not None and not isinstance(structure, Block):
                raise NotPrunableError(
                    f"No update keeps the structure of {weight.path!r}: `exclude` it. "
                    f"Received: structure={structure}"
                )
        return trainable


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

    def growth_scores(
        self,
        weights: Sequence[PrunableWeight],
        step: int,
    ) -> list[np.ndarray]:
        scores = []
        for weight in weights:
            seed = derived_seed(self.seed, f"{step}/{weight.path}/grow")
            shape = _storage_of(weight).live_places().shape
            scores.append(np.random.default_rng(seed).random(shape))
        return scores


def _storage_of(weight: PrunableWeight) -> Storage:
    """The storage of a weight that is known to be sparse."""
    assert weight.storage is not None
    return weight.storage


def _structure(weight: PrunableWeight) -> Structure | None:
    """The structure that a mask was drawn with."""
    drawn_by = getattr(weight.parametrization, "drawn_by", None)
    if isinstance(drawn_by, ExactOrthogonal):
        return drawn_by.structure
    return None


def _moved_entries(
    weight: PrunableWeight,
    fraction: float,
    scores: Array,
    rng: Generator,
) -> Array:
    """The mask after a fraction of it has moved, within the structure it was drawn with."""
    value = weight.finite_raw_value()
    mask = weight.parametrization.mask_value()
    count = math.floor(fraction * np.count_nonzero(mask))
    structure = _structure(weight)
    if structure is None:
        return drop_and_grow(value, mask, count, scores, rng)
    assert isinstance(structure, Block)  # `_movable_weights` refuses others
    layout = layout_for(weight, weight.parametrization.drawn_by)
    canonical_value, canonical_mask, canonical_scores = (
        np.ascontiguousarray(layout.to_canonical(array))
        for array in (value, mask, scores)
    )
    moved_mask = move_blocks(
        structure,
        canonical_value,
        canonical_mask,
        count,
        canonical_scores,
        rng,
    )
    if np.count_nonzero(moved_mask) != np.count_nonzero(mask):
        raise NotPrunableError(
            f"The mask of {weight.path!r} does not have the structure of its initializer: set "
            f"another mask, or `exclude` the weight. Received: {structure=}"
        )
    return np.ascontiguousarray(layout.from_canonical(moved_mask, weight.shape))


def _moved_blocks(
    weight: PrunableWeight,
    fraction: float,
    scores: Array,
    rng: Generator,
) -> Array:
    """The live blocks after a fraction of them has moved; see `move_regular`."""
    storage = _storage_of(weight)
    magnitudes = storage.live_sums()
    wrong = np.count_nonzero(~np.isfinite(magnitudes))
    if wrong:
        raise NotPrunableError(
            f"The blocks of {weight.owner.name!r} are not finite. "
            f"Received: {wrong} blocks with infinite or NaN entries"
        )
    count = int(fraction * storage.live) // storage.place_size
    return move_regular(magnitudes, storage.live_places(), count, scores, rng)
