"""`RigL`: grow where the gradient is largest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_sparse_ortho._checks import check_integer
from keras_sparse_ortho._data import Batch, BatchSource, samples
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho._workers import Workers
from keras_sparse_ortho.callbacks._dynamic_sparse_training import (
    DynamicSparseTraining,
    moves_on_device,
)
from keras_sparse_ortho.kernels import PrunableWeight, Selection
from keras_sparse_ortho.models import StatelessLoss


class RigL(DynamicSparseTraining):
    """Rigged lottery (RigL): small weights drop, as many grow where the gradient is largest.

    As `SET`, but of the entries that are dead after the drop, those with the largest `|dL/dw_e|`
    become live: the gradient of the dense kernel at the weights before the drop, for one extra
    batch, or the mean over several. As in the paper's algorithm, entries that were just dropped are
    among them; one that grows again is as if it had stayed, with its weight and moments.

    With live blocks `|dL/dw_e|` and `|w_e|` are summed over each block. The dense kernel exists for
    the extra batches only. Every line of blocks keeps its fan; of the moves that allow it, one with
    the largest sum of scores is taken.

    The gradient is of the loss that the model was compiled with, in training mode, with
    regularization. If several processes train the model it is that of the mean loss over the
    batches of all of them, so that each may have its own data (docs/scale.md). Only masks, weights
    and moments change, no seeds or moving averages. The other arguments are those of `SET`.

    Args:
        data: Where extra batches come from, as `fit` takes it: arrays, `x`, `(x, y)` or
            `(x, y, sample_weight)`, each an array or a list or dict of arrays, from which
            `batch_size` samples are drawn; a `keras.utils.PyDataset`; or an iterable of batches
            that can start again: a list, a `tf.data.Dataset`, a torch `DataLoader`, or a function
            that returns a generator. The n-th update takes the n-th batch, or the n-th `batches`.
        batch_size: How many samples to draw from arrays; that of `fit` is a good choice.
        seed: An integer, for drawing samples, and among equal entries.
        batches: Over how many extra batches the gradient is averaged. Each costs a gradient of the
            dense kernels in every update.
        loss: The loss of a custom training loop: a Keras loss or its name, a function
            `loss(y_true, y_pred)`, or a loss of `torch.nn`. What `add_loss` and regularizers add is
            part of it. Default: the loss of `compile`.

    Raises:
        NotPrunableError, WorkerError: As `SET`.
        ValueError: Other data, such as a generator, which cannot start again, or data without
            targets; an argument out of range; no `end_step` where an epoch's length is not known;
            no loss.

    Limits: those of `SET`, but an update that is repeated after a skipped step may move entries
    once more, as its gradients are those of other masks. A data set that shuffles itself gives
    other batches, and so other masks, when a run is resumed. `class_weight` of `fit` is not seen:
    pass sample weights. With a gradient that is not finite the update is skipped, with a warning.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, use_bias=False)])
    >>> model = kso.sparsify(dense, 0.25, seed=0)
    >>> model.compile("adam", "mse")
    >>> x, y = np.random.default_rng(0).normal(size=(2, 8, 8))
    >>> callback = kso.callbacks.RigL((x, y), batch_size=4, frequency=2, end_step=100)
    >>> history = model.fit(x, y, batch_size=2, verbose=0, callbacks=[callback])
    >>> kso.prunable_weights(model)[0].live
    16

    References:

    - Evci et al., "Rigging the lottery: making all tickets winners" (ICML 2020), arXiv 1911.11134
    """

    def __init__(
        self,
        data: Any,
        batch_size: int = 128,
        frequency: int | None = None,
        fraction: float = 0.3,
        end_step: int | None = None,
        include: Selection = None,
        exclude: Selection = None,
        seed: int = 0,
        batches: int = 1,
        loss: Any = None,
        warm_moments: bool = False,
    ) -> None:
        super().__init__(frequency, fraction, end_step, include, exclude, seed, warm_moments)
        self.batches = check_integer("batches", batches)
        self._objective = None if loss is None else _objective(loss)
        self._source = BatchSource(data, batch_size, self.seed)
        self._gradients: DenseGradients | None = None
        self._made_for: list[Any] = []

    def prepare(self) -> None:
        """Finds the weights, and makes the function of their gradients."""
        super().prepare()
        held_by = [weight.parametrization or weight.owner for weight in self._weights]
        variables = [weight.variable for weight in self._weights]
        # Kept for the next `fit` until the model is compiled again, as Keras keeps its own step.
        step = getattr(self._watched, "train_function", None)
        belongs_to = [self._watched, step, *held_by, *variables]
        pairs = itertools.zip_longest(belongs_to, self._made_for)
        if step is not None and all(one is other for one, other in pairs):
            return
        self._gradients = DenseGradients(self._watched, self._weights, self._objective)
        self._made_for = belongs_to

    def growth_scores(self, weights: Sequence[PrunableWeight], step: int) -> list[Any]:
        """Magnitudes of the dense gradient, summed over each block where blocks are stored."""
        first = (step // self._every - 1) * self.batches
        gradients = self._gradient(first)
        for number in range(first + 1, first + self.batches):  # the sum ranks as the mean does
            pairs = zip(gradients, self._gradient(number), strict=True)
            gradients = [one + other for one, other in pairs]
        return [
            weight.storage.place_sums(gradient)
            for weight, gradient in zip(weights, gradients, strict=True)
            if weight.storage is not None
        ]

    def settings(self) -> dict[str, Any]:
        """Those of `SET`, and how many batches an update takes."""
        return {**super().settings(), "batches": self.batches}

    def _gradient(self, number: int) -> list[Any]:
        """The dense gradients for one extra batch."""
        assert self._gradients is not None
        # The other workers would wait for the gradient of one that failed.
        batch = self.workers.together(lambda: self._source.batch(number))
        return self._gradients(batch, self.workers)


class DenseGradients:
    """The dense gradient `dL/dw_e` of weights, by `dense_gradient` of their storages."""

    def __init__(
        self,
        model: Any,
        weights: Sequence[PrunableWeight],
        objective: Callable[..., Any] | None = None,
    ) -> None:
        self._kernels = [w.storage.dense_gradient() for w in weights if w.storage is not None]
        self._stay = [
            moves_on_device(weight)
            for weight, kernel in zip(weights, self._kernels, strict=True)
            for _ in kernel.variables
        ]
        self._loss = StatelessLoss(
            model,
            [variable for kernel in self._kernels for variable in kernel.variables],
            held=[pair for kernel in self._kernels for pair in kernel.held],
            objective=objective,
        )

    def __call__(self, batch: Batch, workers: Workers) -> list[Any]:
        """The gradient of the mean loss over the batches of all workers, of which this is one.

        It is a tensor for weights that are ranked on a device, unless workers exchange it.
        """
        shared = workers.batch(batch)

        def gradients() -> list[Any]:
            values = [value for kernel in self._kernels for value in kernel.values()]
            found = self._loss.gradient_tensors(values, *shared)
            if workers.averages:
                return [to_numpy(gradient) for gradient in found]
            pairs = zip(found, self._stay, strict=True)
            return [gradient if here else to_numpy(gradient) for gradient, here in pairs]

        found = iter(workers.mean(workers.together(gradients), samples(batch)))
        return [
            kernel.collect(*(next(found) for _ in kernel.variables)) for kernel in self._kernels
        ]


def _objective(loss: Any) -> Callable[..., Any]:
    """A loss on outputs as an objective of `StatelessLoss`."""
    function = keras.losses.get(loss) if isinstance(loss, str | dict) else loss
    if not callable(function):
        raise ValueError(
            "`loss` must be a Keras loss or its name, a function of (y_true, y_pred), or a loss of "
            f"torch.nn. Received: loss={loss!r}"
        )
    inputs_first = type(function).__module__.startswith("torch.nn.")

    def objective(model: Any, x: Any, y: Any, sample_weight: Any, training: bool) -> Any:
        if y is None:
            raise ValueError(
                "`loss` compares outputs with labels: give `data` as `(x, y)`, or batches of it. "
                f"Received: y=None, loss={loss!r}"
            )
        y_pred = model(x, training=training)
        if isinstance(function, keras.losses.Loss):
            values = function(y, y_pred, sample_weight)
        elif sample_weight is not None:
            raise ValueError(
                "Sample weights need a loss that takes them: an object of keras.losses. "
                f"Received: sample weights, loss={loss!r}"
            )
        else:
            values = function(y_pred, y) if inputs_first else function(y, y_pred)
        return keras.ops.mean(values) + sum(model.losses)

    return objective
