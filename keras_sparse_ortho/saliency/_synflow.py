"""`synflow`: pruning without data, by conserved synaptic saliency."""

from typing import Any

import numpy as np

from keras_sparse_ortho._checks import check_density, check_integer
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import Selection
from keras_sparse_ortho.orthogonal import largest_masks, live_count
from keras_sparse_ortho.saliency._derivatives import progress_bar
from keras_sparse_ortho.saliency._linear_network import SynapticFlow
from keras_sparse_ortho.saliency._saliency import Saliency, scored_weights


def synflow(
    model: Any,
    density: float,
    *,
    rounds: int = 100,
    dtype: str = "float64",
    input_shape: Any = None,
    jit_compile: bool = False,
    include: Selection = None,
    exclude: Selection = None,
    on_collapse: str = "error",
    verbose: int = 0,
) -> Saliency:
    """Score `|w| * dR/d|w|` with `R = 1^T (prod |W_l|) 1`, pruned in many rounds, without data.

    In round `k` of `n` the `round(density^(k / n) * size)` highest scores of what is still live
    stay, and `R` is that of the masked network. `R` is the sum of outputs of the network for one
    input of ones, made linear and positive:

    - kernels, biases and all other float variables by their absolute value;
    - batch normalization as in inference, with `|gamma|`, `|beta|`, its moving variance, and mean 0
      (which the mean of a fresh network is; the reference subtracts its absolute value);
    - activations are the identity. For ReLU that is what the reference computes, since nothing is
      negative; a softmax or tanh would make the gradient vanish;
    - layer, group and RMS normalization keep scale and offset only; an Embedding is multiplied by
      ones, not by one-hot vectors; Rescaling and Normalization of data are left out.

    The model is not changed, but its layers are patched while the function runs: do not use it
    from another thread meanwhile.

    Args:
        model: A built Keras model: Sequential, functional, nested, or written as a class. It needs
            no loss.
        density: Global live fraction over the selected weights, in (0, 1].
        rounds: Number of rounds.
        dtype: `"float64"`, or `"float32"`, which is faster, but `R` of a deep network overflows it.
        input_shape: Shape of one sample, where the model does not know it.
        jit_compile: Whether TensorFlow compiles with XLA, which takes long and pays on GPUs.
        include: Which weights: paths, layers, regular expressions or a predicate. Default: all.
        exclude: Which weights not.
        on_collapse: `"error"`, `"warn"` or `"ignore"` if a weight is left without live entries.
        verbose: 1 for a progress bar over rounds.

    Returns:
        A `Saliency` whose scores are those of the last round. What was dead before it has negative
        ones: the earlier it died, the lower, and among equals in the order of that round.

    Raises:
        BudgetError: Layer collapse, if `on_collapse="error"`.
        NotPrunableError: An `R` that over- or underflows, weights that are wrapped or not finite.

    Limits: recurrent gates and attention weights are no linear network and stay as they are: query
    and key kernels get scores of 0 and should be excluded. Functions that a model calls as
    operations, not as layers or `activation=`, stay too. One round takes one forward and backward
    pass of one sample.

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
    >>> model.layers[0].set_weights([np.array([[1.0], [-3.0]]), np.zeros(1)])
    >>> synflow(model, 0.5, rounds=1).scores["a/kernel"].tolist()
    [[1.0], [3.0]]

    Reference:

    - Tanaka, Kunin, Yamins and Ganguli, "Pruning neural networks without any data by iteratively
      conserving synaptic flow" (NeurIPS 2020), arXiv 2006.05467
    """
    check_density(density)
    if dtype not in ("float32", "float64"):
        raise ValueError(f'`dtype` must be "float32" or "float64". Received: dtype={dtype!r}')
    check_integer("rounds", rounds)
    weights = scored_weights(model, include, exclude, on_collapse)
    size = sum(weight.size for weight in weights)
    values = [np.abs(weight.raw_value()).astype(dtype) for weight in weights]
    masks = [np.ones(weight.shape, dtype=bool) for weight in weights]
    scores = values
    progress = progress_bar(rounds, verbose)
    variables = [weight.variable for weight in weights]
    with SynapticFlow(model, variables, dtype, input_shape, jit_compile) as flow:
        for number in range(1, rounds + 1):
            total, gradients = flow.gradient(values)
            _check_flow(total, gradients, dtype, number)
            scores = [
                np.where(mask, value * gradient, dead)
                for mask, value, gradient, dead in zip(
                    masks, values, gradients, scores, strict=True
                )
            ]
            before = masks
            masks = largest_masks(scores, live_count(density ** (number / rounds), size))
            if number < rounds:
                _rank_dead(scores, before, masks, number - rounds)
            values = [value * mask for value, mask in zip(values, masks, strict=True)]
            progress.add(1)
    return Saliency("SynFlow", density, weights, scores, on_collapse, masks)


def _rank_dead(
    scores: list[np.ndarray], before: list[np.ndarray], after: list[np.ndarray], level: int
) -> None:
    """Moves the scores of what dies between two masks to [level, level + 1/2], in their order.

    With a negative level they are below all that live, so that what is dead never comes back.
    """
    highest = max(float(score.max()) for score in scores) or 1.0
    for score, old, new in zip(scores, before, after, strict=True):
        dying = np.nonzero(old & ~new)
        score[dying] = level + score[dying] / (2 * highest)


def _check_flow(total: float, gradients: list[np.ndarray], dtype: str, number: int) -> None:
    finite = np.isfinite(total) and all(np.isfinite(gradient).all() for gradient in gradients)
    if finite and total > 0:
        return
    hint = 'Use dtype="float64". ' if dtype == "float32" else ""
    raise NotPrunableError(
        f"The synaptic flow R of the model over- or underflows {dtype}, or nothing passes the "
        f"network. {hint}Received: R={total} in round {number}"
    )
