"""Masks and values of trained kernels, layer by layer on calibration data."""

import dataclasses
import functools
import io
import math
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._files import atomic_write_bytes
from keras_sparse_ortho._keras_internals import VariableOverrides
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho._workers import digest_of
from keras_sparse_ortho.calibration._channels import Channels
from keras_sparse_ortho.calibration._patterns import (
    Entries,
    Pattern,
    RegularPattern,
    WholeInputs,
)
from keras_sparse_ortho.calibration._rows import (
    GramStop,
    Moments,
    as_matrices,
    from_matrices,
    linear_kernel,
)
from keras_sparse_ortho.calibration._solve import AIM, aimed, obs, refit, wanda
from keras_sparse_ortho.calibration._sweep import Stop, calibration_batches, sweep
from keras_sparse_ortho.errors import BudgetError, LayoutError
from keras_sparse_ortho.initializers import AnyDraw, Draw, PackedDraw
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight
from keras_sparse_ortho.orthogonal import Block, NByM

CALIBRATED = ("obs", "wanda")
"""The scores that need inputs of each layer."""

_TOLD = 0.1  # a density that is missed by more than this part is told


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the kernels of a model are pruned one by one.

    Args:
        score: `"obs"`, `"wanda"` or `"magnitude"`.
        counts: Live entries of each kernel by path; `None` with `masks`.
        masks: Given masks by path, in place of score and counts.
        structure: The pattern of the masks.
        blocks: The regular blocks of those kernels that get such, by path.
        refit: Whether the live entries get new values; with `"obs"` they always do.
    """

    score: str = "magnitude"
    counts: Mapping[str, int] | None = None
    masks: Mapping[str, np.ndarray] | None = None
    structure: NByM | Channels | None = None
    blocks: Mapping[str, Block] = dataclasses.field(default_factory=dict)
    refit: bool = False

    @property
    def needs_data(self) -> bool:
        return self.refit or self.score in CALIBRATED

    def by_magnitude(self, weight: PrunableWeight) -> tuple[np.ndarray, np.ndarray]:
        """Values and mask of a kernel without regard to its inputs."""
        kernel = weight.finite_raw_value()
        if self.masks is not None:
            return kernel, self.masks[weight.path]
        scores = np.abs(as_matrices(kernel, weight.layout))
        mask = self._pattern(weight).largest(scores, self._count(weight))
        return kernel, from_matrices(mask, weight.shape, weight.layout)

    def solved(self, weight: PrunableWeight, moments: Moments) -> tuple[np.ndarray, np.ndarray]:
        """Values and mask of a kernel for inputs with these moments."""
        kernel, gram = as_matrices(weight.finite_raw_value(), weight.layout), moments.gram
        if self.masks is not None:
            mask = as_matrices(self.masks[weight.path], weight.layout)
        elif self.score == "obs":
            if moments.across is not None:
                kernel = aimed(kernel, gram, moments.across)
            kernel, mask = obs(kernel, self._count(weight), gram, self._pattern(weight))
        else:
            scores = wanda(kernel, gram) if self.score == "wanda" else np.abs(kernel)
            mask = self._pattern(weight).largest(scores, self._count(weight))
        if self.refit and self.score != "obs":
            kernel = refit(kernel, mask, gram)
        value, mask = (from_matrices(x, weight.shape, weight.layout) for x in (kernel, mask))
        return value, mask

    def draw(self, weight: PrunableWeight, value: np.ndarray, mask: np.ndarray) -> AnyDraw:
        block = self.blocks.get(weight.path)
        if block is None:
            return PackedDraw.of(value, mask, None)
        return Draw(mask, value, block=(block.rows, block.cols))

    def check(self, weights: Sequence[PrunableWeight]) -> None:
        """Refuses kernels that the structure does not fit, and more live entries than it allows."""
        if self.structure is None:
            return
        missed = []
        for weight in weights:
            shape = _canonical_shape(weight)
            try:
                self.structure.check(shape)
            except LayoutError as error:
                raise LayoutError(f"The weight '{weight.path}' does not fit: {error}") from None
            assert self.counts is not None
            now, then = self._count(weight), self.counts[weight.path]
            if abs(now - then) > _TOLD * then:
                densities = f"{now / weight.size:.4g} instead of {then / weight.size:.4g}"
                missed.append(f"'{weight.path}' has the density {densities}")
            if now > self.structure.most(shape):
                raise BudgetError(
                    f"{self.structure} allows at most {self.structure.most(shape)} live entries "
                    f"in '{weight.path}'. Received: {now}"
                )
        if missed:
            warnings.warn(
                f"{self.structure} allows whole groups of inputs only. Received: "
                f"{'; '.join(missed)}",
                stacklevel=5,
            )

    def _pattern(self, weight: PrunableWeight) -> Pattern:
        block, shape = self.blocks.get(weight.path), _canonical_shape(weight)
        if isinstance(self.structure, Channels):
            return WholeInputs(Block(self.structure.group, shape[-1], regular=True), shape)
        if block is not None:
            return RegularPattern(block, shape)
        return Entries(self.structure, math.prod(shape[2:-2]))

    def _count(self, weight: PrunableWeight) -> int:
        assert self.counts is not None
        count = self.counts[weight.path]
        if isinstance(self.structure, Channels):
            return self.structure.nearest(_canonical_shape(weight), count)
        return count


def _canonical_shape(weight: PrunableWeight) -> tuple[int, ...]:
    return (weight.layout or KernelLayout.convolution()).canonical_shape(weight.shape)


def prune_layers(
    model: Any,
    weights: Sequence[PrunableWeight],
    recipe: Recipe,
    data: Any = None,
    resume: str | pathlib.Path | None = None,
    verbose: int = 0,
) -> dict[str, AnyDraw]:
    """Mask and values for each kernel, by path; the model is as it was afterwards.

    Every layer is solved on the inputs that the pruned ones before it give: kernels are set in
    place meanwhile. `resume` is a folder for a file of each kernel that is done, from which another
    run goes on. Warns of kernels that are pruned without regard to their inputs; raises as
    `Recipe.check` and `sweep`, and for inputs that are not finite.
    """
    recipe.check(weights)
    if not recipe.needs_data:
        found = {weight.path: (weight, *recipe.by_magnitude(weight)) for weight in weights}
        return {
            path: recipe.draw(weight, np.where(mask, value, 0), mask)
            for path, (weight, value, mask) in found.items()
        }
    draws: dict[str, AnyDraw] = {}

    def take(weight: PrunableWeight, value: np.ndarray, mask: np.ndarray) -> None:
        value = np.where(mask, value, 0).astype(weight.raw_value(copy=False).dtype)
        assign(weight.variable, value)
        draws[weight.path] = recipe.draw(weight, value, mask)

    def solve(weight: PrunableWeight, number: int, moments: Moments) -> None:
        value, mask = recipe.solved(weight, moments)
        take(weight, value, mask)
        if saved is not None:
            saved.save(number, weight, value, mask)

    def as_given() -> VariableOverrides:
        return VariableOverrides(zip(variables, values, strict=True))

    batches = calibration_batches(data)
    saved = _Saved(resume, model, weights, recipe, batches) if resume is not None else None
    variables = [weight.variable for weight in weights]
    values = [keras.ops.copy(variable.value) for variable in variables]
    stops: list[Stop] = []
    left: list[PrunableWeight] = []
    try:
        for number, weight in enumerate(weights):
            kernel = linear_kernel(weight, weight.owner)
            if kernel is None:
                left.append(weight)
                take(weight, *recipe.by_magnitude(weight))
            elif saved is not None and saved.has(number):
                take(weight, *saved.load(number, weight))
            else:
                stops.append(GramStop(kernel, functools.partial(solve, weight, number), as_given))
        sweep(model, batches, stops, verbose, as_given if recipe.score == "obs" else None)
        for weight in weights:
            if weight.path not in draws:
                left.append(weight)
                take(weight, *recipe.by_magnitude(weight))
    finally:
        for variable in reversed(variables):  # each copy is freed before the next is assigned
            assign(variable, values.pop())
    if left:
        names = ", ".join(f"'{weight.path}'" for weight in left)
        how = "are pruned by magnitude, within their own counts" if recipe.counts else "are masked"
        warnings.warn(
            "These kernels are not known to multiply the inputs of their layers, or no calibration "
            f"input reaches them outside of compiled code: they {how}, without a refit; or "
            f"`exclude` them. Received: {names}",
            stacklevel=4,
        )
    return draws


class _Saved:
    """A file of each kernel that is done, named by a digest of all that it depends on."""

    def __init__(
        self,
        folder: str | pathlib.Path,
        model: Any,
        weights: Sequence[PrunableWeight],
        recipe: Recipe,
        batches: Sequence[Any],
    ) -> None:
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        facts = (recipe.score, recipe.structure, recipe.refit, recipe.counts and {**recipe.counts})
        text = f"{facts} {dict(recipe.blocks)} {AIM} {[weight.path for weight in weights]}"
        arrays = [np.frombuffer(text.encode(), np.uint8)]
        arrays += [to_numpy(variable, copy=False) for variable in model.weights]
        arrays += [to_numpy(x, copy=False) for x in keras.tree.flatten(batches)]
        arrays += [] if recipe.masks is None else [recipe.masks[w.path] for w in weights]
        self._key = digest_of(*arrays)

    def has(self, number: int) -> bool:
        return self._path(number).exists()

    def load(self, number: int, weight: PrunableWeight) -> tuple[np.ndarray, np.ndarray]:
        with np.load(self._path(number)) as found:
            draw = PackedDraw(found["bits"], found["values"], weight.shape, 0, None)
            return draw.kernel, draw.mask

    def save(
        self, number: int, weight: PrunableWeight, value: np.ndarray, mask: np.ndarray
    ) -> None:
        draw = PackedDraw.of(value.astype(weight.raw_value(copy=False).dtype), mask, None)
        stream = io.BytesIO()
        np.savez(stream, bits=draw.bits, values=draw.values)
        atomic_write_bytes(self._path(number), stream.getvalue())

    def _path(self, number: int) -> pathlib.Path:
        return self._folder / f"{self._key}-{number:04d}.npz"
