"""The parts that all routes of an export share: plain model, rows, Keras' outputs on them."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checked_data import (
    check_finite,
    check_numbers,
)
from keras_sparse_ortho._text import printable
from keras_sparse_ortho._types import Nested
from keras_sparse_ortho.export._blocks import BlockPlan, plan_of
from keras_sparse_ortho.export._lstms import (
    NO_LSTMS,
    LstmPlan,
    plan_of_lstms,
)
from keras_sparse_ortho.export._reference import (
    check_states,
    keras_outputs,
    kernels_of,
    plain_model,
)
from keras_sparse_ortho.export._routes import TOLERANCES, Route
from keras_sparse_ortho.export._rows import (
    Rows,
    count_of_inputs,
    doubts,
    inputs_of,
    rows_of,
)
from keras_sparse_ortho.export._signature import (
    Signature,
    full_batches,
    leaves,
    pack,
    signature_of,
)
from keras_sparse_ortho.quantization import has_trained_ranges

STRETCH = "a stretch in floats"  # the name of a remedy


class Steps:
    """Says on standard error what is done, after how many seconds; by default to people only."""

    def __init__(self, verbose: bool | str) -> None:
        self._start = time.monotonic()
        self.loud = sys.stderr.isatty() if verbose == "auto" else bool(verbose)

    def __call__(self, text: str = "") -> float:
        seconds = time.monotonic() - self._start
        if self.loud and text:
            print(
                f"{seconds:5.0f} s  {printable(text)}",
                file=sys.stderr,
                flush=True,
            )
        return seconds


class Workspace:
    """The folder of an export, and the time of each of its routes.

    Args:
        folder: Path. An empty folder.
        say: `Steps`. Where progress is shown.
    """

    def __init__(self, folder: Path, say: Steps) -> None:
        self.folder = folder
        self.say = say
        self.seconds: dict[str, float] = {}  # by route

    @contextlib.contextmanager
    def timed(self, route: Route, step: str) -> Iterator[None]:
        """Adds the time of a step to that of its route."""
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        self.seconds[route.name] = self.seconds.get(route.name, 0.0) + seconds
        self.say(f"{route.name}: {step}, {seconds:.1f} s")


@dataclasses.dataclass(frozen=True)
class Remedy:
    """How a file of static integers loses less than with measured ranges alone.

    Attributes:
        fits_ranges: bool. Whether ranges are fitted, or as they were measured.
        equalizes: bool. Whether the ranges of channels are equalized.
        floats: Names of layers that stay in floats, "auto", or None.
    """

    fits_ranges: bool = False
    equalizes: bool = False
    floats: list[str] | str | None = None

    @property
    def chooses(self) -> bool:
        """Whether it is chosen on rows that neither calibrate nor compare."""
        return self.floats == "auto"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `export_litert` that ask for it."""
        ranges = "measured"
        if self.fits_ranges:
            ranges = "fitted"
        return {
            "ranges": ranges,
            "equalize": self.equalizes,
            "floats": self.floats,
        }

    @property
    def name(self) -> str:
        """Such as "fitted ranges, equalized channels"."""
        names = ["measured ranges"]
        if self.fits_ranges:
            names = ["fitted ranges"]
        if self.equalizes:
            names.append("equalized channels")
        if self.floats == "auto":
            names.append(STRETCH)
        elif self.floats:
            names.append("layers in floats")
        return ", ".join(names)


@dataclasses.dataclass(frozen=True)
class Task:
    """The checked arguments of an export, the plain model, and Keras' outputs.

    Attributes:
        model: The plain model in float32.
        signature: `Signature`. Its inputs.
        rows: `Rows`. Rows that calibrate a file, and rows to compare it on.
        names: Names of the outputs.
        outputs: Keras' outputs on the rows to compare.
        kernels: Values of kernels, by path.
        blocks: `BlockPlan`. The kernels on live blocks; empty if no route has them.
        lstms: `LstmPlan`. The LSTMs of the fused operator; empty if no route has it.
        has_ranges: bool. Whether ranges of activations were trained.
        doubts: Signs that calibration rows are wrong.
        ends: Types of inputs and outputs of the file.
        tolerance: float. The largest error that passes; None for that of the route.
        timeout: float. Seconds for each job of a subprocess.
        remedy: How files of static integers lose less.
    """

    model: keras.Model
    signature: Signature
    rows: Rows
    names: list[str]
    outputs: list[np.ndarray]
    kernels: dict[str, np.ndarray]
    blocks: BlockPlan
    lstms: LstmPlan
    has_ranges: bool
    doubts: list[str]
    ends: tuple[str, str]
    tolerance: float | None
    timeout: float
    remedy: Remedy = Remedy()

    def allowed(self, route: Route) -> float:
        """The largest error of a route that passes."""
        if self.tolerance is None:
            return TOLERANCES[route.storage]
        return float(self.tolerance)


