"""`Plan`: what the kernels and layers of a model become."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol

import keras

from keras_sparse_ortho._foreign_names import Answering, unknown_path
from keras_sparse_ortho.initializers import AnyDraw
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import dead_outputs, depthwise_outputs
from keras_sparse_ortho.storages import Target


class LayerChange(Protocol):
    """A change of one layer besides the new forms of its kernels."""

    def change(
        self, layer: keras.layers.Layer, formed: keras.layers.Layer | None
    ) -> keras.layers.Layer | None:
        """Returns the built layer for the place of a layer, or `None` where it stays.

        Args:
            layer: Layer in the copy of the model.
            formed: The layer with new forms of its kernels; `None` where these stay.
        """


@dataclasses.dataclass
class Plan(Mapping[str, Target], Answering):
    """The new form of each kernel of a model, by path; `print` shows it.

    Nothing changes until `models.apply(model, plan)`. Kernels that are not named stay as they are.

    Args:
        weights: list of the `PrunableWeight` that change.
        targets: dict from path to `Target`.
        layer_changes: dict from layers of the model to a `LayerChange` besides their kernels.
        keeps_function: bool. Whether kernels and outputs must stay equal; else live counts are
            compared.
        keeps_training: bool. Whether to carry compilation and optimizer state over.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="a")])
        >>> weights = kso.prunable_weights(model)
        >>> mask = kso.initializers.Draw(np.eye(4, dtype=bool))
        >>> plan = Plan(weights, {"a/kernel": kso.models.Target("compact", mask)})
        >>> kso.prunable_weights(kso.models.apply(model, plan))
        [<a/kernel shape=(4, 4), density=0.25>]
    """

    weights: list[PrunableWeight]
    targets: dict[str, Target]
    layer_changes: Mapping[keras.layers.Layer, LayerChange] = dataclasses.field(
        default_factory=dict
    )
    keeps_function: bool = False
    keeps_training: bool = False

    def __getitem__(self, path: str) -> Target:
        if path not in self.targets:
            raise unknown_path(path, self.targets)
        return self.targets[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("kernel", "shape", "becomes", "live", "density", "values")
        ]
        rows += [
            _row(weight, self.targets[weight.path]) for weight in self.weights
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows
        )
        return "\n".join(lines)

    __repr__ = __str__


def _row(weight: PrunableWeight, target: Target) -> tuple[str, ...]:
    """The texts of a kernel in the table of a plan."""
    parametrization = target.parametrization
    becomes = (
        target.storage
        if parametrization is None
        else type(parametrization).__name__
    )
    becomes += _outputs_note(weight, target.draw)
    if target.quantizer is not None:
        becomes += f", {type(target.quantizer).__name__}"
    if parametrization is not None and not parametrization.movable:
        live_text, density_text = "-", "-"  # training decides
    else:
        live = weight.live if target.draw is None else target.draw.live
        live_text, density_text = f"{live:,}", f"{live / weight.size:.4g}"
    values = "new" if target.sets_values else "kept"
    return (
        weight.path,
        f"{weight.shape}",
        becomes,
        live_text,
        density_text,
        values,
    )


def _outputs_note(weight: PrunableWeight, draw: AnyDraw | None) -> str:
    """The words of a plan on the outputs of a depthwise kernel."""
    outputs = depthwise_outputs(weight.shape, weight.layout)
    if draw is None or not outputs:
        return ""
    dead = dead_outputs(draw.mask, weight.layout)
    if dead:
        return f", {dead} of {outputs} outputs dead"
    return ", each output live"
