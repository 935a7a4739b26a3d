"""The base of SET and RigL: when weights are dropped and grown, how many, and what is reset."""

import abc
import math
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_integer, is_integer
from keras_sparse_ortho._keras_internals import add_to_logs, applied_batches, leave_logs
from keras_sparse_ortho._ranking import number_of
from keras_sparse_ortho.callbacks._block_moves import block_layer, moved_blocks
from keras_sparse_ortho.callbacks._device_moves import drop_and_grow_on_device
from keras_sparse_ortho.callbacks._lost_steps import restart_error
from keras_sparse_ortho.callbacks._mask_moves import (
    all_finite,
    fixed_mask,
    moved_entries,
    moves_on_device,
)
from keras_sparse_ortho.callbacks._step_callback import StepCallback
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose, derived_seed
from keras_sparse_ortho.models import prunable_weights

# The RigL paper stops at three quarters of the training.
_DEFAULT_END = 0.75


class DynamicSparseTraining(StepCallback):
    """Moves live entries to other places every `frequency` steps; `SET` and `RigL` say where to.

    Subclasses implement `growth_scores`. The callback keeps no state between steps: an update
    depends on the model, the optimizer's step count and the arguments alone. Masks that were drawn
    with a structure keep it: whole blocks move, `ConstantFan` and `NByM` hold for every line and
    group.

    Args:
        frequency: Optimizer steps between updates.
        fraction: The `alpha` of the cosine, in (0, 1].
        end_step: Optimizer step from which on masks stay as they are. Default: three quarters of
            the steps of this `fit`.
        include: Which weights; default: all with a `FixedMask` or live blocks.
        exclude: Which of these not.
        seed: An integer from which every random choice is derived.
    """

    def __init__(
        self,
        frequency: int = 100,
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
                "`seed` must be an integer, so that a resumed run makes the choices of one that "
                f"was not interrupted. Received: {seed=}"
            )
        self.frequency = check_integer("frequency", frequency)
        self.fraction = float(fraction)
        self.end_step = None if end_step is None else check_integer("end_step", end_step)
        self.include = include
        self.exclude = exclude
        self.seed = int(seed)
        self._weights: list[PrunableWeight] = []
        self._until = self.end_step or 0
        self._moved = 0

    @abc.abstractmethod
    def growth_scores(self, weights: Sequence[PrunableWeight], step: int) -> list[Any]:
        """For each weight an array of its shape: of the dead entries, the largest ones grow.

        For one that is stored as live blocks the array has a number for each block, `(I, J)`. An
        array that is not finite in every entry makes this update be left out. What is ranked on a
        device (`moves_on_device`) may have a tensor that is not negative.
        """

    def drop_fraction(self, step: int) -> float:
        """`alpha / 2 (1 + cos(pi t / T_end))` before `T_end`, and 0 from then on."""
        if step >= self._until:
            return 0.0
        return self.fraction / 2 * (1 + math.cos(math.pi * step / self._until))

    def prepare(self) -> None:
        """Finds the weights, and refuses a model without any."""
        self._weights = self._find(self._watched)
        self._until = self._default_end() if self.end_step is None else self.end_step
        add_to_logs(self._watched, self._entries)
        if self._until <= self.frequency:
            warnings.warn(
                f"{type(self).__name__} will make no update: the first would be at step "
                f"{self.frequency}, and masks stay as they are from step {self._until} on.",
                stacklevel=2,
            )

    def on_run_begin(self, start: int, steps: int | None) -> None:
        """Refuses a run that goes on with an optimizer that counts from the start."""
        if start < 0 and not self.synced_step():
            found = f"in a run of which {-start} steps were made before"
            raise restart_error(self, 0, found, can_begin=True)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads how many batches the optimizer has seen before the epoch."""
        super().on_epoch_begin(epoch, logs)
        self._moved = 0

    def on_step(self, step: int, executed: int) -> None:
        """Updates the masks if it is time to."""
        reached = step // self.frequency
        if reached and reached > (step - executed) // self.frequency and step < self._until:
            self._moved += self.update(step)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds `moved` to the logs: entries that moved in this epoch, per live entry."""
        if logs is not None and "moved" not in logs:
            logs.update(self._entries())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Leaves the logs."""
        leave_logs(self._watched)

    def _entries(self) -> dict[str, float]:
        return {"moved": self._moved / sum(weight.live for weight in self._weights)}

    def update(self, step: int) -> int:
        """Drops and grows now, for the cosine at `step`; `fit` calls it when it is due.

        Returns:
            How many entries have moved: those that are live now and were not before.
        """
        return self.change_masks(step, lambda: self._update(step))

    def settings(self) -> dict[str, Any]:
        """Frequency, fraction, end and seed."""
        names = ("frequency", "fraction", "_until", "seed")
        return {name: getattr(self, name) for name in names}

    def _update(self, step: int) -> int:
        scores = self.growth_scores(self._weights, step)
        pairs = zip(self._weights, scores, strict=True)
        wrong = [weight.path for weight, score in pairs if not all_finite(score)]
        if wrong:
            warnings.warn(
                f"{type(self).__name__} left out its update at step {step}: the scores of "
                f"{wrong[:3]} are not finite.",
                stacklevel=2,
            )
            return 0
        moved = 0
        for weight, score in zip(self._weights, scores, strict=True):
            moved += self._update_weight(weight, score, step)
        return moved

    def _update_weight(self, weight: PrunableWeight, scores: Any, step: int) -> int:
        rng = np.random.default_rng(derived_seed(self.seed, f"{step}/{weight.path}"))
        layer = block_layer(weight)
        if layer is not None:
            live = moved_blocks(layer, self.drop_fraction(step), scores, rng)
            return self._move(weight, live)
        if moves_on_device(weight):
            return self._update_on_device(weight, scores, step, rng)
        parametrization = fixed_mask(weight)
        before = parametrization.mask_value()
        count = math.floor(self.drop_fraction(step) * np.count_nonzero(before))
        mask = moved_entries(weight, before, count, scores, rng)
        changed = before ^ mask
        if not changed.any():
            return 0
        return self._move(weight, mask)

    def _update_on_device(
        self, weight: PrunableWeight, scores: Any, step: int, rng: np.random.Generator
    ) -> int:
        own = fixed_mask(weight)
        before = own.mask.value
        count = math.floor(self.drop_fraction(step) * number_of(before))
        raw = weight.variable.value
        mask = drop_and_grow_on_device(raw, before, count, scores, rng, own.mask)
        if mask is None:
            weight.finite_raw_value()  # raises
        grown = number_of(keras.ops.logical_and(mask, keras.ops.logical_not(before)))
        if grown:
            own.move(mask, self._watched.optimizer)
        return grown

    def _move(self, weight: PrunableWeight, live: np.ndarray) -> int:
        """Makes these places of a weight live; how many entries have grown."""
        assert weight.storage is not None
        grown = int(np.count_nonzero(live & ~weight.storage.live_places()))
        weight.storage.move(live, self._watched.optimizer)
        return grown * weight.storage.place_size

    def _find(self, model: Any) -> list[PrunableWeight]:
        known = prunable_weights(model)
        sparse = [w for w in known if w.parametrization is not None or block_layer(w) is not None]
        rule = (
            f"{type(self).__name__} moves the entries of masks that are otherwise fixed "
            "(`FixedMask`), and live blocks: "
        )
        for weight in sparse:
            if weight.storage is None or not weight.storage.movable:
                raise NotPrunableError(
                    f"{rule}other parametrizations choose their live entries themselves. "
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

    def _default_end(self) -> int:
        epochs, steps = self.length()
        if not epochs or not steps:
            raise ValueError(
                "`end_step` must be given where the number of steps is not known beforehand. "
                f"Received: end_step=None, {epochs=}, {steps=}"
            )
        _, accumulated = applied_batches(self._watched.optimizer)
        return math.floor(_DEFAULT_END * epochs * steps / accumulated)
