"""`LowRankAdaptation`: a frozen sparse kernel with a trained update of low rank under its mask."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_integer, check_number, check_seed
from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.parametrizations._fixed_mask import FixedMask


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class LowRankAdaptation(FixedMask):
    """Effective weight `W_e = W + (alpha / rank) A B` where the mask is live, and 0 elsewhere.

    LoRA for a sparse kernel: `W` stays as it is, and only the factors `A` (m x rank) and `B`
    (rank x n) are trained, for a kernel of `n` outputs taken as a matrix (m x n). `B` starts from
    zero, so that nothing changes at first. When the model is stripped, `W_e` becomes the kernel,
    with the same zeros. `keras_sparse_ortho.enable_lora` puts it on a sparse model.

    Args:
        rank: At most the smaller side of the matrix.
        density: As for `FixedMask`.
        mask: As for `FixedMask`.
        initializer: As for `FixedMask`.
        alpha: Scale of the update, a number. Default: `rank`, for a factor of 1.
        seed: For `A`, which Keras' `HeUniform` draws.

    Raises:
        ValueError: A rank that is no positive integer or, when built, larger than the matrix.
        NotPrunableError: As for `FixedMask`.

    Limits: the mask stays fixed, and the dense product `A B` is computed in every step.

    Example:

    >>> import keras
    >>> from keras_sparse_ortho import PrunableLayer
    >>> layer = PrunableLayer(keras.layers.Dense(8), LowRankAdaptation(2, density=0.25))
    >>> layer.build((None, 16))
    >>> sorted(variable.name for variable in layer.trainable_variables)
    ['bias', 'kernel_lora_a', 'kernel_lora_b']

    Reference:

    - Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022), arXiv 2106.09685
    """

    movable = False

    @other_keywords()
    def __init__(
        self,
        rank: int,
        density: float | None = None,
        mask: np.ndarray | None = None,
        initializer: SparseInitializer | None = None,
        *,
        alpha: float | None = None,
        seed: int | None = None,
        drawn_digest: int | None = None,
    ) -> None:
        super().__init__(density, mask, initializer, drawn_digest=drawn_digest)
        self.rank = check_integer("rank", rank)
        self.alpha = None if alpha is None else check_number("alpha", alpha)
        self.seed = check_seed(seed)
        self.down: Any = None
        self.up: Any = None

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        """Creates the mask, `A` and `B`, and stops training the weight itself."""
        rows, cols = _matrix(weight)
        if self.rank > min(rows, cols):
            raise ValueError(
                f"`rank` must be at most {min(rows, cols)} for '{weight.path}', a matrix of {rows} "
                f"x {cols}. Received: rank={self.rank}"
            )
        super().build(weight, add_weight)
        drawn = keras.initializers.HeUniform(self.seed)
        self.down = add_weight(name="lora_a", shape=(rows, self.rank), initializer=drawn)
        self.up = add_weight(name="lora_b", shape=(self.rank, cols), initializer="zeros")
        weight.variable.trainable = False

    def effective(self, value: Any) -> Any:
        """`where(mask, W + (alpha / rank) A B, 0)`."""
        scale = 1.0 if self.alpha is None else self.alpha / self.rank
        update = keras.ops.matmul(self.down.value, self.up.value) * scale
        update = keras.ops.reshape(update, self.weight.shape)
        return super().effective(value + keras.ops.cast(update, value.dtype))

    def materialize(self) -> None:
        """Adds the update to the weight; the factors start again, from an update of zero."""
        super().materialize()
        assign(self.up, np.zeros(self.up.shape, dtype="float32"))

    def release(self) -> None:
        """Makes the weight trainable again, if its layer is."""
        self.weight.variable.trainable = self.weight.owner.trainable

    def is_as_drawn(self) -> bool:
        """Never: what its layer uses is trained."""
        return False

    def _like(self, density: float | None, mask: np.ndarray | None = None) -> "LowRankAdaptation":
        return type(self)(
            self.rank, density, mask, self.initializer, alpha=self.alpha, seed=self.seed
        )

    def get_config(self) -> dict[str, Any]:
        """Rank, scale and seed, with density and initializer."""
        settings = {"rank": self.rank, "alpha": self.alpha, "seed": self.seed}
        return {**super().get_config(), **settings}


def _matrix(weight: PrunableWeight) -> tuple[int, int]:
    """Rows and columns of a kernel as a matrix; the columns are its outputs, if these are last."""
    rank, layout = len(weight.shape), weight.layout
    outputs = {axis % rank for axis in (layout.outputs if layout is not None else (-1,))}
    split = rank - len(outputs)
    if outputs != set(range(split, rank)) or split == 0:
        split = rank - 1
    return int(np.prod(weight.shape[:split])), int(np.prod(weight.shape[split:]))
