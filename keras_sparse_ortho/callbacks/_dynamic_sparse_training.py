"""`DynamicSparseTraining`, the base of SET and RigL, and `SET`: sparse evolutionary training."""

from __future__ import annotations

import abc
import math
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_integer, is_integer
from keras_sparse_ortho._keras_internals import applied_batches, level_of_user
from keras_sparse_ortho._optimizer_slots import WarmStart
from keras_sparse_ortho._ranking import (
    drop_and_grow_on_device,
    number_of,
    random_order,
    random_order_on_device,
    ranks_on_device,
)
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.callbacks._drop_and_grow import drop_and_grow, move, move_regular
from keras_sparse_ortho.callbacks._step_callback import StepCallback
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import ExactOrthogonal, layout_for
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose, derived_seed
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.schedules import default_frequency

# The RigL paper stops at three quarters of the training.
_DEFAULT_END = 0.75


class DynamicSparseTraining(StepCallback):
    """Moves live entries every `frequency` steps, to where `growth_scores` of a subclass says.

    It keeps no state between steps: an update depends on the model, the optimizer's step count and
    the arguments alone, which are those of `SET`.
    """

    def __init__(
        self,
        frequency: int | None = None,
        fraction: float = 0.3,
        end_step: int | None = None,
        include: Selection = None,
        exclude: Selection = None,
        seed: int = 0,
        warm_moments: bool = False,
    ) -> None:
        super().__init__()
        self.warm_moments = bool(warm_moments)
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
    def growth_scores(self, weights: Sequence[PrunableWeight], step: int) -> list[Any]:
        """Scores of each weight, in its shape: the dead entries with the largest ones grow.

        Live blocks have a score each, `(I, J)`. The update is skipped if a score is not finite.
        Weights for which `moves_on_device` may have a tensor, without negative scores.
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
        """Counts moved entries from zero."""
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
        names = ("_every", "fraction", "_until", "seed", "warm_moments")
        return {name: getattr(self, name) for name in names}

    def _move_all(self, step: int) -> int:
        scores = self.growth_scores(self._weights, step)
        pairs = list(zip(self._weights, scores, strict=True))
        wrong = [weight.path for weight, score in pairs if not _all_finite(score)]
        if wrong:
            warnings.warn(
                f"{type(self).__name__} skipped its update at step {step}: the scores of "
                f"{wrong[:3]} are not finite.",
                stacklevel=2,
            )
            return 0
        return sum(self._update_weight(weight, score, step) for weight, score in pairs)

    def _update_weight(self, weight: PrunableWeight, scores: Any, step: int) -> int:
        rng = np.random.default_rng(derived_seed(self.seed, f"{step}/{weight.path}"))
        assert weight.storage is not None
        if weight.storage.in_blocks:
            return self._move(weight, _moved_blocks(weight, self.drop_fraction(step), scores, rng))
        if moves_on_device(weight):
            return self._update_on_device(weight, scores, step, rng)
        before = weight.parametrization.mask_value()
        count = math.floor(self.drop_fraction(step) * np.count_nonzero(before))
        return self._move(weight, _moved_entries(weight, before, count, scores, rng))

    def _update_on_device(
        self, weight: PrunableWeight, scores: Any, step: int, rng: np.random.Generator
    ) -> int:
        own = weight.parametrization
        before = own.mask.value
        count = math.floor(self.drop_fraction(step) * number_of(before))
        raw = weight.variable.value
        mask = drop_and_grow_on_device(raw, before, count, scores, rng, own.mask)
        if mask is None:
            weight.finite_raw_value()  # raises
        grown = number_of(keras.ops.logical_and(mask, keras.ops.logical_not(before)))
        if grown:
            own.move(mask, self._slots_of())
        return grown

    def _move(self, weight: PrunableWeight, live: np.ndarray) -> int:
        """Makes these places of a weight live; how many entries have grown."""
        assert weight.storage is not None
        grown = int(np.count_nonzero(live & ~weight.storage.live_places()))
        weight.storage.move(live, self._slots_of())
        return grown * weight.storage.place_size

    def _slots_of(self) -> Any:
        """The optimizer, with `WarmStart` if that is asked for."""
        return WarmStart(self.optimizer) if self.warm_moments else self.optimizer

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

    of them, those of smallest magnitude, and as many of the entries that are then dead become
    live, drawn uniformly. The number of live entries of each layer does not change. As in the RigL
    paper's SET, an entry that was just dropped may be drawn; it is then as if it had stayed.

    Masks that `ExactOrthogonal` drew with a structure keep it. Whole blocks move, by the sums over
    their entries; with `NByM` entries grow where a group has room. Live blocks (as of
    `layers.BlockSparseDense`) move as those of `Block(r, c, regular=True)`: every line of blocks
    keeps its fan.

    Entries that became live start from zero. Raw weights of dropped and grown entries are set to
    zero, and so are their moments and averages in the optimizer. Masks are variables: nothing is
    recompiled. Random choices follow from `seed`, the step and the path of the weight, so that a
    run killed and resumed from a checkpoint equals one that was not. `moved` in the logs of an
    epoch is how many entries moved in it, as a fraction of the live ones.

    A custom training loop calls `update(step)` before every step: see docs/custom_loops.md. `move`
    does an update at once, due or not.

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
        warm_moments: bool. Whether second moments (Adam's `v`) of grown entries start at the mean
            of the layer's others. With 0, the default and the paper's way, their first update under
            Adam is 1 to 3 learning rates, 40 times that of the others. The mean lets the loss rise
            less after an update, but cost accuracy (`benchmarks/results/warm_moments.md`).

    Raises:
        NotPrunableError: When training begins, if a weight has another parametrization than
            `FixedMask`, or no weight has one or live blocks.
        WorkerError: On all processes that train one model, if their models or arguments differ
            before the first step, or their masks after an update.
        ValueError: An argument out of range; no `end_step` where an epoch's length is not known.

    Limits: on accelerators the entries of masks are ranked on the device; weights in compact
    storage, in blocks, or with a structure are copied to the host and ranked there. With
    `steps_per_execution` of `k > 1` an update waits for the end of an execution, and where `k`
    does not divide an epoch it may be made twice. After a step that a `LossScaleOptimizer` skips
    for an overflow the update is repeated, which changes nothing.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, use_bias=False)])
    >>> model = kso.sparsify(dense, 0.25, seed=0)
    >>> model.compile("adam", "mse")
    >>> x, y = np.ones((8, 8)), np.ones((8, 8))
    >>> callback = kso.callbacks.SET(frequency=2, end_step=100)
    >>> history = model.fit(x, y, batch_size=2, verbose=0, callbacks=[callback])
    >>> kso.prunable_weights(model)[0].live
    16

    References:

    - Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse
      connectivity inspired by network science", Nature Communications 9 (2018), arXiv 1707.04780.
      (There new weights are random; here they are zero, as in the comparison of the RigL paper.)
    - Evci et al., "Rigging the lottery" (ICML 2020), arXiv 1911.11134
    """

    def growth_scores(self, weights: Sequence[PrunableWeight], step: int) -> list[Any]:
        """Random numbers, drawn where the weight is ranked."""
        return [self._drawn(weight, step) for weight in weights]

    def _drawn(self, weight: PrunableWeight, step: int) -> Any:
        seed = derived_seed(self.seed, f"{step}/{weight.path}/grow")
        draw = random_order_on_device if moves_on_device(weight) else random_order
        assert weight.storage is not None
        in_blocks = weight.storage.in_blocks
        return draw(weight.storage.live_places().shape if in_blocks else weight.shape, seed)


def moves_on_device(weight: PrunableWeight) -> bool:
    """Whether the entries of a weight are ranked where they are: only masks without structure."""
    if weight.storage is None or weight.storage.compact:
        return False
    return _structure(weight) is None and ranks_on_device(weight.variable)


def _structure(weight: PrunableWeight) -> Any:
    """The initializer that drew the mask, if it has a structure; else `None`."""
    drawn_by = weight.parametrization.drawn_by
    if not isinstance(drawn_by, ExactOrthogonal) or drawn_by.structure is None:
        return None
    return drawn_by


def _all_finite(scores: Any) -> bool:
    """Whether all scores, in NumPy or a tensor, are finite."""
    if isinstance(scores, np.ndarray):
        return bool(np.isfinite(scores).all())
    if keras.backend.standardize_dtype(scores.dtype).startswith("int"):
        return True
    return bool(to_numpy(keras.ops.all(keras.ops.isfinite(scores))))


def _moved_entries(
    weight: PrunableWeight,
    mask: np.ndarray,
    count: int,
    scores: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """The mask after `count` entries have moved, within the structure it was drawn with."""
    value = weight.finite_raw_value()
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
