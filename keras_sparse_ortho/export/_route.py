"""One way of encoding a model as a LiteRT file.

The seam for further encodings: a new route is a small subclass in a file of its own, listed in
`_registry.py`. Everything else (static shapes, the worker processes, the comparison, the zero
count, the report) is the same for all routes.
"""

import abc
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.export._sparse_encoding import Encoded

Batches = Callable[[], Iterator[dict[str, np.ndarray]]]


class Route(abc.ABC):
    """How a SavedModel becomes the bytes of a LiteRT file, and how exact the file must be."""

    name: str
    quantization: str | None
    encoding: str = "dense"
    needs_representative_data: bool = False
    measure: str
    tolerance: float

    @property
    def converted_as(self) -> "Route":
        """The route whose conversion `finish` starts from: itself, unless it rewrites another's."""
        return self

    def finish(self, content: bytes) -> Encoded:
        """What is done to the converted file; routes that the converter writes do nothing.

        Raises:
            ExportRouteError: if the file has no weight that this route is for.
        """
        return Encoded(content, (), {})

    def check(self, model: keras.Model) -> None:  # noqa: B027 - most routes take every model
        """Refuse a model this route is known to fail on, before any time is spent.

        Raises:
            ValueError: with the reason and the way out.
        """

    def convert(self, saved_model: str, batches: Batches | None) -> bytes:
        """Convert a SavedModel; runs in the worker process, on the TensorFlow backend.

        Args:
            saved_model: Folder of the SavedModel, with static shapes.
            batches: Gives the representative data, one call of the model at a time, by name.
        """
        import tensorflow as tf

        converter = tf.lite.TFLiteConverter.from_saved_model(saved_model)
        self.configure(converter, batches)
        return bytes(converter.convert())

    @abc.abstractmethod
    def configure(self, converter: Any, batches: Batches | None) -> None:
        """Set the options of a `tf.lite.TFLiteConverter`."""
