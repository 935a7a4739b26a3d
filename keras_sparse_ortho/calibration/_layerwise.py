"""Trained kernels pruned or refitted layer by layer, on the inputs that calibration data give."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checked_data import check_inputs, warn_of_few_rows, warn_of_weights
from keras_sparse_ortho._data import first_batches, is_batched, samples
from keras_sparse_ortho._interception import Enough, observe
from keras_sparse_ortho._keras_internals import (
    VariableOverrides,
    from_zero_states,
    warn_user,
)
from keras_sparse_ortho._values import (
    is_traced,
    placed,
    without_gradients,
)
from keras_sparse_ortho.calibration._channels import Channels
from keras_sparse_ortho.calibration._resume import SavedKernels
from keras_sparse_ortho.calibration._rows import Moments, as_matrices, from_matrices, stop_of
from keras_sparse_ortho.calibration._scores import LayerScore
from keras_sparse_ortho.calibration._solve import Blocks, Entries, Pattern, refit
from keras_sparse_ortho.errors import BudgetError, LayoutError, NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw, Draw, PackedDraw
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight
from keras_sparse_ortho.orthogonal import Block, NByM, depthwise_outputs

_ROWS = 64  # of a batch
_MOST_BATCHES = 64
_UNMEASURED = (
    "It is not known how these kernels multiply inputs of their layers, or no calibration input "
    "reaches them outside of compiled code"
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the kernels of a model are pruned one by one."""

    score: LayerScore | None = None  # unless there are `scores` or `masks`
    counts: Mapping[str, int] | None = None  # live entries by path; or
    masks: Mapping[str, np.ndarray] | None = None  # given ones by path
    structure: NByM | Channels | None = None
    blocks: Mapping[str, Block] = dataclasses.field(default_factory=dict)  # by path
    # Where a Flatten is in front, how many inputs are one of its channels, by path.
    positions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    refit: bool = False  # whether live entries of scores and masks get new values
    scores: Mapping[str, np.ndarray] | None = dataclasses.field(default=None, repr=False)  # by path

    def solved(self, weight: PrunableWeight, *moments: Moments) -> tuple[np.ndarray, np.ndarray]:
        """Values and mask for inputs with these moments."""
        kernel = as_matrices(weight.finite_raw_value(), weight.layout)
        if self.score is not None:
            count, pattern = self._count(weight), self.pattern(weight)
            kernel, mask = self.score.solve(kernel, count, pattern, *moments)
        else:
            mask = self._mask(weight)
            if self.refit and moments:
                kernel = refit(kernel, mask, *moments)
        value, mask = (from_matrices(x, weight.shape, weight.layout) for x in (kernel, mask))
        return value, mask

    def _mask(self, weight: PrunableWeight) -> np.ndarray:
        """The given mask, or that of the largest scores, of matrices."""
        if self.masks is not None:
            return as_matrices(self.masks[weight.path], weight.layout)
        assert self.scores is not None
        scores = as_matrices(self.scores[weight.path], weight.layout)
        return self.pattern(weight).largest(scores, self._count(weight))

    def draw(self, weight: PrunableWeight, value: np.ndarray, mask: np.ndarray) -> AnyDraw:
        block = self.blocks.get(weight.path)
        if block is None:
            return PackedDraw.of(value, mask, None)
        return Draw(mask, value, block=(block.rows, block.cols))

    def settings(self) -> str:
        """The recipe as text, without its arrays: their text is shortened."""
        return repr(dataclasses.replace(self, masks=None, scores=None))

    def arrays(self) -> dict[str, np.ndarray]:
        """The masks and scores that the recipe was given."""
        masks, scores = self.masks or {}, self.scores or {}
        arrays = {f"mask of {path}": np.asarray(masks[path]) for path in sorted(masks)}
        arrays |= {f"scores of {path}": np.asarray(scores[path]) for path in sorted(scores)}
        return arrays

    def check(self, weights: Sequence[PrunableWeight]) -> None:
        """Refuses kernels that the structure does not fit, and more live entries than it allows."""
        if self.structure is None:
            return
        missed = []
        for weight in weights:
            shape = self._shape(weight)
            try:
                self.structure.check(shape)
            except LayoutError as error:
                raise LayoutError(f"The weight {weight.path!r} does not fit: {error}") from None
            assert self.counts is not None
            now, then = self._count(weight), self.counts[weight.path]
            missed += other_density(f"{weight.path!r}", now, then, weight.size)
            if isinstance(self.structure, NByM) and now > self.structure.most(shape):
                raise BudgetError(
                    f"{self.structure} allows at most {self.structure.most(shape)} live entries "
                    f"in {weight.path!r}. Received: {now}"
                )
        if missed:
            warn_user(f"{self.structure} allows whole groups only. Received: {'; '.join(missed)}")

    def pattern(self, weight: PrunableWeight) -> Pattern:
        structure, shape = self.blocks.get(weight.path, self.structure), self._shape(weight)
        if isinstance(structure, Channels):
            return Blocks(Block(structure.group, shape[-1]), shape, few=False)
        if isinstance(structure, Block):
            return Blocks(structure, shape)
        floored = structure is None and depthwise_outputs(weight.shape, weight.layout) > 0
        return Entries(structure, math.prod(shape[2:-2]), floored)

    def _count(self, weight: PrunableWeight) -> int:
        assert self.counts is not None
        count = self.counts[weight.path]
        if isinstance(self.structure, Channels):
            return self.structure.nearest(self._shape(weight), count)
        return max(count, 1)

    def _shape(self, weight: PrunableWeight) -> tuple[int, ...]:
        """The canonical shape; positions of a channel behind Flatten count as taps."""
        *most, inputs, outputs = canonical_shape(weight)
        times = self.positions.get(weight.path, 1)
        return (*most, times, inputs // times, outputs) if times > 1 else (*most, inputs, outputs)


def other_density(name: str, now: int, then: int, size: int) -> list[str]:
    """A warning's text for a density that is off by more than a tenth; else nothing."""
    far = abs(now - then) > 0.1 * then
    return [f"{name} has the density {now / size:.4g} instead of {then / size:.4g}"] * far


def canonical_shape(weight: PrunableWeight) -> tuple[int, ...]:
    return (weight.layout or KernelLayout.convolution()).canonical_shape(weight.shape)


def measurable(
    model: Any, weights: Sequence[PrunableWeight], batches: Sequence[Any], *, given: bool = False
) -> list[PrunableWeight]:
    """The measurable kernels that the first batch reaches; warns of others, or refuses `given`."""
    stops = {w.path: stop for w in weights if (stop := stop_of(model, w, lambda *_: None))}
    with from_zero_states(model), without_gradients():
        reached = {stop.path for stop in _calls(model, batches[0], list(stops.values()))}
    found = [weight for weight in weights if weight.path in reached]
    names = ", ".join(f"{weight.path!r}" for weight in weights if weight not in found)
    if names and (given or not found):
        raise NotPrunableError(
            f"{_UNMEASURED}: `exclude` them, or use magnitudes. Received: {names}"
        )
    if names:
        warn_user(
            f"{_UNMEASURED}: they stay dense, and the density is that of the other kernels. "
            f"`exclude` them to have no warning. Received: {names}"
        )
    return found


def prune_layers(
    model: Any,
    weights: Sequence[PrunableWeight],
    recipe: Recipe,
    batches: Sequence[Any] | None = None,
    resume: str | pathlib.Path | None = None,
    verbose: int = 0,
) -> dict[str, AnyDraw]:
    """Mask and values by path, each solved on inputs from pruned layers.

    The model keeps its values all the time: other threads may use it.
    """
    recipe.check(weights)
    draws: dict[str, AnyDraw] = {}
    pruned: list[tuple[Any, Any]] = []  # variables and their new values

    def take(weight: PrunableWeight, value: np.ndarray, mask: np.ndarray) -> None:
        value = np.where(mask, value, 0).astype(weight.raw_value(copy=False).dtype)
        draws[weight.path] = recipe.draw(weight, value, mask)
        if batches is not None:
            pruned.append((weight.variable, placed(value, weight.variable)))

    def solve(weight: PrunableWeight, *moments: Moments) -> None:
        value, mask = recipe.solved(weight, *moments)
        take(weight, value, mask)
        if saved is not None:
            saved.save(weight, value, mask)

    def as_pruned() -> VariableOverrides:
        return VariableOverrides(pruned)

    if batches is None:
        for weight in weights:
            take(weight, *recipe.solved(weight))
        return draws
    saved = None
    if resume is not None:
        saved = SavedKernels(resume, model, batches, recipe.settings(), recipe.arrays())
    stops: list[Any] = []
    for weight in weights:
        stop = stop_of(model, weight, functools.partial(solve, weight))
        if saved is not None and saved.has(weight):
            take(weight, *saved.load(weight))
        elif stop is not None:
            stops.append(stop)
    with_reference = recipe.score is not None and recipe.score.uses_reference
    sweep(model, batches, stops, verbose, as_pruned, with_reference=with_reference)
    left = [weight for weight in weights if weight.path not in draws]
    for weight in left:
        take(weight, *recipe.solved(weight))
    if left:
        names = ", ".join(f"{weight.path!r}" for weight in left)
        warn_user(f"{_UNMEASURED}: their live entries keep their values. Received: {names}")
    return draws


def calibration_batches(model: Any, data: Any) -> list[Any]:
    """The inputs of calibration data: arrays in batches of 64 rows, else the first 64 batches."""
    batched = is_batched(data)
    taken = first_batches(
        data, batch_size=_ROWS, batches=_MOST_BATCHES if batched else None, shuffle=False
    )
    first_row = 0
    for batch in taken:
        check_inputs(model, batch[0], first_row=first_row)
        first_row += samples(batch)
    warn_of_few_rows(taken)
    warn_of_weights(taken)
    return [keras.tree.map_structure(keras.ops.convert_to_tensor, x) for x, _, _ in taken]


def sweep(
    model: Any,
    batches: Sequence[Any],
    stops: Sequence[Any],
    verbose: int = 0,
    changed: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    *,
    with_reference: bool = False,
) -> list[Any]:
    """Finishes stop after stop, in the order of calls; returns stops that no call reaches.

    For each stop every batch goes through the model up to the layer's last call, so memory is that
    of one batch.

    Args:
        model: Model.
        batches: list of its inputs.
        stops: list of objects with a `layer` and its `path`. `add(inputs, reference, **options)`
            takes the inputs of one call, those in the model as given, and other arguments.
            `finish()` may change values.
        verbose: As for `fit`.
        changed: callable. Inside `changed()` the model has the values that stops gave it.
        with_reference: bool. Whether `add` gets a `reference`, or `None`.
    """
    progress = keras.utils.Progbar(len(stops), verbose=verbose)
    with from_zero_states(model), without_gradients():
        with changed():
            order = _calls(model, batches[0], stops)
        for done, (stop, calls) in enumerate(order.items(), 1):
            for batch in batches:
                references: Any = itertools.repeat((None, None))
                if with_reference:
                    references = _inputs(model, batch, stop, calls)
                with changed():
                    reached = _inputs(model, batch, stop, calls)
                    for (inputs, options), (reference, _) in zip(reached, references, strict=False):
                        stop.add(inputs, reference, **options)
            stop.finish()
            progress.update(done)
    return [stop for stop in stops if stop not in order]


def _calls(model: Any, batch: Any, stops: Sequence[Any]) -> dict[Any, int]:
    """How often each stop's layer is called, in the order of first calls."""
    reached: collections.Counter[Any] = collections.Counter()

    def count(layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not is_traced(args[0] if args else kwargs["inputs"]):
            reached.update(stop for stop in stops if stop.layer is layer)
        return call(*args, **kwargs)

    with observe((stop.layer for stop in stops), count):
        model(batch, training=False)
    return reached


def _inputs(model: Any, batch: Any, stop: Any, calls: int) -> list[tuple[Any, dict[str, Any]]]:
    """The first argument of each call of a layer for a batch, and the others."""
    reached: list[tuple[Any, dict[str, Any]]] = []

    def reach(layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inputs = args[0] if args else kwargs["inputs"]
        if not is_traced(inputs):
            reached.append((inputs, {k: v for k, v in kwargs.items() if k != "inputs"}))
            if len(reached) == calls:
                raise Enough
        return call(*args, **kwargs)

    with observe([stop.layer], reach):
        model(batch, training=False)
    if not reached:
        raise NotPrunableError(
            f"Every calibration batch must reach {stop.path!r} after the layers before it have "
            "been changed, too; `exclude` layers that depend on the data. Received: the end of "
            "the model"
        )
    return reached
