"""`int8_errors`: which layers of a model lose how much in a file of int8."""

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import keras

from keras_sparse_ortho._checks import (
    check_number,
    other_keywords,
)
from keras_sparse_ortho._foreign_names import Answering
from keras_sparse_ortho._pictures import axes_or_new
from keras_sparse_ortho.export._conversion import measured_errors
from keras_sparse_ortho.export._explain import warn_of_rows
from keras_sparse_ortho.export._export_litert import check_model, require_litert
from keras_sparse_ortho.export._task import Steps, Workspace, task_of
from keras_sparse_ortho.kernels import find_kernels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHOWN = 0.01  # of the sum: smaller ones are not printed
_MOST_BARS = 30
_WIDTH = 44  # of a name that is printed


class TensorLoss(NamedTuple):
    """A tensor of a file, rounded alone: activations, or a kernel.

    Attributes:
        kind: str. "activations" or "kernel".
        layer: str. The layer whose output the tensor is, or that it is inside of; for a kernel the
            layer whose output is that of its operation, as the ReLU behind a convolution.
        name: str. The name in the file, and for kernels their path.
        error: float. The relative squared error of the model's outputs.
    """

    kind: str
    layer: str
    name: str
    error: float

    @property
    def label(self) -> str:
        return self.name if self.kind == "kernel" else self.layer


@dataclasses.dataclass(frozen=True, repr=False)
class Int8Errors(Answering):
    """Table of the errors of a model in int8, by tensor; `print` shows it.

    Attributes:
        tensors: tuple of TensorLoss: kernels, then activations in the order of the file.
        file_error: float. The relative squared error of the file of int8.
        rows: int. Rows that were measured.
    """

    tensors: tuple[TensorLoss, ...]
    file_error: float
    rows: int

    @property
    def total(self) -> float:
        """The sum over all tensors, which is near `file_error` where errors are independent."""
        return sum(tensor.error for tensor in self.tensors)

    @property
    def by_layer(self) -> dict[str, float]:
        """The error of each layer: of its kernels and its tensors."""
        errors: dict[str, float] = {}
        for tensor in self.tensors:
            errors[tensor.layer] = errors.get(tensor.layer, 0.0) + tensor.error
        return errors

    def __str__(self) -> str:
        """The tensors with the largest errors, the others in sum, and both sums."""
        lines = [f"{'tensor':{_WIDTH + 12}} {'error':>9}"]
        tensors = sorted(self.tensors, key=lambda tensor: -tensor.error)
        shown = [
            tensor
            for tensor in tensors
            if tensor.error >= _SHOWN * self.total > 0
        ]
        for tensor in shown:
            label = tensor.label[-_WIDTH:]
            lines.append(
                f"{tensor.kind:11} {label:{_WIDTH}} {tensor.error:9.2g}"
            )
        remainder = self.total - sum(tensor.error for tensor in shown)
        count = len(tensors) - len(shown)
        lines.append(f"{f'{count} others':{_WIDTH + 12}} {remainder:9.2g}")
        lines.append(f"{'sum':{_WIDTH + 12}} {self.total:9.2g}")
        label = f"the whole file, on {self.rows} rows"
        lines.append(f"{label:{_WIDTH + 12}} {self.file_error:9.2g}")
        return "\n".join(lines)

    __repr__ = __str__

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Plots the error of each layer as a bar.

        Args:
            ax: Matplotlib axes to draw on. Default: those of a new figure.

        Returns:
            The axes.
        """
        layers = sorted(self.by_layer.items(), key=lambda item: -item[1])
        names = [name for name, _ in layers[:_MOST_BARS]]
        errors = [error for _, error in layers[:_MOST_BARS]]
        height = 1.0 + 0.22 * len(names)
        axes = axes_or_new(ax, (6.0, height))
        axes.barh(names, errors)
        axes.invert_yaxis()
        axes.set(xlabel="relative squared error")
        return axes


@other_keywords
def int8_errors(
    model: keras.Model,
    data: Any,
    *,
    timeout: float = 600.0,
) -> Int8Errors:
    """Measures what each layer of a trained model loses in a static int8 file.

    Each tensor and each kernel that the file of `export_litert(mode="int8")` rounds is rounded
    alone, in the float32 file. Its error is that of the model's outputs on rows that are held out:

        |y_rounded - y|^2 / |y|^2

    A tensor that is only moved, as by Reshape, counts once. Most networks lose more by activations
    than by kernels.

    Args:
        model: As for `export_litert`, without ranges of `quantize_aware`.
        data: As its `representative_data`: 100 to 500 rows of real inputs. One in four, at most 32,
            is held out to measure on.
        timeout: float. Seconds for each of the two steps, the conversion and the table.

    Returns:
        An `Int8Errors`: `print` it, or call `plot()` (after
        `pip install keras-sparse-ortho[plot]`).

    Raises:
        ImportError, ValueError, ExportConversionError: As `export_litert`.

    Limits: errors add up where they are independent, so the `total` is near `file_error` for most
    networks; compare them first. A layer that the converter puts into the operation of another one
    is shown with it. Operations in loops, of recurrent layers, stay in floats. Tensors inside of
    subclassed and nested models have the names of the file. 80 tensors take a few seconds, besides
    the conversion.

    Examples:
        >>> import keras, numpy as np
        >>> from keras_sparse_ortho.export import int8_errors
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
        >>> errors = int8_errors(model, np.random.default_rng(0).normal(size=(64, 4)))
        >>> [tensor.label for tensor in errors.tensors if tensor.kind == "kernel"]
        ['head/kernel']
    """
    check_model(model)
    require_litert()
    timeout = check_number("timeout", timeout)
    task = task_of(model, 1, None, data, None, timeout)
    if task.has_ranges or data is None:
        raise ValueError(
            "Errors are measured of models without trained ranges, on `data`. "
            "A model of `quantize_aware` computes as its file: compare its outputs with those of "
            f"the model before. Received: model={model.name!r}, data of type {type(data).__name__}"
        )
    warn_of_rows(task)
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(Path(folder), Steps("auto"))
        measured = measured_errors(task, workspace)
    # Variables of a Sequential model have its name in front.
    paths = {
        kernel.variable.path: kernel.path
        for kernel in find_kernels(task.model, "")
    }
    tensors = [
        TensorLoss(kind, layer, paths.get(name, name), error)
        for kind, layer, name, error in measured["tensors"]
    ]
    return Int8Errors(
        tuple(tensors), measured["file"], len(task.rows.compared[0])
    )