def task_of(
    model: keras.Model,
    batch_size: int,
    sample: Nested,
    representative_data: Nested,
    tolerance: float | None,
    timeout: float,
    *,
    of_blocks: bool = False,
    of_lstms: bool = False,
    ends: tuple[str, str] = ("float32", "float32"),
    chooses: bool = False,
) -> Task:
    """Checks the arguments of an export, and calls Keras; see `export_litert`.

    Args:
        model: The user's model.
        batch_size: int. As the user gave it, and so are the next four.
        sample: Rows to compare on.
        representative_data: Rows to calibrate on.
        tolerance: float. The largest error that passes; None for that of the route.
        timeout: float. Seconds for each job of a subprocess.
        of_blocks: bool. Whether some route has live blocks.
        of_lstms: bool. Whether some route has the fused operator for LSTMs.
        ends: Types of inputs and outputs of the file.
        chooses: bool. Whether remedies are chosen on rows of `representative_data`.
    """
    # `not` refuses NaN as well.
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(
            f"`tolerance` must be 0 or more. Received: tolerance={tolerance!r}"
        )
    signature, compared, representative = _checked_rows(
        model, batch_size, sample, representative_data
    )
    has_ranges = has_trained_ranges(model)
    rows = rows_of(signature, compared, representative, has_ranges, chooses)
    converted, reference = plain_model(model)
    signs = []
    if representative is not None and not has_ranges:
        signs = doubts(converted, signature, representative)
    first_batch = full_batches(rows.compared, batch_size)[0]
    tensors = [keras.ops.convert_to_tensor(array) for array in first_batch]
    inputs = pack(signature.nesting, tensors)
    check_states(reference, inputs)
    names, outputs = keras_outputs(reference, signature, rows.compared)
    lstms = NO_LSTMS
    if of_lstms:
        lstms = plan_of_lstms(converted, inputs)
    return Task(
        model=converted,
        signature=signature,
        rows=rows,
        names=names,
        outputs=outputs,
        kernels=kernels_of(converted),
        blocks=plan_of(converted) if of_blocks else BlockPlan({}, {}),
        lstms=lstms,
        has_ranges=has_ranges,
        doubts=signs,
        ends=ends,
        tolerance=tolerance,
        timeout=timeout,
    )


def _checked_rows(
    model: keras.Model,
    batch_size: int,
    sample: Nested,
    representative_data: Nested,
) -> tuple[Signature, list[np.ndarray] | None, list[np.ndarray] | None]:
    """The inputs of the file, the rows to compare on, and those to calibrate on."""
    count = count_of_inputs(model)
    sample = inputs_of(sample, count)
    check_numbers(model, sample, "sample")
    if count is None and sample is not None:
        count = len(leaves(sample))
    data = inputs_of(representative_data, count)
    check_numbers(model, data, "representative_data")
    signature = signature_of(
        model, batch_size, data if sample is None else sample
    )
    representative = None
    if data is not None:
        representative = signature.flatten(data, "representative_data")
    compared = None
    if sample is not None:
        compared = signature.flatten(sample, "sample")
    for arrays, argument in (
        (compared, "sample"),
        (representative, "representative_data"),
    ):
        if arrays is not None:
            check_finite(model, pack(signature.nesting, arrays), argument)
    if representative is not None and len(representative[0]) < batch_size:
        raise ValueError(
            "`representative_data` must fill at least one batch. Received: "
            f"{len(representative[0])} rows with batch_size={batch_size}"
        )
    return signature, compared, representative
