"""Trained kernels pruned or refitted layer by layer, on the inputs that calibration data give."""

import contextlib
import dataclasses
import functools
import io
import math
import pathlib
import string
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import is_traced, without_gradients
from keras_sparse_ortho._data import Batch, first_batches, is_batched, samples
from keras_sparse_ortho._files import atomic_write_bytes
from keras_sparse_ortho._keras_internals import (
    VariableOverrides,
    from_zero_states,
    level_of_user,
    replaced,
)
from keras_sparse_ortho._values import assign, digest_of, to_numpy
from keras_sparse_ortho.calibration._channels import Channels
from keras_sparse_ortho.calibration._solve import (
    AIM,
    Entries,
    Pattern,
    RegularPattern,
    WholeInputs,
    aimed,
    obs,
    refit,
    wanda,
)
from keras_sparse_ortho.errors import BudgetError, LayoutError, NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw, Draw, PackedDraw
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight
from keras_sparse_ortho.orthogonal import Block, NByM

L = keras.layers

CALIBRATED = ("obs", "wanda")
"""The scores that need inputs of each layer."""

_ROWS = 64  # of a batch
_MOST_BATCHES = 64
# With fewer different rows OBS is often behind magnitudes, which need no data.
_FEWEST_ROWS = 16
# Entries of the rows that are in memory at once: half a gigabyte in float64.
_CHUNK = 2**26

Rows = Callable[[np.ndarray], np.ndarray]
"""From a layer's inputs to the rows that its kernel multiplies, `(M, rows, k)`.

`k` is taps times inputs of one matrix, and `M` batch times parts of the canonical shape.
"""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the kernels of a model are pruned one by one."""

    score: str = "magnitude"  # or "obs", "wanda"; unless there are `scores`
    counts: Mapping[str, int] | None = None  # live entries by path; or
    masks: Mapping[str, np.ndarray] | None = None  # given ones by path
    structure: NByM | Channels | None = None
    blocks: Mapping[str, Block] = dataclasses.field(default_factory=dict)  # by path
    refit: bool = False  # whether live entries get new values; with "obs" they always do
    scores: Mapping[str, np.ndarray] | None = dataclasses.field(default=None, repr=False)  # by path

    @property
    def needs_data(self) -> bool:
        return self.refit or self.score in CALIBRATED

    def solved(
        self, weight: PrunableWeight, gram: Any = None, across: Any = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Values and mask of a kernel for inputs with these moments, or by magnitude."""
        kernel = as_matrices(weight.finite_raw_value(), weight.layout)
        if self.masks is not None:
            mask = as_matrices(self.masks[weight.path], weight.layout)
        elif self.score == "obs" and gram is not None:
            if across is not None:
                kernel = aimed(kernel, gram, across)
            kernel, mask = obs(kernel, self._count(weight), gram, self._pattern(weight))
        else:
            by_inputs = self.score == "wanda" and gram is not None
            scores = wanda(kernel, gram) if by_inputs else np.abs(kernel)
            if self.scores is not None:
                scores = as_matrices(self.scores[weight.path], weight.layout)
            mask = self._pattern(weight).largest(scores, self._count(weight))
        if self.refit and self.score != "obs" and gram is not None:
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
            shape = canonical_shape(weight)
            try:
                self.structure.check(shape)
            except LayoutError as error:
                raise LayoutError(f"The weight '{weight.path}' does not fit: {error}") from None
            assert self.counts is not None
            now, then = self._count(weight), self.counts[weight.path]
            missed += other_density(f"'{weight.path}'", now, then, weight.size)
            if isinstance(self.structure, NByM) and now > self.structure.most(shape):
                raise BudgetError(
                    f"{self.structure} allows at most {self.structure.most(shape)} live entries "
                    f"in '{weight.path}'. Received: {now}"
                )
        if missed:
            warnings.warn(
                f"{self.structure} allows whole groups of inputs only. Received: "
                f"{'; '.join(missed)}",
                stacklevel=level_of_user(),
            )

    def _pattern(self, weight: PrunableWeight) -> Pattern:
        block, shape = self.blocks.get(weight.path), canonical_shape(weight)
        if isinstance(self.structure, Channels):
            return WholeInputs(Block(self.structure.group, shape[-1], regular=True), shape)
        if block is not None:
            return RegularPattern(block, shape)
        return Entries(self.structure, math.prod(shape[2:-2]))

    def _count(self, weight: PrunableWeight) -> int:
        assert self.counts is not None
        count = self.counts[weight.path]
        if isinstance(self.structure, Channels):
            return self.structure.nearest(canonical_shape(weight), count)
        return count


