"""`DynamicSparseTraining`, the base of SET and RigL, and `SET`: sparse evolutionary training."""

from __future__ import annotations

import abc
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._checks import check_integer, is_integer
from keras_sparse_ortho._keras_internals import applied_batches, level_of_user
from keras_sparse_ortho.callbacks._drop_and_grow import drop_and_grow, move, move_regular
from keras_sparse_ortho.callbacks._step_callback import StepCallback
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import ExactOrthogonal, layout_for
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose, derived_seed
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.schedules import default_frequency

# The RigL paper stops at three quarters of the training.
_DEFAULT_END = 0.75
# Of the hash `lowbias32`, github.com/skeeto/hash-prospector.
_FACTORS = (0x7FEB352D, 0x846CA68B)


class DynamicSparseTraining(StepCallback):
    """Moves live entries every `frequency` steps, to where `growth_scores` of a subclass says.

    An update depends on the model, the optimizer's step count and the arguments of `SET` alone.
    """

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
        if isinstance(fraction, bool | str) or not 0 < fraction <= 1:
            raise ValueError(f"`fraction` must be in (0, 1]. Received: fraction={fraction!r}")
        if not is_integer(seed):
            raise ValueError(
                "`seed` must be an integer, so that a resumed run draws the same as one that was "
                f"not interrupted. Received: {seed=}"
            )
        self.frequency = None if frequency is None else check_integer("frequency", frequency)
        self.fraction = float(fraction)
        self.end_step = None if end_step is None else check_integer("end_step", end_step)
        self.include = include
        self.exclude = exclude
        self.seed = int(seed)
        self._weights: list[PrunableWeight] = []
        self._until = self.end_step or 0
        self._every = self.frequency or 1
        self._moved = 0

    @abc.abstractmethod
    def growth_scores(self, weights: Sequence[PrunableWeight], step: int) -> list[np.ndarray]:
        """Scores of each weight, in its shape (of blocks `(I, J)`): the largest dead ones grow.

        The update is skipped if a score is not finite.
        """

    def drop_fraction(self, step: int) -> float:
        """`alpha / 2 (1 + cos(pi t / T_end))` before `T_end`, and 0 from then on."""
        if step >= self._until:
            return 0.0
        return self.fraction / 2 * (1 + math.cos(math.pi * step / self._until))

    def prepare(self) -> None:
        """Finds the weights, and refuses a model without any."""
        self._weights = self._find(self._watched)
        if self.end_step is None:
            epochs, steps = self.length()
            if not epochs or not steps:
                raise ValueError(
                    "`end_step` must be given if the number of steps is not known before training. "
                    f"Received: end_step=None, {epochs=}, {steps=}"
                )
            accumulated = 1 if self.in_loop else applied_batches(self._watched.optimizer)[1]
            self._until = math.floor(_DEFAULT_END * epochs * steps / accumulated)
        self._every = self.frequency or default_frequency(self._until)
        if self._until <= self._every:
            warnings.warn(
                f"{type(self).__name__} will make no update: the first would be at step "
                f"{self._every}, and masks do not change from step {self._until} on.",
                stacklevel=2,
            )

    def on_run_begin(self, step: int, start: int, steps: int | None) -> None:
        """Refuses to continue a run with an optimizer that counts from the start."""
        self.sync()
        if start < 0 and not step:
            found = f"in a run that had made {-start} steps before"
            raise self.restart_error(0, found, can_begin=True)
        if start > 0 and self.end_step is None and step >= self._until:
            warnings.warn(
                f"{type(self).__name__} will make no update: its default `end_step` is three "
                f"quarters of this `fit`, step {self._until}, and earlier ones have passed it. "
                "For several calls of `fit` give the last step of all: `end_step=...`. "
                f"Received: end_step=None, the optimizer at step {step}",
                stacklevel=level_of_user(),
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._moved = 0

    def is_due(self, step: int, executed: int) -> bool:
        """Whether a multiple of the frequency was reached, before `T_end`."""
        reached = step // self._every
        return 0 < reached > (step - executed) // self._every and step < self._until

    def on_step(self, step: int, executed: int) -> None:
        """Updates the masks."""
        self._moved += self.move(step)

    def logged(self) -> dict[str, float]:
        """`moved`: entries that moved in this epoch, per live entry."""
        return {"moved": self._moved / sum(weight.live for weight in self._weights)}

    def move(self, step: int) -> int:
        """Drops and grows now, due or not, for the cosine at `step`; how many have moved."""
        return self.change_masks(step, lambda: self._move_all(step))

    def settings(self) -> dict[str, Any]:
        """Frequency, fraction, end and seed."""
        names = ("_every", "fraction", "_until", "seed")
        return {name: getattr(self, name) for name in names}

    def _move_all(self, step: int) -> int:
        scores = self.growth_scores(self._weights, step)
        pairs = list(zip(self._weights, scores, strict=True))
        wrong = [weight.path for weight, score in pairs if not np.isfinite(score).all()]
        if wrong:
            warnings.warn(
                f"{type(self).__name__} skipped its update at step {step}: the scores of "
                f"{wrong[:3]} are not finite.",
                stacklevel=2,
            )
            return 0
        return sum(self._update_weight(weight, score, step) for weight, score in pairs)

    def _update_weight(self, weight: PrunableWeight, scores: np.ndarray, step: int) -> int:
        storage = weight.storage
        assert storage is not None
        rng = np.random.default_rng(derived_seed(self.seed, f"{step}/{weight.path}"))
        moved = _moved_blocks if storage.in_blocks else _moved_entries
        live = moved(weight, self.drop_fraction(step), scores, rng)
        grown = int(np.count_nonzero(live & ~storage.live_places()))
        storage.move(live, self.optimizer)
        return grown * storage.place_size

    def _find(self, model: Any) -> list[PrunableWeight]:
        known = prunable_weights(model)
        sparse = [w for w in known if w.storage is not None]
        rule = f"{type(self).__name__} trains weights with a `FixedMask` or live blocks: "
        for weight in sparse:
            if weight.storage is None or not weight.storage.movable:
                raise NotPrunableError(
                    f"{rule}other parametrizations choose their own live entries. "
                    f"Received: '{weight.path}' with {type(weight.parametrization).__name__}"
                )
        chosen = choose(sparse, self.include, self.exclude) if sparse else []
        chosen = [weight for weight in chosen if weight.variable.trainable]
        if not chosen:
            raise NotPrunableError(
                f"{rule}make the model sparse first, with keras_sparse_ortho.sparsify. Received: "
                f"the model '{model.name}' with no such trainable weight"
            )
        return chosen


class SET(DynamicSparseTraining):
    """Sparse evolutionary training (SET): small weights are dropped, and as many grow at random.

    Before step `t = frequency, 2 frequency, ... < T_end` each layer with `n` live entries drops

        floor(f(t) n),  f(t) = alpha / 2 (1 + cos(pi t / T_end))

    of them, those of smallest magnitude, and as many of the entries that are then dead become live,
    drawn uniformly. Grown entries start from zero, and so do the moments and averages of grown and
    dropped ones. As in the RigL paper, an entry that was just dropped may be drawn; it is then as
    if it had stayed.

    Masks that `ExactOrthogonal` drew with a structure keep it. Whole blocks move, by the sums over
    their entries; with `NByM` entries grow where a group has room. Live blocks
    (`layers.BlockSparseDense`) move as those of `Block(r, c, regular=True)`: every line of blocks
    keeps its fan.

    Random choices follow from `seed`, the step and the path of the weight, so a run that is resumed
    from a checkpoint equals one that was not interrupted. `moved` in the logs of an epoch is the
    fraction of live entries that moved in it. A custom training loop calls `update(step)` before
    every step: see docs/custom_loops.md. `move` does an update at once, due or not.

    Args:
        frequency: Optimizer steps between updates. Default: a hundredth of `T_end`, at least 1 and
            at most 100, the paper's.
        fraction: `alpha`, the part of the live weights to drop at first, in (0, 1].
        end_step: `T_end`, the optimizer step from which on masks do not change. Default: three
            quarters of `epochs * steps` of this `fit`. Give it for runs in several calls of `fit`.
        include: Weights to train this way: paths, regular expressions or a predicate. Default: all
            trainable ones with a `FixedMask` or live blocks.
        exclude: Which of these to leave out.
        seed: An integer.

    Raises:
        NotPrunableError: When training begins, if a weight has another parametrization than
            `FixedMask`, or no weight has one or live blocks.
        WorkerError: On all processes that train one model, if their models or arguments differ
            before the first step, or their masks after an update.
        ValueError: An argument out of range; no `end_step` where an epoch's length is not known.

    Limits: weights are ranked on the host. With `steps_per_execution` of `k > 1` an update waits
    for the end of an execution, and where `k` does not divide an epoch it may be made twice.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, use_bias=False)])
    >>> model = kso.sparsify(dense, 0.25, seed=0)
    >>> model.compile("adam", "mse")
    >>> callback = kso.callbacks.SET(frequency=2, end_step=100)
    >>> history = model.fit(np.ones((8, 8)), np.ones((8, 8)), batch_size=2, verbose=0,
    ...                     callbacks=[callback])
    >>> kso.prunable_weights(model)[0].live
    16

    References:

    - Mocanu et al. (Nature Communications 9, 2018), arXiv 1707.04780 (new weights are random there)
    - Evci et al., "Rigging the lottery" (ICML 2020), arXiv 1911.11134
    """

    def growth_scores(self, weights: Sequence[PrunableWeight], step: int) -> list[np.ndarray]:
        seeds = [derived_seed(self.seed, f"{step}/{weight.path}/grow") for weight in weights]
        return [
            random_order(weight.storage.live_places().shape, seed)
            for weight, seed in zip(weights, seeds, strict=True)
            if weight.storage is not None
        ]


def random_order(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Pseudo-random numbers in [0, 1): hashes of flat index and seed, by `lowbias32` twice."""
    index = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.uint32)
    for key in np.random.SeedSequence(seed).generate_state(2):
        index ^= key
        index ^= index >> np.uint32(16)
        index *= np.uint32(_FACTORS[0])
        index ^= index >> np.uint32(15)
        index *= np.uint32(_FACTORS[1])
        index ^= index >> np.uint32(16)
    return (index >> np.uint32(1)).reshape(shape) / 2.0**31


def _structure(weight: PrunableWeight) -> Any:
    """The initializer that drew the mask, if it has a structure; else `None`."""
    drawn_by = weight.parametrization.drawn_by
    if not isinstance(drawn_by, ExactOrthogonal) or drawn_by.structure is None:
        return None
    return drawn_by


def _moved_entries(
    weight: PrunableWeight, fraction: float, scores: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """The mask after a fraction of it has moved, within the structure it was drawn with."""
    value, mask = weight.finite_raw_value(), weight.parametrization.mask_value()
    count = math.floor(fraction * np.count_nonzero(mask))
    drawn_by = _structure(weight)
    if drawn_by is None:
        return drop_and_grow(value, mask, count, scores, rng)
    layout = layout_for(weight, drawn_by)
    canonical = [np.ascontiguousarray(layout.to_canonical(a)) for a in (value, mask, scores)]
    after = move(drawn_by.structure, canonical[0], canonical[1], count, canonical[2], rng)
    if np.count_nonzero(after) != np.count_nonzero(mask):
        raise NotPrunableError(
            f"The mask of '{weight.path}' does not have the structure of its initializer: set "
            f"another mask, or `exclude` the weight. Received: structure={drawn_by.structure}"
        )
    return np.ascontiguousarray(layout.from_canonical(after, weight.shape))


def _moved_blocks(
    weight: PrunableWeight, fraction: float, scores: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Which blocks are live after a fraction of them has moved; see `move_regular`."""
    storage = weight.storage
    assert storage is not None
    live, magnitudes = storage.live_places(), storage.live_sums()
    if not np.isfinite(magnitudes).all():
        wrong = np.count_nonzero(~np.isfinite(magnitudes))
        raise NotPrunableError(
            f"The blocks of '{weight.owner.name}' are not finite. "
            f"Received: {wrong} blocks with infinite or NaN entries"
        )
    count = int(fraction * storage.live) // storage.place_size
    arrays = (array.reshape(-1, *live.shape[-2:]) for array in (magnitudes, live, scores))
    magnitudes, matrices, scores = arrays
    return move_regular(magnitudes, matrices, count, scores, rng).reshape(live.shape)
