"""Sums over the rows of a layer's inputs: all that the solver needs to know of the data."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._data import samples
from keras_sparse_ortho._interception import stand_in
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    Rows,
    canonical_shape,
    rows_of,
    walk,
)

L = keras.layers

HOLD_OUT = 4  # one of so many rows judges what is made of the others
# Entries of rows in memory at once, or of one sample: about as many as caches hold.
_CHUNK = 2**22
# Rows of one product in float32; sums of products are in float64.
_PRODUCT_ROWS = 2**13
_FEW_ENTRIES = 2**16  # of inputs, for which float32 would save no time
_SAFE = 1e12  # squares of entries from its inverse up to it are in the range of float32
_ROWS_AN_INPUT = 32
_FEWEST_ROWS = 2**11

Solve = Callable[["Moments", "Moments"], None]
"""Solves a kernel on the moments of used and of held-out rows."""


@dataclasses.dataclass
class Moments:
    """`X^T X`, and `X^T (Y - X)` with the rows `Y` in the given model, in float64: `(M, k, k)`."""

    gram: Any = (
        0.0  # of tokens, which are one-hot rows, its diagonal alone, `(M, k)`
    )
    across: Any = 0.0
    rows: int = 0

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(
            self.gram + other.gram,
            self.across + other.across,
            self.rows + other.rows,
        )

    def __iadd__(self, other: "Moments") -> "Moments":
        """Adds in place, as a copy of a large matrix takes as much memory again."""
        self.gram += other.gram
        self.across += other.across
        self.rows += other.rows
        return self

    @property
    def squares(self) -> np.ndarray:
        """The sum of squares of each input, `(M, k)`."""
        if self.gram.ndim == 2:
            return self.gram
        return np.diagonal(self.gram, axis1=-2, axis2=-1)


class GramStop:
    """Sums the moments of a layer's rows for `solve(used, held_out)`; a quarter is held out.

    Positions of a convolution are drawn where they are many more than a kernel has `k` inputs:
    `32 k` in all samples together, by default at least 2048. Each sample gives as many, which the
    seed 0 draws. On a CNN for digits the mean error of OBS stays, and varies by a tenth
    (benchmarks/results/positions.md).

    Args:
        weight: The kernel.
        layer: Layer that is called.
        rows: Makes the rows.
        solve: Called with the sums.
        samples: int. How many samples there will be; 0 to take all positions.
        least_rows: int. The fewest positions that are drawn.
    """

    def __init__(
        self,
        weight: PrunableWeight,
        layer: Any,
        rows: Rows,
        solve: Solve,
        samples: int = 0,
        least_rows: int = _FEWEST_ROWS,
    ) -> None:
        self.layer = layer
        self.path = weight.path
        self.size = weight.shape[0]
        self._rows = rows
        self._solve = solve
        self._samples = samples
        self._samples_seen = 0
        inputs = math.prod(canonical_shape(weight)[2:-1])
        self._most_rows = max(_ROWS_AN_INPUT * inputs, least_rows)
        self._sums = [Moments(), Moments()]

    def add(self, inputs: Any, reference: Any = None, **options: Any) -> None:
        """Adds the rows of one call, in pieces that fit into memory."""
        x = to_numpy(inputs, copy=False)
        y = None if reference is None else to_numpy(reference, copy=False)
        positions = self._draw_positions(x)
        is_held = np.arange(len(x)) % HOLD_OUT == HOLD_OUT - 1
        size = self._samples_at_once(x, positions)
        for start in range(0, len(x), size):
            piece = np.arange(start, min(start + size, len(x)))
            for number, rows in enumerate(
                (piece[~is_held[piece]], piece[is_held[piece]])
            ):
                if len(rows):
                    self._sums[number] += self._moments(
                        x[rows],
                        None if y is None else y[rows],
                        None if positions is None else positions[rows],
                    )

    def finish(self) -> None:
        """Solves the kernel, and frees the sums."""
        used, held = self._sums
        self._sums = []
        squares = sum(
            np.sum(moments.squares) for moments in (used, held) if moments.rows
        )
        if not np.isfinite(squares):
            raise NotPrunableError(
                f"The inputs of the layer that owns {self.path!r} must be finite on the "
                f"calibration data. Received: a sum of squares of {squares}"
            )
        self._solve(used, held)

    def _moments(
        self,
        x: np.ndarray,
        y: np.ndarray | None,
        positions: np.ndarray | None,
    ) -> Moments:
        rows = self._rows_of(x, positions)
        gram = sum_of_products(rows, rows)
        if y is None:
            return Moments(gram, 0.0, rows.shape[1])
        missed = self._rows_of(y, positions) - rows
        across = sum_of_products(rows, missed)
        return Moments(gram, across, rows.shape[1])

    def _rows_of(
        self,
        x: np.ndarray,
        positions: np.ndarray | None,
    ) -> np.ndarray:
        """The rows in one piece of memory, which products read several times as fast."""
        rows = self._rows(_as_floats(x), positions)
        return np.ascontiguousarray(rows)

    def _draw_positions(self, x: np.ndarray) -> np.ndarray | None:
        """Positions to take of each sample, `(samples, count)`; `None` for all."""
        size = self._rows.positions(x) if self._samples else None
        if size is None:
            return None
        count = -(-self._most_rows // self._samples)
        if count >= size:
            return None
        order = np.random.default_rng(0).permutation(size)
        samples = self._samples_seen + np.arange(len(x))
        self._samples_seen += len(x)
        # Each sample goes on where the one before ended, so all positions are taken as often.
        places = samples[:, None] * count + np.arange(count)
        return order[places % size]

    def _samples_at_once(
        self,
        x: np.ndarray,
        positions: np.ndarray | None,
    ) -> int:
        entries = x.size * self._rows.growth()
        if positions is not None:
            entries = max(
                x.size, entries * positions.shape[1] // self._rows.positions(x)
            )
        return max(1, _CHUNK * len(x) // max(1, entries))


class _TokenStop(GramStop):
    """For an embedding: its rows are one-hot, and their moments the counts of the tokens."""

    def _moments(
        self,
        x: np.ndarray,
        y: np.ndarray | None,
        positions: np.ndarray | None,
    ) -> Moments:
        counts = np.bincount(x.astype(np.int64).ravel(), minlength=self.size)
        return Moments(counts[None].astype(np.float64), rows=x.size)


class _CellStop(GramStop):
    """For a recurrent layer: unmasked inputs, or the states before them."""

    def add(self, inputs: Any, reference: Any = None, **options: Any) -> None:
        """Adds the inputs of each step, or the states before it."""
        mask = options.get("mask")
        weights = None if mask is None else to_numpy(mask)[..., None]
        if self.path.endswith("recurrent_kernel"):
            inputs = self._states(inputs, options)
            reference = None
            if weights is not None and self.layer.go_backwards:
                weights = weights[:, ::-1]
        if weights is not None:
            inputs = to_numpy(inputs) * weights
            if reference is not None:
                reference = to_numpy(reference) * weights
        super().add(inputs, reference)

    def _states(
        self,
        inputs: Any,
        options: dict[str, Any],
    ) -> np.ndarray:
        """The state before each step."""
        layer = stand_in(self.layer, return_sequences=True, stateful=False)
        outputs = keras.tree.flatten(layer.call(inputs, **options))
        states = to_numpy(outputs[0], copy=False)
        initial = keras.tree.flatten(options.get("initial_state"))[0]
        first = (
            np.zeros_like(states[:, 0])
            if initial is None
            else to_numpy(initial)
        )
        return np.concatenate([first[:, None], states[:, :-1]], axis=1)


def sum_of_products(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """`X^T Y` in float64, `(M, k, k)`: a sum of products of 8192 rows in the type of the rows.

    Products in float32 take half of the time. Each entry of theirs is off by about 1e-7 of the
    norms of its two columns, where drawing `n` rows puts it off by `1 / sqrt(n)` of them. The
    eigenvalues of `X^T X` are off by at most 1e-7 of its trace, `1e-5 k` of the least damping.

    Args:
        rows: array `(M, rows, k)`.
        others: array of the same shape. `rows` itself takes half of the time.
    """
    matrices, count, inputs = rows.shape
    total = np.zeros((matrices, inputs, inputs))
    for start in range(0, count, _PRODUCT_ROWS):
        block = rows[:, start : start + _PRODUCT_ROWS]
        other_block = block
        if others is not rows:
            other_block = others[:, start : start + _PRODUCT_ROWS]
        total += np.swapaxes(block, -1, -2) @ other_block
    return total


def _as_floats(x: np.ndarray) -> np.ndarray:
    """Inputs in float32; few ones in float64, and those whose squares float32 has no room for."""
    if x.size < _FEW_ENTRIES:
        return x.astype(np.float64)
    dtype = np.result_type(x.dtype, np.float32)
    x = x.astype(dtype, copy=False)
    largest = max(float(x.max()), -float(x.min()))
    if largest > 0 and not 1 / _SAFE < largest < _SAFE:
        return x.astype(np.float64)
    return x


def stop_of(
    model: Any,
    weight: PrunableWeight,
    solve: Solve,
    samples: int = 0,
    least_rows: int = _FEWEST_ROWS,
) -> GramStop | None:
    """The stop for a kernel of a plain layer; `None` if it is unknown how it is applied.

    Args:
        model: Model.
        weight: The kernel.
        solve: Called with the sums.
        samples: int. How many samples there will be; 0 to take all positions of convolutions.
        least_rows: int. As for `GramStop`.
    """
    owner = weight.owner
    rows = rows_of(weight)
    if rows is None:
        return None
    if rows.reads == "tokens":
        return _TokenStop(
            weight,
            owner,
            rows,
            solve,
        )
    if rows.reads == "inputs":
        return GramStop(
            weight,
            owner,
            rows,
            solve,
            samples,
            least_rows,
        )
    around = [
        layer
        for layer, _ in walk(model, "")
        if isinstance(layer, L.RNN) and layer.cell is owner
    ]
    if len(around) != 1:
        return None
    return _CellStop(
        weight,
        around[0],
        rows,
        solve,
    )


def samples_in(batches: Sequence[Any]) -> int:
    """How many samples batches of inputs have."""
    return sum(samples((batch, None, None)) for batch in batches)
