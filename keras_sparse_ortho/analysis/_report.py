"""`report`: density, size, FLOPs and orthogonality of every kernel, as a table, dict and CSV."""

import csv
import dataclasses
import html
import io
import math
import pathlib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import rich.console

from keras_sparse_ortho._checked_data import check_inputs
from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._data import first_batches
from keras_sparse_ortho._files import atomic_write
from keras_sparse_ortho._foreign_names import Answering, not_subscriptable
from keras_sparse_ortho.analysis._orthogonality import orthogonality_error
from keras_sparse_ortho.analysis._report_table import tables_of
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import (
    KernelLayout,
    SparseInitializer,
    is_as_drawn,
)
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import (
    is_of_tf_keras,
    prunable_weights,
    warn_unless_at_density,
    weights_of,
)
from keras_sparse_ortho.orthogonal import (
    CANONICAL,
    dead_outputs,
    without_mirror,
)
from keras_sparse_ortho.pruning import why_not_on_blocks

# Modes of `Layer.quantize` that pack and transpose kernels.
_UNREADABLE = (
    "gptq",
    "awq",
)
_TEXT_WIDTH = 120  # columns of the report as a string
_TOTALS = (
    *("name", "size", "live", "density", "sparse_density", "whole_density"),
    *("flops", "sparse_flops"),
)


@dataclasses.dataclass(frozen=True)
class Row(Answering):
    """The figures of one kernel.

    `state` is `"sparse"` for a kernel with a mask or zeros, or why it is dense: `"no mask"`
    (excluded, or not selected), `"not updated"` (a `MagnitudeMask` before `callbacks.UpdateMasks`),
    `"not adopted"` (a sparse initializer without `apply_masks`, after training), `"not registered"`
    (axes of unknown meaning, see `initializers.kernel_layouts`). `block` and `least_density` are of
    live blocks; `not_on_blocks` says why a kernel is not on blocks where others are.
    """

    path: str
    shape: tuple[int, ...]
    size: int
    live: int
    flops: int | None
    sparse_flops: int | None
    orthogonality_error: float | None
    dead_outputs: int = 0
    gain: float | None = None
    state: str = "sparse"
    block: tuple[int, int] | None = None
    least_density: float | None = None
    not_on_blocks: str | None = None

    @property
    def density(self) -> float:
        return self.live / self.size