def other_density(name: str, now: int, then: int, size: int) -> list[str]:
    """What a warning says of a density that is off by more than a tenth; else nothing."""
    far = abs(now - then) > 0.1 * then
    return [f"{name} has the density {now / size:.4g} instead of {then / size:.4g}"] * far


def canonical_shape(weight: PrunableWeight) -> tuple[int, ...]:
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
    place meanwhile.
    """
    recipe.check(weights)
    draws: dict[str, AnyDraw] = {}
    if not recipe.needs_data:
        for weight in weights:
            value, mask = recipe.solved(weight)
            draws[weight.path] = recipe.draw(weight, np.where(mask, value, 0), mask)
        return draws

    def take(weight: PrunableWeight, value: np.ndarray, mask: np.ndarray) -> None:
        value = np.where(mask, value, 0).astype(weight.raw_value(copy=False).dtype)
        assign(weight.variable, value)
        draws[weight.path] = recipe.draw(weight, value, mask)

    def solve(weight: PrunableWeight, gram: Any, across: Any, held: Any) -> None:
        value, mask = recipe.solved(weight, gram, across)
        take(weight, value, mask)
        if saved is not None:
            saved.save(weight, value, mask)

    def as_given() -> VariableOverrides:
        return VariableOverrides(zip(variables, values, strict=True))

    batches = calibration_batches(data)
    saved = _Saved(resume, model, recipe, batches) if resume is not None else None
    variables = [weight.variable for weight in weights]
    values = [keras.ops.copy(variable.value) for variable in variables]
    stops: list[Any] = []
    left: list[PrunableWeight] = []
    try:
        for weight in weights:
            rows = rows_of(weight)
            if rows is None:
                left.append(weight)
                take(weight, *recipe.solved(weight))
            elif saved is not None and saved.path(weight).exists():
                take(weight, *saved.load(weight))
            else:
                stops.append(GramStop(weight, rows, functools.partial(solve, weight)))
        sweep(model, batches, stops, verbose, as_given if recipe.score == "obs" else None)
        for weight in weights:
            if weight.path not in draws:
                left.append(weight)
                take(weight, *recipe.solved(weight))
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
            stacklevel=level_of_user(),
        )
    return draws


class _Saved:
    """A file of each kernel that is done, named by a digest of all that it depends on."""

    def __init__(self, folder: Any, model: Any, recipe: Recipe, batches: Any) -> None:
        self._folder = pathlib.Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        text = np.frombuffer(f"{recipe} {AIM}".encode(), np.uint8)
        arrays = [*model.weights, *keras.tree.flatten(batches)]
        self._key = digest_of(text, *(to_numpy(array, copy=False) for array in arrays))

    def path(self, weight: PrunableWeight) -> pathlib.Path:
        own = digest_of(np.frombuffer(weight.path.encode(), np.uint8))
        return self._folder / f"{self._key}-{own}.npz"

    def load(self, weight: PrunableWeight) -> tuple[np.ndarray, np.ndarray]:
        with np.load(self.path(weight)) as found:
            draw = PackedDraw(found["bits"], found["values"], weight.shape, 0, None)
            return draw.kernel, draw.mask

    def save(self, weight: PrunableWeight, value: np.ndarray, mask: np.ndarray) -> None:
        draw = PackedDraw.of(value.astype(weight.raw_value(copy=False).dtype), mask, None)
        stream = io.BytesIO()
        np.savez(stream, bits=draw.bits, values=draw.values)
        atomic_write_bytes(self.path(weight), stream.getvalue())


# --- the inputs of layers ------------------------------------------------------------------------


def calibration_batches(data: Any) -> list[Any]:
    """The inputs of calibration data: arrays in batches of 64 rows, else the first 64 batches."""
    batched = is_batched(data)
    taken = first_batches(
        data, batch_size=_ROWS, batches=_MOST_BATCHES if batched else None, shuffle=False
    )
    _warn_of_few_rows(taken)
    return [keras.tree.map_structure(keras.ops.convert_to_tensor, x) for x, _, _ in taken]


def _warn_of_few_rows(batches: Sequence[Batch]) -> None:
    different: set[bytes] = set()
    for x, _, _ in batches:
        leaves = [to_numpy(leaf, copy=False) for leaf in keras.tree.flatten(x)]
        for row in zip(*leaves, strict=False):
            different.add(b"".join(np.asarray(leaf).tobytes() for leaf in row))
            if len(different) == _FEWEST_ROWS:
                return
    count = sum(samples(batch) for batch in batches)
    warnings.warn(
        f"Calibration needs at least {_FEWEST_ROWS} different rows, better a few hundred, such as "
        "rows of the training data. What is computed from fewer fits these rows and no others. "
        f"Received: {len(different)} different among {count} rows",
        stacklevel=level_of_user(),
    )


def sweep(
    model: Any,
    batches: Sequence[Any],
    stops: Sequence[Any],
    verbose: int = 0,
    as_given: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
) -> list[Any]:
    """Finishes one stop after the other, in the order in which the first batch calls their layers.

    A stop has a `layer` and its `path`; `add(inputs, reference, **options)` takes in the inputs of
    one batch, those in the model as given, and other arguments; `finish()` comes after the last
    batch, and may assign values. For each stop every batch goes through the model up to the layer's
    first call, so memory is that of one batch. Inside `as_given()` the model has the values that it
    came with; then each batch goes through that model, too, for the `reference`. Returns the stops
    that the first batch has not reached outside of compiled code.
    """
    progress = keras.utils.Progbar(len(stops), verbose=verbose)
    with from_zero_states(model), without_gradients():
        order = _order(model, batches[0], stops)
        for done, stop in enumerate(order, 1):
            for batch in batches:
                reference = None
                if as_given is not None:
                    with as_given():
                        reference, _ = _inputs(model, batch, stop)
                inputs, options = _inputs(model, batch, stop)
                stop.add(inputs, reference, **options)
            stop.finish()
            progress.update(done)
    return [stop for stop in stops if stop not in order]


def _order(model: Any, batch: Any, stops: Sequence[Any]) -> list[Any]:
    """The stops in the order of calls."""
    reached: list[Any] = []

    def noting(call: Any, own: list[Any], *args: Any, **kwargs: Any) -> Any:
        if not is_traced(args[0] if args else kwargs["inputs"]):
            reached.extend(stop for stop in own if stop not in reached)
        return call(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for layer in {id(stop.layer): stop.layer for stop in stops}.values():
            own = [stop for stop in stops if stop.layer is layer]
            hook = functools.partial(noting, layer.call, own)
            stack.enter_context(replaced(layer, "call", hook))
        model(batch, training=False)
    return reached


class _Reached(BaseException):
    """Ends a call of the model, with the arguments of a layer; no model catches it by mistake."""


def _inputs(model: Any, batch: Any, stop: Any) -> tuple[Any, dict[str, Any]]:
    """The first argument of a layer for a batch, and the others."""
    call = stop.layer.call

    def reach(*args: Any, **kwargs: Any) -> Any:
        inputs = args[0] if args else kwargs["inputs"]
        if is_traced(inputs):
            return call(*args, **kwargs)
        kwargs.pop("inputs", None)
        raise _Reached(inputs, kwargs)

    with replaced(stop.layer, "call", reach):
        try:
            model(batch, training=False)
        except _Reached as reached:
            return reached.args
    raise NotPrunableError(
        f"Every calibration batch must reach '{stop.path}' after the layers before it have been "
        "changed, too; `exclude` layers that depend on the data. Received: the end of the model"
    )


# --- kernels as matrices -------------------------------------------------------------------------


class GramStop:
    """Sums `X^T X` over the rows of a layer's inputs, then calls `solve(gram, across, held)`.

    `across` is `X^T (Y - X)`, where `Y` are the rows in the given model, and `held` is `X^T X` of
    the rows that were held out, one of `hold_out` of each batch, which `gram` lacks; or `None`.
    All are `(M, k, k)` in float64.
    """

    def __init__(
        self,
        weight: PrunableWeight,
        rows: Rows,
        solve: Callable[[Any, Any, Any], None],
        hold_out: float = math.inf,
    ) -> None:
        self.layer, self.path = weight.owner, weight.path
        self._rows, self._solve, self._hold_out = rows, solve, hold_out
        self._sums: list[Any] = [None, None, None]

    def add(self, inputs: Any, reference: Any = None, **options: Any) -> None:
        x = to_numpy(inputs, copy=False)
        y = None if reference is None else to_numpy(reference, copy=False)
        held = np.arange(len(x)) % self._hold_out == self._hold_out - 1
        taps = math.prod(getattr(self.layer, "kernel_size", ()))
        size = max(1, _CHUNK * len(x) // max(1, x.size * taps))  # in pieces that fit into memory
        for start in range(0, len(x), size):
            piece = slice(start, start + size)
            out = held[piece]
            rows = self._rows(x[piece][~out].astype(np.float64))
            turned = np.swapaxes(rows, -1, -2)
            self._sum(0, turned @ rows)
            if y is not None:
                self._sum(1, turned @ (self._rows(y[piece][~out].astype(np.float64)) - rows))
            if out.any():
                rows = self._rows(x[piece][out].astype(np.float64))
                self._sum(2, np.swapaxes(rows, -1, -2) @ rows)

    def _sum(self, which: int, part: np.ndarray) -> None:
        total = self._sums[which]
        self._sums[which] = part if total is None else total + part

    def finish(self) -> None:
        sums, self._sums = self._sums, []  # freed once they are solved for
        squares = np.trace(sums[0], axis1=-2, axis2=-1).sum()
        if not np.isfinite(squares):
            raise NotPrunableError(
                f"The inputs of the layer that owns '{self.path}' must be finite on the "
                f"calibration data. Received: a sum of squares of {squares}"
            )
        self._solve(*sums)


def as_matrices(kernel: np.ndarray, layout: KernelLayout | None) -> np.ndarray:
    """A kernel as `(batch * parts, taps * inputs, outputs)`."""
    canonical = (layout or KernelLayout.convolution()).to_canonical(kernel)
    batch, parts, *taps, inputs, outputs = canonical.shape
    return canonical.reshape(batch * parts, math.prod(taps) * inputs, outputs)


def from_matrices(
    matrices: np.ndarray, shape: tuple[int, ...], layout: KernelLayout | None
) -> np.ndarray:
    """The inverse of `as_matrices`, for a kernel of shape `shape`."""
    layout = layout or KernelLayout.convolution()
    return layout.from_canonical(matrices.reshape(layout.canonical_shape(shape)), shape)


def rows_of(weight: PrunableWeight) -> Rows | None:
    """How a plain layer applies one of its kernels; `None` where that is not known."""
    owner, calls = weight.owner, ("call", "convolution_op")
    kind = next((kind for kind in _KINDS if isinstance(owner, kind)), None)
    if kind is None or weight.path.rpartition("/")[2] != "kernel":
        return None
    same = all(getattr(type(owner), c, None) is getattr(kind, c, None) for c in calls)
    return _KINDS[kind](owner) if same else None


def _dense(layer: Any) -> Rows:
    return lambda x: x.reshape(1, -1, x.shape[-1])


def _einsum_dense(layer: Any) -> Rows | None:
    """The inputs with their batch axes first, and those that are summed over last."""
    operands, output = layer.equation.replace(" ", "").split("->")
    data, kernel = operands.split(",")
    if any(name not in data and name not in output for name in kernel):
        return None  # the kernel alone is summed along an axis
    batch = "".join(name for name in kernel if name in data and name in output)
    summed = "".join(name for name in kernel if name in data and name not in output)

    def rows(x: np.ndarray) -> np.ndarray:
        more = len(x.shape) - len(data.replace("...", ""))
        unused = [letter for letter in string.ascii_lowercase if letter not in layer.equation]
        own = data.replace("...", "".join(unused[:more]))
        free = "".join(n for n in own if n not in kernel and (n in output or n not in data))
        x = np.einsum(f"{own}->{batch}{free}{summed}", x)
        matrices, k = x.shape[: len(batch)], x.shape[len(x.shape) - len(summed) :]
        return x.reshape(math.prod(matrices), -1, math.prod(k))

    return rows


def _convolution(layer: Any) -> Rows:
    """`(groups, positions, taps * channels)`: what the kernel meets at each position."""

    def rows(x: np.ndarray) -> np.ndarray:
        if layer.data_format == "channels_first":
            x = np.moveaxis(x, 1, -1)
        *_, channels = x.shape
        spans = [
            d * (k - 1) + 1 for k, d in zip(layer.kernel_size, layer.dilation_rate, strict=True)
        ]
        steps = zip(x.shape[1:-1], spans, layer.strides, strict=True)
        x = np.pad(x, ((0, 0), *(_padding(layer.padding, *step) for step in steps), (0, 0)))
        axes = tuple(range(1, len(spans) + 1))
        windows = np.lib.stride_tricks.sliding_window_view(x, spans, axis=axes)
        every = [[slice(None, None, n) for n in ns] for ns in (layer.strides, layer.dilation_rate)]
        windows = windows[(slice(None), *every[0], slice(None), *every[1])]
        groups: Any = getattr(layer, "groups", channels)  # depthwise: every channel is a group
        shape = (-1, groups, channels // groups, math.prod(layer.kernel_size))
        patches = windows.reshape(shape).transpose(1, 0, 3, 2)
        return patches.reshape(groups, -1, shape[2] * shape[3])

    return rows


def _padding(kind: str, size: int, span: int, stride: int) -> tuple[int, int]:
    """Zeros before and after, as all backends of Keras pad."""
    if kind == "causal":
        return span - 1, 0
    if kind == "valid":
        return 0, 0
    missing = max((-(-size // stride) - 1) * stride + span - size, 0)
    return missing // 2, missing - missing // 2


_CONVOLUTIONS = (L.Conv1D, L.Conv2D, L.Conv3D, L.DepthwiseConv1D, L.DepthwiseConv2D)
_KINDS: dict[Any, Callable[[Any], Rows | None]] = {
    **{L.Dense: _dense, L.EinsumDense: _einsum_dense},
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
}
