"""`gain="auto"`: chosen for each kernel by the layers behind its own."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.initializers import (
    AnyDraw,
    ExactOrthogonal,
    SparseInitializer,
    activation_gain,
    layout_for,
    mirrored_gain,
)
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import Mirrored, least_count
from keras_sparse_ortho.pruning._following import (
    IDENTITY,
    Activation,
    Following,
    WhatFollows,
)


class AutoGains:
    """Chooses gains by the operations behind the layers of weights."""

    def __init__(self, model: Any, weights: list[PrunableWeight]) -> None:
        self._model = model
        self._weights = weights
        self._gains: dict[tuple[int, float, bool], float] = {}

    @functools.cached_property
    def _following(self) -> dict[str, Following]:
        behind = WhatFollows(self._model)
        return {
            weight.path: behind.layer(weight.owner) for weight in self._weights
        }

    def before_normalization(
        self, patterns: dict[str, SparseInitializer], by_name: bool
    ) -> dict[str, ExactOrthogonal]:
        """Patterns of kernels before normalization, with the gain "auto"."""
        normalized = {}
        for weight in self._weights:
            pattern = patterns[weight.path]
            if not isinstance(pattern, ExactOrthogonal):
                continue
            is_auto = pattern.gain == "auto"
            if (
                not (by_name or is_auto)
                or not self._following[weight.path].normalized
            ):
                continue
            if is_auto or _is_norm(_mean_square(weight)):
                taps = pattern.taps
                if not taps and pattern.structure is None:
                    taps = "all"
                normalized[weight.path] = pattern.but_with(
                    gain="auto", taps=taps
                )
        return normalized

    def with_gain(
        self, weight: PrunableWeight, pattern: ExactOrthogonal, live: int
    ) -> SparseInitializer:
        """The pattern with the `default_gain`, or that of the activation behind it."""
        if isinstance(self._model, list):
            raise ValueError(
                'gain="auto" needs a model, to find what follows a layer: give a number. '
                f"Received: initializer={pattern!r}"
            )
        following = self._following[weight.path]
        if following.normalized:
            return pattern.but_with(gain=default_gain(weight, pattern, live))
        is_mirrored = pattern.mirrored in (True, "outputs")
        gains = [
            self._gain(weight, activation, is_mirrored)
            for activation in following.activations
        ]
        if not gains:
            gains = [1.0]
        if max(gains) - min(gains) > 1e-6:
            raise ValueError(
                f"The output of {weight.path!r} goes to activations that need different gains. "
                'Give it a number, in a call of its own with `include`. Received: gain="auto", '
                f"gains {sorted({round(gain, 4) for gain in gains})}"
            )
        return pattern.but_with(gain=gains[0])

    def warn_of_guesses(
        self, draws: Mapping[str, AnyDraw], auto: set[str]
    ) -> None:
        """Warns of `auto` gains that rely on their layer's own activation alone."""
        lines = []
        for path, kernel_draw in draws.items():
            if path not in auto:
                continue
            reason = self._following[path].unknown
            if reason is not None:
                assert isinstance(kernel_draw.initializer, ExactOrthogonal)
                lines.append(
                    f"{path!r} ({reason}): gain={kernel_draw.initializer.gain:.6g}"
                )
        if lines:
            warn_user(
                "It is not known what follows these layers, so gains were chosen by their own "
                "activations, or as before normalization where the calls are not known and the "
                "model normalizes. To set them, make these kernels sparse in a call of their own "
                f"with `include`. Received: {'; '.join(lines)}"
            )

    def _gain(
        self,
        weight: PrunableWeight,
        activation: Activation,
        is_mirrored: bool,
    ) -> float:
        """The gain of a kernel before an activation, also for mirrored outputs `(u, -u)`."""
        if activation is IDENTITY and not is_mirrored:
            return 1.0
        bias = getattr(weight.owner, "bias_initializer", None)
        bias_std = 0.0
        if (
            isinstance(bias, keras.initializers.RandomNormal)
            and weight.owner.bias is not None
        ):
            bias_std = float(bias.stddev)
        key = (id(activation), bias_std, is_mirrored)
        if key not in self._gains:
            try:
                if is_mirrored:
                    gain = mirrored_gain(activation, bias_std)
                else:
                    gain = activation_gain(activation, bias_std)
            except ValueError as error:
                raise ValueError(
                    f"gain='auto' is not possible for the weight {weight.path!r}: {error}"
                ) from None
            self._gains[key] = gain
        return self._gains[key]


def default_gain(
    weight: PrunableWeight, pattern: ExactOrthogonal, live: int
) -> float:
    """The gain that gives a kernel the expected norm of its default one under the same mask.

    With the squared norm `n` at gain 1, which is the number of singular values, and the mean square
    `v` of the layer's own initializer, `gain^2 n = live v`: for Glorot's
    `gain^2 = 2 density in out / ((in + out) n)`.
    """
    layout = layout_for(weight, pattern)
    squared_norm: float = least_count(
        weight.shape, layout, pattern.taps or "center"
    )
    structure = pattern.drawn_structure
    if isinstance(structure, Mirrored):
        canonical_shape = layout.canonical_shape(weight.shape)
        squared_norm = structure.squared_norm(canonical_shape)
    mean_square = _mean_square(weight)
    if not _is_norm(mean_square):
        raise ValueError(
            f"gain='auto' is not possible for the weight {weight.path!r}: its layer's initializer "
            f"gives no norm to keep. Received: initializer={default_initializer(weight)!r}, "
            f"mean square {mean_square}"
        )
    return math.sqrt(live * mean_square / squared_norm)


def default_initializer(
    weight: PrunableWeight,
) -> keras.initializers.Initializer:
    """The initializer of a kernel's layer, or Keras' default in place of a sparse one."""
    initializer = weight.initializer
    if initializer is None or isinstance(initializer, SparseInitializer):
        return keras.initializers.GlorotUniform(seed=0)
    return initializer


def _mean_square(weight: PrunableWeight) -> float:
    """The mean square of the default initializer: from its variance, if known, or from a draw."""
    default = default_initializer(weight)
    if isinstance(default, keras.initializers.VarianceScaling):
        shape: tuple[int, ...] = weight.shape
        kinds = {kind.__name__ for kind in type(weight.owner).__mro__}
        if weight.layout is not None and "EinsumDense" in kinds:
            # Its fans are those of the equation, not of a convolution's kernel.
            shape = weight.layout.canonical_shape(shape)[2:]
        *taps, rows, columns = shape
        window = math.prod(taps)
        fan_in = rows * window
        fan_out = columns * window
        fans = {"fan_in": fan_in, "fan_out": fan_out}
        fan = fans.get(default.mode, (fan_in + fan_out) / 2)
        return float(default.scale) / max(1.0, fan)
    if isinstance(default, keras.initializers.RandomNormal):
        return float(default.mean**2 + default.stddev**2)
    if isinstance(default, keras.initializers.RandomUniform):
        low = default.minval
        high = default.maxval
        return float(low**2 + low * high + high**2) / 3
    kernel = to_numpy(default(weight.shape, dtype="float32"))
    squares = np.square(kernel, dtype=np.float64)
    return float(np.mean(squares))


def _is_norm(mean_square: float) -> bool:
    return math.isfinite(mean_square) and mean_square > 0
