"""`AttentionLayout`: the axes of all projections of one attention layer."""

import dataclasses
from typing import Any

import keras

from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.orthogonal import KernelLayout


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
@dataclasses.dataclass(frozen=True)
class AttentionLayout:
    """Finds the layout of a MultiHeadAttention kernel from its shape.

    A MultiHeadAttention uses one initializer for four projections: query, key and value with
    kernels `(dim, heads, features)` and `dim` inputs; and the output with `(heads, features, out)`
    and `heads * features` inputs. This tells them apart. Inside `PrunableLayer` no layout is
    needed.

    Args:
        num_heads: Number of heads.
        key_dim: Features of a head, in queries and keys.
        value_dim: Features of a head, in values. Default: `key_dim`.

    Raises:
        LayoutError: At a call, for the shape of none of these kernels.

    Limits: if the model dimension equals `num_heads`, and the output dimension `key_dim`, both
    meanings fit, and the kernel is taken for an input projection.

    Example:

    >>> AttentionLayout(4, 8)((32, 4, 8)).matrix_shape((32, 4, 8))
    (32, 32)
    >>> AttentionLayout(4, 8)((4, 8, 64)).matrix_shape((4, 8, 64))
    (32, 64)
    """

    num_heads: int
    key_dim: int
    value_dim: int | None = None

    def __call__(self, shape: tuple[int, ...]) -> KernelLayout:
        features = (self.key_dim, self.value_dim or self.key_dim)
        if len(shape) == 3 and shape[1] == self.num_heads and shape[2] in features:
            return KernelLayout(inputs=(0,), outputs=(1, 2))
        if len(shape) == 3 and shape[0] == self.num_heads and shape[1] == features[1]:
            return KernelLayout(inputs=(0, 1), outputs=(2,))
        raise LayoutError(
            f"No projection of an attention layer with {self.num_heads} heads and features "
            f"{features} has this kernel shape. Received: shape={shape}"
        )

    def get_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "AttentionLayout":
        return cls(**config)
