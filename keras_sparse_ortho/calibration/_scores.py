"""`LayerScore`: scores that need the inputs of each layer; OBS and Wanda."""

import dataclasses
from typing import ClassVar

import numpy as np

from keras_sparse_ortho.calibration._moments import Moments
from keras_sparse_ortho.calibration._patterns import Pattern
from keras_sparse_ortho.calibration._solve import obs, refit, wanda
from keras_sparse_ortho.saliency import Need, Score, register_score

Array = np.ndarray


class LayerScore(Score):
    """A score of one kernel on the inputs `X` of its layer, for `prune` with `data`.

    Layers are pruned one after the other, each on the inputs that the pruned layers before it
    give. Override `layer_scores`: the highest are live, and get the values of least squared error
    of the layer's outputs. Or override `solve`, which finds mask and values together.

    Kernels come as `M` matrices, `(M, k, outputs)`: `k` is taps times inputs, and `M` more than 1
    for groups and depthwise kernels.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> class LoudestInputs(kso.calibration.LayerScore):
        ...     name = "loudest_inputs"
        ...     def layer_scores(self, kernel, moments):
        ...         return np.broadcast_to(moments.squares[..., None], kernel.shape)
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="a")])
        >>> x = np.random.default_rng(0).normal(size=(64, 8))
        >>> kso.prunable_weights(kso.prune(model, 0.25, score=LoudestInputs(), data=x))
        [<a/kernel shape=(8, 4), density=0.25>]
    """

    needs: ClassVar[Need] = "inputs"

    uses_reference: ClassVar[bool] = False
    """Whether `solve` uses the inputs in the model as given, `Moments.across`, too."""

    def layer_scores(self, kernel: Array, moments: Moments) -> Array:
        """Returns the scores of a kernel's entries, of its shape; the highest are kept.

        Args:
            kernel: `(M, k, outputs)`.
            moments: Sums over the rows `X` in float64. `moments.gram` is `X^T X`, `(M, k, k)` or
                `(1, k, k)`; for embeddings its diagonal, the counts of the tokens, `(M, k)`.
                `moments.squares` is the sum of squares of each input, `(M, k)` or `(1, k)`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs `layer_scores` or `solve`."
        )

    def solve(
        self,
        kernel: Array,
        count: int,
        pattern: Pattern,
        used: Moments,
        held_out: Moments,
    ) -> tuple[Array, Array]:
        """Returns the values and the mask of a kernel.

        Args:
            kernel: `(M, k, outputs)`.
            count: int. Live entries.
            pattern: `largest(scores, count)` is the mask of largest total score.
            used: Moments of three in four rows.
            held_out: Moments of the other rows, on which `refit` chooses its damping.
        """
        scores = self.layer_scores(kernel, used + held_out)
        mask = pattern.largest(scores, count)
        return refit(kernel, mask, used, held_out), mask


@register_score
@dataclasses.dataclass(frozen=True)
class Obs(LayerScore):
    """Mask and values of least squared error, by ADMM; see `prune`."""

    name: ClassVar[str] = "obs"
    uses_reference: ClassVar[bool] = True

    def solve(
        self,
        kernel: Array,
        count: int,
        pattern: Pattern,
        used: Moments,
        held_out: Moments,
    ) -> tuple[Array, Array]:
        return obs(kernel, count, pattern, used, held_out)


@register_score
@dataclasses.dataclass(frozen=True)
class Wanda(LayerScore):
    """The score `|w_i| norm(X_i)`."""

    name: ClassVar[str] = "wanda"

    def layer_scores(self, kernel: Array, moments: Moments) -> Array:
        return wanda(kernel, moments)
