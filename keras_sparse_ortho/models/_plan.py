"""`Plan`: what each kernel of a model is to become."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from keras_sparse_ortho.initializers import AnyDraw
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.parametrizations import FakeQuantization, Parametrization


@dataclasses.dataclass(frozen=True)
class Target:
    """What one kernel is to become.

    Args:
        storage: `"masked"`, `"compact"`, `"blocks"` (compact where the layer has no such form),
            `"dense"`, or `"kept"`.
        draw: The mask, and the values where these are new. `None`: the mask that the kernel has.
        parametrization: With `"masked"`, what takes the place of a fixed mask.
        block: With `"blocks"`, their size, where neither the draw nor what drew the mask tells it.
        quantizer: What rounds the effective kernel.
    """

    storage: str
    draw: AnyDraw | None = None
    parametrization: Parametrization | None = None
    block: tuple[int, int] | None = None
    quantizer: FakeQuantization | None = None

    @property
    def is_compact(self) -> bool:
        """Whether no dense kernel is stored."""
        own = self.parametrization
        return self.storage in ("compact", "blocks") if own is None else own.compact


Around = Callable[[Any, Any, Callable[[], Any]], Any]
"""`(layer, own, make)` -> what takes the place of `own`, the copy of `layer`, or `None`.

`make()` gives what the targets say: a new layer, or `None` where they change nothing.
"""


@dataclasses.dataclass
class Plan(Mapping[str, Target]):
    """What each kernel of a model is to become, by path; `print` shows it.

    Nothing is changed until `models.apply(model, plan)`. Kernels that are not named stay as they
    are.

    Args:
        weights: The kernels of the model that change.
        targets: What each of them becomes, by path.
        keeps_function: Whether kernels and outputs are to stay equal, and are compared; else live
            counts are.
        keeps_training: Whether compilation and the state of the optimizer are carried over.
        around: What else becomes of layers.
        check: Called with the result, to raise or to warn.
    """

    weights: list[PrunableWeight]
    targets: dict[str, Target]
    keeps_function: bool = False
    keeps_training: bool = False
    around: Around | None = None
    check: Callable[[Any], None] = lambda result: None

    def __getitem__(self, path: str) -> Target:
        return self.targets[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __str__(self) -> str:
        rows = [("kernel", "shape", "becomes", "live", "density", "values")]
        for weight in self.weights:
            target = self.targets[weight.path]
            live = weight.live if target.draw is None else target.draw.live
            own = target.parametrization
            becomes = target.storage if own is None else type(own).__name__
            if target.quantizer is not None:
                becomes += f", {type(target.quantizer).__name__}"
            new = target.draw is not None and target.draw.sets_values
            numbers = (f"{live:,}", f"{live / weight.size:.4g}")
            if own is not None and not own.movable:
                numbers = ("-", "-")  # they come about in training
            values = "new" if new else "kept"
            rows.append((weight.path, f"{weight.shape}", becomes, *numbers, values))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)

    __repr__ = __str__
