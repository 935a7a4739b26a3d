"""Embedding: a table with a row of channels for each token."""

import keras
import numpy as np

from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.families._register_layer import register_layer
from keras_sparse_ortho.kernels import KernelLayout, LastAxisRows, Rows
from keras_sparse_ortho.models import (
    ChannelCall,
    ChannelRule,
    Constants,
    Mask,
    SmallerLayer,
    Tracer,
    count_of,
    smaller_layer,
    value_of,
)

L = keras.layers


class Table(ChannelRule):
    """Makes channels, and reads tokens, all of them."""

    has_kernel = True

    def constants(self, inputs: Constants) -> Constants:
        table = value_of(self.layer.embeddings)
        return np.where((table == table[0]).all(axis=0), table[0], np.nan)

    def needed(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> tuple[Mask, Mask]:
        return np.ones_like(read), live

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerLayer | None:
        if live.all():
            return None
        table = value_of(self.layer.embeddings)[:, live]
        return smaller_layer(
            self.layer, {"output_dim": count_of(live)}, [table]
        )

    def trace(
        self,
        tracer: Tracer,
        inputs: np.ndarray,
    ) -> np.ndarray:
        tracer.hold(inputs, self.layer, "they are tokens")
        return tracer.make(self.layer.name, self.layer.output_dim)


def _table(call: ChannelCall) -> ChannelRule | str:
    return Table(call.layer, len(call.output_shape) - 1)


class TokenRows(LastAxisRows):
    """Tokens, each of which chooses a row of a table."""

    reads = "tokens"


def _no_positions(
    layer: keras.layers.Layer,
    inputs: Tensor,
    outputs: Tensor,
) -> int:
    return 0


def _tokens(layer: keras.layers.Layer) -> Rows:
    return TokenRows()


_TABLE = KernelLayout.dense()
register_layer(
    L.Embedding,
    {"embeddings": _TABLE, "reverse_embeddings": _TABLE},
    positions=_no_positions,
    rows={"embeddings": _tokens},
    channels=_table,
    rounding="floats",
    by_sample=True,
)
