"""User code that makes a network sparse, with this package and with others: alternatives.py."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

# `start` makes a dense model sparse, and returns the callbacks; `end` makes it plain again. The
# table counts the lines of their bodies.


def nothing(model: Any, density: float, steps: int) -> tuple[Any, list]:
    return model, []


def as_it_is(model: Any) -> Any:
    return model


def tfmot_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import tensorflow_model_optimization as tfmot

    # TFMOT prunes at begin + k frequency: the last of these must be the end, or it ends too dense.
    begin, frequency = steps // 10, max(1, steps // 100)
    schedule = tfmot.sparsity.keras.PolynomialDecay(
        0.0, 1 - density, begin, begin + steps * 6 // 10 // frequency * frequency, 3, frequency
    )
    model = tfmot.sparsity.keras.prune_low_magnitude(model, pruning_schedule=schedule)
    return model, [tfmot.sparsity.keras.UpdatePruningStep()]


def tfmot_end(model: Any) -> Any:
    import tensorflow_model_optimization as tfmot

    return tfmot.sparsity.keras.strip_pruning(model)


def by_budget_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import tensorflow_model_optimization as tfmot

    import keras_sparse_ortho as kso

    # TFMOT prunes at begin + k frequency: the last of these must be the end, or it ends too dense.
    begin, frequency = steps // 10, max(1, steps // 100)
    schedule = tfmot.sparsity.keras.PolynomialDecay(
        0.0, 1 - density, begin, begin + steps * 6 // 10 // frequency * frequency, 3, frequency
    )
    model = kso.tfmot.prune_by_budget(model, density, "erk", schedule)
    return model, [tfmot.sparsity.keras.UpdatePruningStep()]


def by_hand_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import keras

    class Masked(keras.constraints.Constraint):
        def __init__(self, mask):
            self.mask = keras.ops.convert_to_tensor(mask, "float32")

        def __call__(self, weight):
            return weight * self.mask

    rng = np.random.default_rng(0)
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dense):
            mask = rng.random(layer.kernel.shape) < density
            layer.kernel.assign(layer.kernel * mask)
            layer.kernel.constraint = Masked(mask)
    return model, []


def random_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import keras_sparse_ortho as kso

    return kso.sparsify(model, density, initializer="random_sparse", seed=0), []


def eoi_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import keras_sparse_ortho as kso

    return kso.sparsify(model, density, seed=0), []


def gmp_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import keras_sparse_ortho as kso

    schedule = kso.schedules.Cubic(begin_step=0.1, end_step=0.7)
    model = kso.parametrize(model, kso.MagnitudeMask(schedule), density, "erk")
    return model, [kso.callbacks.UpdateMasks()]


def str_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    import keras_sparse_ortho as kso

    model = kso.parametrize(model, kso.SoftThreshold)
    return model, [kso.callbacks.TargetDensity(density)]


def ours_end(model: Any) -> Any:
    import keras_sparse_ortho as kso

    return kso.strip(model)


def torch_start(model: Any, density: float, steps: int) -> tuple[Any, list]:
    # Dense for half of the run, then all layers at once by magnitude, with fixed masks.
    import torch
    from torch.nn.utils import prune

    def cut(step):
        if step == steps // 2:
            kernels = [(m, "weight") for m in model if isinstance(m, torch.nn.Linear)]
            prune.global_unstructured(kernels, prune.L1Unstructured, amount=1 - density)

    return model, [cut]


def torch_end(model: Any) -> Any:
    import torch
    from torch.nn.utils import prune

    for module in model:
        if isinstance(module, torch.nn.Linear):
            prune.remove(module, "weight")
    return model


USED: dict[str, tuple[str, Callable, Callable, str]] = {
    "dense_tf_keras": ("tf_keras", nothing, as_it_is, "the network itself"),
    "tfmot": ("tf_keras", tfmot_start, tfmot_end, "TFMOT, one sparsity for every layer"),
    "tfmot_budget": ("tf_keras", by_budget_start, tfmot_end, "TFMOT under a budget of ours"),
    "dense_keras": ("keras", nothing, as_it_is, "the network itself"),
    "by_hand": ("keras", by_hand_start, as_it_is, "random mask, a Keras constraint"),
    "random": ("keras", random_start, ours_end, "ours: random mask"),
    "eoi": ("keras", eoi_start, ours_end, "ours: exactly orthogonal"),
    "gmp": ("keras", gmp_start, ours_end, "ours: gradual magnitude pruning"),
    "str": ("keras", str_start, ours_end, "ours: learnt thresholds"),
    "dense_torch": ("torch", nothing, as_it_is, "the network itself"),
    "torch_prune": ("torch", torch_start, torch_end, "torch.nn.utils.prune, at half the run"),
}
"""Library, user code before and after training, and a description."""


def lines_of(*functions: Callable) -> int:
    """Lines of the bodies, without imports, comments, empty lines and returns."""
    count = 0
    for function in functions:
        if function in (nothing, as_it_is):
            continue
        for line in inspect.getsource(function).splitlines()[1:]:
            words = line.split()
            idle = not words or words[0] in ("import", "from") or words[0].startswith("#")
            count += not idle and line.strip() not in ("return model", "return model, []")
    return count
