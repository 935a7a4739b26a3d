"""The routes that store sparse weights sparsely."""

from typing import Any

import keras

from keras_sparse_ortho.export._errors import ExportRouteError
from keras_sparse_ortho.export._route import Batches, Route
from keras_sparse_ortho.export._sparse_encoding import Encoded, Encoding, encode


class _Derived(Route):
    """A route with the storage, measure and tolerance of another."""

    def __init__(self, base: Route, encoding: str) -> None:
        self.base = base
        self.name = f"{base.name}+{encoding}"
        self.quantization = base.quantization
        self.encoding = encoding
        self.needs_representative_data = base.needs_representative_data
        self.measure = base.measure
        self.tolerance = base.tolerance

    def check(self, model: keras.Model) -> None:
        self.base.check(model)

    def configure(self, converter: Any, batches: Batches | None) -> None:
        self.base.configure(converter, batches)


class ConverterSparsity(_Derived):
    """What the converter's own `EXPERIMENTAL_SPARSITY` makes of the weights.

    Rank 2 and 4, more than 30% zeros: elementwise behind a DENSIFY operation, which restores the
    dense weight at load; or, where the zeros come in blocks, 1x4 (float) and 1x16 (int8). Known
    to go wrong: float16 where a Dense turns out 1x4 (crash), dynamic int8 with XNNPACK (refused
    or crash), 1x4 where the inputs are not divisible by 4 (wrong answers). All of it is found by
    running the file.
    """

    def __init__(self, base: Route) -> None:
        super().__init__(base, "sp")

    def configure(self, converter: Any, batches: Batches | None) -> None:
        """Add the converter's option to those of the storage."""
        import tensorflow as tf

        super().configure(converter, batches)
        options = list(converter.optimizations or [])
        converter.optimizations = [*options, tf.lite.Optimize.EXPERIMENTAL_SPARSITY]


class SparseFullyConnected(_Derived):
    """Dense layers' weights given sparsely to FULLY_CONNECTED, by our own rewriting.

    Only the weights of matrix products are encoded: LiteRT has no kernel for sparse convolutions.
    """

    def __init__(self, base: Route, layout: Encoding) -> None:
        super().__init__(base, layout.name)
        self.layout = layout

    @property
    def converted_as(self) -> Route:
        """The dense route of the same storage."""
        return self.base

    def finish(self, content: bytes) -> Encoded:
        """Encode the weights that gain by it."""
        found = encode(content, self.layout)
        if not found.encoded:
            reasons = [f"'{name}': {why}" for name, why in list(found.kept.items())[:5]]
            raise ExportRouteError(
                f"Route '{self.name}' needs a weight of a Dense layer that can be stored as "
                f"{self.layout.name}; take the dense route '{self.base.name}'. "
                f"Received: {'; '.join(reasons) or 'no FULLY_CONNECTED operation in the file'}"
            )
        return found
