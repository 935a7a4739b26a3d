"""`gain="auto"` and `taps="auto"`: chosen for each kernel by what stands around its layer."""

import math
import warnings
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.initializers import (
    ExactOrthogonal,
    SparseInitializer,
    activation_gain,
    layout_for,
)
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import least_count
from keras_sparse_ortho.pruning._surroundings import Surroundings, surroundings_of


class AutoOptions:
    """Chooses what the patterns of weights leave to be chosen.

    Args:
        model: The Keras 3 model.
        weights: Weights of it that are to be drawn.
        patterns: By path what is to draw them.

    Raises:
        ValueError: A model that is none of Keras 3, where something is to be chosen.
    """

    def __init__(
        self, model: Any, weights: list[PrunableWeight], patterns: dict[str, SparseInitializer]
    ) -> None:
        self._around: dict[str, Surroundings] = {}
        chosen = [w for w in weights if getattr(patterns[w.path], "has_auto", False)]
        if chosen and not isinstance(model, keras.layers.Layer):
            raise ValueError(
                'gain="auto" and taps="auto" are chosen by what follows each layer, which is known '
                "of Keras 3 models only. Give a number and the taps. "
                f"Received: initializer={patterns[chosen[0].path]!r}"
            )
        if chosen:
            self._around = surroundings_of(model, chosen)
        self._gains: dict[tuple[int, float], float] = {}

    def with_taps(self, weight: PrunableWeight, pattern: SparseInitializer) -> SparseInitializer:
        """The pattern with known `taps`.

        All taps, by `"shift"`, where the padding is circular: an exact isometry. Else the center
        tap, which is one under zero padding, and trains better where normalization follows: the
        small CNN of benchmarks/results/methods.md loses up to a point with all taps.
        """
        if not isinstance(pattern, ExactOrthogonal) or pattern.taps != "auto":
            return pattern
        around = self._around[weight.path]
        layout = layout_for(weight, pattern)
        window = math.prod(layout.canonical_shape(weight.shape)[2:-2])
        center = window == 1 or pattern.structure is not None or pattern.center_density is not None
        shift = around.circular and not center
        return pattern.with_options(taps="shift" if shift else "center")

    def with_gain(
        self, weight: PrunableWeight, pattern: SparseInitializer, live: int
    ) -> SparseInitializer:
        """The pattern with a number for its `gain`, for so many live entries.

        Where normalization follows, that of `usual_gain`; else `activation_gain` of the activation
        that follows; 1 for heads of the model and linear layers.
        """
        if not isinstance(pattern, ExactOrthogonal) or pattern.gain != "auto":
            return pattern
        around = self._around[weight.path]
        if around.normalized:
            gain = usual_gain(weight, pattern, live)
        elif around.unknown is None:
            gain = self._one_gain(weight, around.activations)
        else:
            gain = self._activation_gain(weight, getattr(weight.owner, "activation", None))
        return pattern.with_options(gain=gain)

    def warn_of_guesses(self, draws: dict[str, Any]) -> None:
        """Names the kernels whose surroundings are not known, and what was taken for them."""
        guessed = {path: a.unknown for path, a in self._around.items() if a.unknown is not None}
        if guessed:
            lines = [
                f"'{path}' ({why}): gain={draws[path].initializer.gain:.6g}, "
                f"taps={draws[path].initializer.taps!r}"
                for path, why in guessed.items()
            ]
            warnings.warn(
                "Where it is not known what follows a layer, its own activation decides gain and "
                f"taps; give these kernels others by `include`. Received: {'; '.join(lines)}",
                stacklevel=5,
            )

    def _one_gain(self, weight: PrunableWeight, activations: tuple[Any, ...]) -> float:
        found = [self._activation_gain(weight, activation) for activation in activations]
        if found and max(found) - min(found) > 1e-6:
            raise ValueError(
                f"The output of '{weight.path}' meets several activations, each with another gain. "
                f'Give it a number, in a call of its own with `include`. Received: gain="auto", '
                f"gains {sorted(round(gain, 4) for gain in found)}"
            )
        return found[0] if found else 1.0

    def _activation_gain(self, weight: PrunableWeight, activation: Any) -> float:
        if activation in (None, keras.activations.linear):
            return 1.0
        bias = getattr(weight.owner, "bias_initializer", None)
        bias_std = 0.0
        if isinstance(bias, keras.initializers.RandomNormal) and weight.owner.bias is not None:
            bias_std = float(bias.stddev)
        key = (id(activation), bias_std)
        if key not in self._gains:
            try:
                self._gains[key] = activation_gain(activation, bias_std)
            except ValueError as error:
                raise ValueError(
                    f"The weight '{weight.path}' has no gain='auto': {error}"
                ) from None
        return self._gains[key]


def usual_gain(weight: PrunableWeight, pattern: ExactOrthogonal, live: int) -> float:
    """The gain with which a kernel has the expected norm of the usual one under the same mask.

    With `n` singular values, all `gain`, and the mean square `v` of the layer's usual initializer,

        gain^2 n = live v,

    that is `gain^2 = 2 density in out / ((in + out) n)` for Glorot's, `density` for square kernels.
    """
    layout = layout_for(weight, pattern)
    singular_values = least_count(weight.shape, layout, taps=pattern.taps)
    return math.sqrt(live * _mean_square(weight) / singular_values)


def usual_initializer(weight: PrunableWeight) -> Any:
    """The dense initializer that the layer has for the weight, Glorot's uniform one by default."""
    own = weight.initializer
    if own is None or isinstance(own, SparseInitializer):
        return keras.initializers.GlorotUniform(seed=0)
    return own


def _mean_square(weight: PrunableWeight) -> float:
    """Of the usual initializer: from its variance where that is known, else from one draw."""
    usual = usual_initializer(weight)
    if isinstance(usual, keras.initializers.VarianceScaling):
        shape: tuple[int, ...] = weight.shape
        if weight.layout is not None and isinstance(weight.owner, keras.layers.EinsumDense):
            # It takes the fans of its equation, and not those of a convolution's kernel.
            shape = weight.layout.canonical_shape(shape)[2:]
        *taps, rows, columns = shape
        window = math.prod(taps)
        fans = {"fan_in": rows * window, "fan_out": columns * window}
        fan = fans.get(usual.mode, sum(fans.values()) / 2)
        return float(usual.scale) / max(1.0, fan)
    if isinstance(usual, keras.initializers.RandomNormal):
        return float(usual.mean**2 + usual.stddev**2)
    if isinstance(usual, keras.initializers.RandomUniform):
        low, high = usual.minval, usual.maxval
        return float(low**2 + low * high + high**2) / 3
    drawn = to_numpy(usual(weight.shape, dtype="float32"))
    mean = float(np.mean(np.square(drawn, dtype=np.float64)))
    if not (math.isfinite(mean) and mean > 0):
        raise ValueError(
            f"The weight '{weight.path}' has no gain='auto': its layer's initializer gives no norm "
            f"to keep. Received: initializer={usual!r}, mean square {mean}"
        )
    return mean