@dataclasses.dataclass(frozen=True, repr=False)
class SparsityReport(Answering):
    """The figures of a model; see `keras_sparse_ortho.report`.

    Args:
        rows: One `Row` for each kernel.
        name: str. Name of the model.
        unregistered: One `Row` for each matrix whose layer is not registered.
        bytes: int. Memory of all these as they are stored, masks and indices included.
        live_bytes: int. Memory of their live values alone.
        unadopted: Paths of kernels with a sparse initializer and no mask: training makes them
            dense, unless `apply_masks` wraps their layers.
        params: int. Parameters as `model.summary()` and `count_params()` count them.
        mask_params: int. How many of `params` are entries of masks or indices.
    """

    rows: tuple[Row, ...]
    name: str = ""
    unregistered: tuple[Row, ...] = ()
    bytes: int = 0
    live_bytes: int = 0
    params: int = 0
    mask_params: int = 0
    unadopted: tuple[str, ...] = ()

    def __getitem__(self, path: Any) -> NoReturn:
        raise not_subscriptable(self)

    @property
    def size(self) -> int:
        """Entries of all kernels."""
        return sum(row.size for row in self.rows)

    @property
    def live(self) -> int:
        """Live entries of all kernels."""
        return sum(row.live for row in self.rows)

    @property
    def density(self) -> float:
        """Live fraction over all kernels."""
        return self.live / self.size if self.rows else 1.0

    @property
    def sparse_density(self) -> float:
        """Live fraction over the kernels that are not dense; 1 if all are dense."""
        return SparsityReport(self._sparse).density

    @property
    def whole_density(self) -> float:
        """Live fraction over all matrices of the model, including unregistered ones."""
        return SparsityReport(self._everything).density

    @property
    def dense(self) -> dict[str, str]:
        """Why matrices are dense, by path; see `Row`."""
        return {
            row.path: row.state
            for row in self._everything
            if row.state != "sparse"
        }

    @property
    def _everything(self) -> tuple[Row, ...]:
        return *self.rows, *self.unregistered

    @property
    def _sparse(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.state == "sparse")

    @property
    def flops(self) -> int | None:
        """Multiply-adds of the dense kernels for one sample; `None` if unknown for any."""
        return _sum([row.flops for row in self.rows])

    @property
    def sparse_flops(self) -> int | None:
        """Multiply-adds of the live entries for one sample; `None` if unknown for any."""
        return _sum([row.sparse_flops for row in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """The figures of the kernels, whatever their storage, as JSON values."""
        rows_by_kind = {"weights": self.rows, "unregistered": self.unregistered}
        return {name: getattr(self, name) for name in _TOTALS} | {
            name: [
                {
                    **dataclasses.asdict(row),
                    "shape": list(row.shape),
                    "density": row.density,
                }
                for row in rows
            ]
            for name, rows in rows_by_kind.items()
        }

    def to_csv(self, path: str | pathlib.Path) -> None:
        """Writes one line for each kernel, then for each unregistered matrix."""
        figures = self.to_dict()
        rows = [*figures["weights"], *figures["unregistered"]]
        with atomic_write(path) as stream:
            writer = csv.DictWriter(
                stream, [*(f.name for f in dataclasses.fields(Row)), "density"]
            )
            writer.writeheader()
            writer.writerows(
                {**row, "shape": "x".join(map(str, row["shape"]))}
                for row in rows
            )

    def __rich_console__(
        self,
        console: rich.console.Console,
        options: rich.console.ConsoleOptions,
    ) -> rich.console.RenderResult:
        """The tables; terminals of 100 columns and fewer get shorter numbers."""
        yield from tables_of(self, console, options)

    def __str__(self) -> str:
        stream = io.StringIO()
        # Plain text in notebooks, too, and whatever FORCE_COLOR says.
        console = rich.console.Console(
            file=stream,
            width=_TEXT_WIDTH,
            force_terminal=False,
            force_jupyter=False,
            color_system=None,
        )
        console.print(self)
        return stream.getvalue().rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


@other_keywords
def report(
    model: keras.Model, *, orthogonality: bool | str = True, sample: Any = None
) -> SparsityReport:
    """Parameters, density, FLOPs, orthogonality and dead outputs of every kernel of a model.

    FLOPs are multiply-adds for one sample, counted once each as in the STR and RigL papers: `size *
    positions` dense and `live * positions` sparse. `dead_outputs` counts outputs whose effective
    kernel is all zero, which stay dead after ReLU; `gain` is the initializer's. Dense matrices are
    listed with the reason (`Row.state`).

    Args:
        model: A built Keras model; wrapped, stripped or dense. For a tf_keras model, FLOPs are
            `None`, and masks are those of TFMOT's wrappers and ours.
        orthogonality: bool or `"all"`. Whether to compute `orthogonality_error` of the effective
            kernels at their own scale, one matrix product each: for kernels that were drawn
            orthogonal and not trained since; with `"all"` for every kernel. The error of a mirrored
            kernel `[[H, -H], [-H, H]]` is that of `H`.
        sample: Data as for `fit`, whose inputs fix sizes (pixels, timesteps) that the model leaves
            open; without it the FLOPs of such a model are unknown.

    Returns:
        A `SparsityReport`, which prints as a table and has `to_dict()` and `to_csv(path)`.

    Raises NotPrunableError for a model that is not built, or that Keras quantized by GPTQ or AWQ.

    Warns:
        DensityWarning: Training has ended at another density than requested, or without
            `callbacks.UpdateMasks` for masks on a schedule.

    Limits: only matrices count: parameters and FLOPs lack biases, normalization, activations and
    pooling.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(50, name="hidden")])
        >>> summary = kso.report(kso.sparsify(model, 0.1, seed=0))
        >>> summary.rows[0].live, summary.rows[0].sparse_flops, summary.density
        (500, 500, 0.1)
    """
    weights = _weights(model, sample)
    on_blocks = any(
        weight.storage is not None and weight.storage.in_blocks
        for weight in weights
    )
    _refuse_unreadable(weights)
    rows = [
        (weight, _row(weight, orthogonality, on_blocks)) for weight in weights
    ]
    registered = [
        row for w, row in rows if w.registered or w.storage is not None
    ]
    stores = [
        weight.storage for weight in weights if weight.storage is not None
    ]
    support = [variable for storage in stores for variable in storage.support()]
    values = [weight.variable for weight in weights]
    return SparsityReport(
        tuple(registered),
        str(getattr(model, "name", "")),
        tuple(row for w, row in rows if not w.registered and w.storage is None),
        bytes=sum(
            math.prod(v.shape) * _itemsize(v) for v in (*values, *support)
        ),
        live_bytes=sum(
            row.live * _itemsize(weight.variable) for weight, row in rows
        ),
        params=sum(math.prod(variable.shape) for variable in model.weights),
        mask_params=sum(math.prod(variable.shape) for variable in support),
        unadopted=tuple(
            w.path
            for w in weights
            if w.storage is None and _drawn_by(w) is not None
        ),
    )


def _weights(model: Any, sample: Any) -> list[PrunableWeight]:
    """The kernels of a model and its other matrices, with FLOPs; warns of wrong densities."""
    if is_of_tf_keras(model):
        return weights_of(model)
    warn_unless_at_density(model)
    if sample is not None:
        sample = first_batches(sample, batch_size=1, shuffle=False)[0][0]
        check_inputs(model, sample, "sample")
    return prunable_weights(model, flops=True, sample=sample, unregistered=True)


def _refuse_unreadable(weights: Sequence[PrunableWeight]) -> None:
    """Raises for kernels that Keras has rewritten so that their entries cannot be counted."""
    for weight in weights:
        mode = getattr(weight.owner, "quantization_mode", None)
        if mode in _UNREADABLE and weight.storage is None:
            raise NotPrunableError(
                f"The kernel {weight.path!r} is packed as Keras' {mode!r} packs it, and its live "
                "entries cannot be counted. Report the model before it is quantized. "
                f"Received: a layer {type(weight.owner).__name__} of {mode!r}"
            )


def _row(
    weight: PrunableWeight, orthogonality: bool | str, on_blocks: bool
) -> Row:
    """The row of one kernel: counts, storage, and its orthogonality if it is as drawn."""
    live = weight.live
    block = None
    if weight.storage is not None and weight.storage.in_blocks:
        block = weight.storage.block_size
    elsewhere = on_blocks and weight.registered and not block
    waits = (
        weight.storage is not None and weight.storage.unfinished() is not None
    )
    sparse = (weight.storage is not None and not waits) or live < weight.size
    drawn_by = _drawn_by(weight)
    dense = "no mask" if weight.registered else "not registered"
    if waits:
        dense = "not updated"
    elif weight.storage is None and drawn_by is not None:
        dense = "not adopted"
    error = None
    if orthogonality and (orthogonality == "all" or _is_as_drawn(weight)):
        # A kernel without its initializer may be orthogonal in either way.
        own_taps = getattr(drawn_by, "taps", None) or "center"
        taps_to_try = (
            ("center", "all")
            if drawn_by is None and len(weight.shape) > 2
            else (own_taps,)
        )
        layout = weight.layout or KernelLayout.convolution()
        folded = without_mirror(layout.to_canonical(weight.value))
        error = min(
            orthogonality_error(folded, CANONICAL, taps=taps)
            for taps in taps_to_try
        )
    # The layer names its own weights.
    if len(weight.shape) < 2 and weight.layout is None:
        dead = int(np.count_nonzero(weight.value == 0))
    else:
        dead = dead_outputs(weight.value, weight.layout)
    return Row(
        path=weight.path,
        shape=weight.shape,
        size=weight.size,
        live=live,
        flops=weight.flops,
        sparse_flops=weight.sparse_flops,
        orthogonality_error=error,
        dead_outputs=dead,
        gain=getattr(drawn_by, "gain", None),
        state="sparse" if sparse else dense,
        block=block,
        not_on_blocks=why_not_on_blocks(weight, weight.density)
        if elsewhere
        else None,
        least_density=getattr(weight.storage, "least_density", None),
    )


def _drawn_by(weight: PrunableWeight) -> SparseInitializer | None:
    initializer = (
        weight.initializer
        if weight.storage is None
        else weight.storage.drawn_by
    )
    return initializer if isinstance(initializer, SparseInitializer) else None


def _is_as_drawn(weight: PrunableWeight) -> bool:
    drawn_by = _drawn_by(weight)
    if drawn_by is None or drawn_by.isometry is None:
        return False
    if weight.storage is not None:
        return weight.storage.is_as_drawn()
    # The comparison draws the kernel again: minutes for approximate isometry.
    return drawn_by.isometry == "exact" and is_as_drawn(weight)


def _itemsize(variable: keras.Variable) -> int:
    """Bytes of an entry; NumPy lacks bfloat16 and float8, whose names have them."""
    bits = re.search(r"\d+", keras.backend.standardize_dtype(variable.dtype))
    return 1 if bits is None else max(int(bits[0]) // 8, 1)


def _sum(values: list[int | None]) -> int | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) if len(numbers) == len(values) else None
