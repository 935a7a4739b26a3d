"""Trained kernels pruned or refitted layer by layer, on the inputs that calibration data give."""

import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checked_data import (
    check_inputs,
    warn_of_few_rows,
    warn_of_weights,
)
from keras_sparse_ortho._data import first_batches, is_batched, samples
from keras_sparse_ortho._keras_internals import VariableOverrides, warn_user
from keras_sparse_ortho._values import placed
from keras_sparse_ortho.calibration._graph_sweep import largest_tensor
from keras_sparse_ortho.calibration._moments import Moments, samples_in, stop_of
from keras_sparse_ortho.calibration._recipe import Recipe
from keras_sparse_ortho.calibration._resume import SavedKernels
from keras_sparse_ortho.calibration._sweep import reached_stops, sweep
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw
from keras_sparse_ortho.kernels import PrunableWeight

_FEWEST_ROWS = 64  # of a batch
_MOST_ROWS = 512
_MOST_ENTRIES = (
    2**22
)  # of a tensor: memory for larger ones goes back to the system each time
_MOST_BATCHES = 64
_UNMEASURED = (
    "It is not known how these kernels multiply inputs of their layers, or no calibration input "
    "reaches them outside of compiled code"
)


def measurable(
    model: Any,
    weights: Sequence[PrunableWeight],
    batches: Sequence[Any],
    *,
    given: bool = False,
) -> list[PrunableWeight]:
    """The measurable kernels that the first batch reaches; warns of others, or refuses `given`."""
    stops = []
    for weight in weights:
        stop = stop_of(model, weight, _ignore)
        if stop is not None:
            stops.append(stop)
    reached = {stop.path for stop in reached_stops(model, batches[0], stops)}
    measured = [weight for weight in weights if weight.path in reached]
    names = _names([weight for weight in weights if weight not in measured])
    if names and (given or not measured):
        raise NotPrunableError(
            f"{_UNMEASURED}: `exclude` them, or use magnitudes. Received: {names}"
        )
    if names:
        warn_user(
            f"{_UNMEASURED}: they stay dense, and the density is that of the other kernels. "
            f"`exclude` them to have no warning. Received: {names}"
        )
    return measured


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

    Args:
        model: Model.
        weights: list of the kernels to prune.
        recipe: Recipe.
        batches: list of inputs; `None` where the recipe needs no data.
        resume: path of a folder for finished kernels, to go on from.
        verbose: As for `fit`.
    """
    recipe.check(weights)
    if batches is None:
        kernels = _PrunedKernels(recipe)
        for weight in weights:
            kernels.solve(weight)
        return kernels.draws
    saved = None
    if resume is not None:
        saved = SavedKernels(
            resume,
            model,
            batches,
            recipe.settings(),
            recipe.arrays(),
        )
    kernels = _PrunedKernels(recipe, saved, in_model=True)
    stops: list[Any] = []
    for weight in weights:
        solve = functools.partial(kernels.solve, weight)
        stop = stop_of(model, weight, solve, samples_in(batches))
        if saved is not None and saved.has(weight):
            kernels.add(weight, *saved.load(weight))
        elif stop is not None:
            stops.append(stop)
    sweep(
        model,
        batches,
        stops,
        verbose,
        kernels.override,
        with_reference=recipe.uses_reference,
    )
    unmeasured = [
        weight for weight in weights if weight.path not in kernels.draws
    ]
    for weight in unmeasured:
        kernels.add(weight, *recipe.solved(weight))
    if unmeasured:
        names = _names(unmeasured)
        warn_user(
            f"{_UNMEASURED}: their live entries keep their values. Received: {names}"
        )
    return kernels.draws


class _PrunedKernels:
    """The kernels that a recipe has solved.

    Args:
        recipe: Recipe.
        saved: SavedKernels or `None`. Where to write each of them.
        in_model: bool. Whether later layers see them.
    """

    def __init__(
        self,
        recipe: Recipe,
        saved: SavedKernels | None = None,
        *,
        in_model: bool = False,
    ) -> None:
        self.draws: dict[str, AnyDraw] = {}
        self._recipe = recipe
        self._saved = saved
        self._in_model = in_model
        self._overrides: list[tuple[Any, Any]] = []

    def override(self) -> VariableOverrides:
        """A context in which the model has these kernels. Its variables keep their values."""
        return VariableOverrides(self._overrides)

    def solve(self, weight: PrunableWeight, *moments: Moments) -> None:
        """Solves a kernel."""
        value, mask = self._recipe.solved(weight, *moments)
        self.add(weight, value, mask)
        if self._saved is not None:
            self._saved.save(weight, value, mask)

    def add(
        self,
        weight: PrunableWeight,
        value: np.ndarray,
        mask: np.ndarray,
    ) -> None:
        """Takes in a kernel."""
        dtype = weight.raw_value(copy=False).dtype
        value = np.where(mask, value, 0).astype(dtype)
        self.draws[weight.path] = self._recipe.draw(weight, value, mask)
        if self._in_model:
            tensor = placed(value, weight.variable)
            self._overrides.append((weight.variable, tensor))


def calibration_batches(
    model: Any, data: Any, has_small_batches: bool = False
) -> list[Any]:
    """The inputs of calibration data: arrays in batches of some size, else the first 64 batches.

    Args:
        model: A built model.
        data: Inputs, or what `fit` takes.
        has_small_batches: bool. Arrays go in batches of 64 rows, where a limit of time is kept
            between two of them. Default: of up to 512, which take less time together.
    """
    rows = _FEWEST_ROWS if has_small_batches else _batch_size(model)
    batches = first_batches(
        data,
        batch_size=rows,
        batches=_MOST_BATCHES if is_batched(data) else None,
        shuffle=False,
    )
    first_row = 0
    for batch in batches:
        check_inputs(model, batch[0], first_row=first_row)
        first_row += samples(batch)
    warn_of_few_rows(batches)
    warn_of_weights(batches)
    to_tensor = keras.ops.convert_to_tensor
    return [
        keras.tree.map_structure(to_tensor, inputs) for inputs, _, _ in batches
    ]


def _batch_size(model: keras.Model) -> int:
    """64 rows, or up to 512 where the largest tensor of the graph still has few entries.

    Small operations take most of their time to be called. So fewer and larger batches take less.
    """
    entries = largest_tensor(model)
    if entries is None:
        return _FEWEST_ROWS
    inputs = keras.tree.flatten(model.inputs)
    if any(tensor.shape[0] is not None for tensor in inputs):
        return _FEWEST_ROWS
    rows = min(_MOST_ENTRIES // entries, _MOST_ROWS)
    whole_multiple = rows // _FEWEST_ROWS * _FEWEST_ROWS
    return max(whole_multiple, _FEWEST_ROWS)


def _names(weights: Sequence[PrunableWeight]) -> str:
    return ", ".join(repr(weight.path) for weight in weights)


def _ignore(*moments: Moments) -> None:
    """The solution where only calls are counted."""
