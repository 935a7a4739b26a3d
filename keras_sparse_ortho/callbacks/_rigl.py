"""`RigL`: grow where the gradient is largest."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checked_data import check_batches
from keras_sparse_ortho._checks import as_text, is_integer, other_keywords
from keras_sparse_ortho._data import Batch, BatchSource, samples
from keras_sparse_ortho._foreign_names import step_for
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.callbacks._dynamic_sparse_training import (
    DynamicSparseTraining,
)
from keras_sparse_ortho.kernels import DenseGradient, PrunableWeight, Selection
from keras_sparse_ortho.models import StatelessLoss

_FUNCTIONS = ("torch.nn.functional", "optax")
"""Modules of functions that take predictions before labels."""


class RigL(DynamicSparseTraining):
    """Rigged lottery (RigL): small weights drop, as many grow where the gradient is largest.

    As `SET`, but the dead entries with the largest `|dL/dw_e|` become live: the gradient of the
    dense kernel before the drop, for one extra batch, in training mode, with regularization. Blocks
    move to the largest sum of scores that keeps all fans. Several processes use the mean over all
    their batches. No seeds or moving averages change.

    Args:
        data: Source of extra batches, as `fit` takes it: arrays, `x`, `(x, y)` or `(x, y,
            sample_weight)`, from which `batch_size` samples are drawn; a `keras.utils.PyDataset`;
            or an iterable of batches that can start again: a list, a `tf.data.Dataset`, a torch
            `DataLoader`, or a function that returns a generator. The n-th update takes the n-th.
        batch_size: int. Samples to draw from arrays; that of `fit` is a good choice.
        frequency, fraction, end_step, include, exclude: As for `SET`.
        seed: int. For drawing samples, and among equal entries.
        loss: The loss of a custom training loop: a Keras loss or its name, a function `loss(y_true,
            y_pred)`, or a loss of `torch.nn` or optax, which takes predictions first; losses of
            `add_loss` and regularizers are added. Default: the loss of `compile`.

    Raises ValueError as `SET`, for a generator, which cannot start again, and without targets or
    loss.

    Limits: those of `SET`. A data set that shuffles itself gives other masks in a resumed run.
    `class_weight` of `fit` is ignored: pass sample weights. A gradient that is not finite skips the
    update, with a warning.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, use_bias=False)])
        >>> model = kso.sparsify(dense, 0.25, seed=0)
        >>> model.compile("adam", "mse")
        >>> x, y = np.random.default_rng(0).normal(size=(2, 8, 8))
        >>> callback = kso.callbacks.RigL((x, y), batch_size=4, frequency=2, end_step=100)
        >>> history = model.fit(x, y, batch_size=2, verbose=0, callbacks=[callback])
        >>> kso.prunable_weights(model)[0].live
        16

    Reference: Evci et al., "Rigging the lottery: making all tickets winners" (ICML 2020), arXiv
    1911.11134
    """

    @other_keywords
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
        loss: Any = None,
    ) -> None:
        super().__init__(frequency, fraction, end_step, include, exclude, seed)
        self._objective = None if loss is None else _objective(loss)
        if not is_integer(batch_size):
            raise ValueError(
                "`batch_size` must be a positive integer. "
                f"Use {step_for('RigL(...)')}. Received: batch_size={as_text(batch_size)}"
            )
        self._source = BatchSource(data, batch_size, self.seed)
        self._kernels: list[DenseGradient] = []
        self._loss: StatelessLoss | None = None
        self._made_for: list[Any] = []

    def prepare(self) -> None:
        """Compiles the gradient of the dense kernels, unless it is compiled already."""
        super().prepare()
        held_by = [
            weight.parametrization or weight.owner for weight in self._weights
        ]
        variables = [weight.variable for weight in self._weights]
        # Kept for the next `fit` until the model is compiled again, like Keras' own step.
        step = getattr(self._watched, "train_function", None)
        belongs_to = [self._watched, step, *held_by, *variables]
        if step is not None and [*map(id, belongs_to)] == [
            *map(id, self._made_for)
        ]:
            return
        storages: list[Any] = [weight.storage for weight in self._weights]
        self._kernels = [storage.dense_gradient() for storage in storages]
        self._loss = StatelessLoss(
            self._watched,
            [
                variable
                for kernel in self._kernels
                for variable in kernel.variables
            ],
            held=[pair for kernel in self._kernels for pair in kernel.replaced],
            objective=self._objective,
        )
        self._made_for = belongs_to

    def _checked_batch(self, number: int) -> Batch:
        batch = self._source.batch(number)
        check_batches(self._watched, [batch])
        return batch

    def growth_scores(
        self, weights: Sequence[PrunableWeight], step: int
    ) -> list[Any]:
        """The magnitudes of the dense gradient on one batch, the mean of all workers."""
        # The other workers would wait for the gradient of one that failed.
        number = step // self._every - 1
        batch = self.workers.together(lambda: self._checked_batch(number))
        shared = self.workers.batch(batch)

        def gradients() -> list[np.ndarray]:
            assert self._loss is not None
            values = [
                value for kernel in self._kernels for value in kernel.values()
            ]
            return [to_numpy(g) for g in self._loss.gradients(values, *shared)]

        all_gradients = iter(
            self.workers.mean(self.workers.together(gradients), samples(batch))
        )
        storages: list[Any] = [weight.storage for weight in weights]
        return [
            storage.place_sums(
                kernel.collect(*(next(all_gradients) for _ in kernel.variables))
            )
            for storage, kernel in zip(storages, self._kernels, strict=True)
        ]


def _objective(loss: Any) -> Callable[..., Any]:
    """The function of a model and a batch whose gradient grows entries."""
    function = keras.losses.get(loss) if isinstance(loss, str | dict) else loss
    if not callable(function):
        raise ValueError(
            "`loss` must be a Keras loss or its name, a function of (y_true, y_pred), or a loss of "
            f"torch.nn or optax. Received: {loss=}"
        )
    predictions_first = _takes_predictions_first(function)

    def objective(
        model: keras.Model,
        x: Tensor,
        y: Any,
        sample_weight: Any,
        training: bool,
    ) -> Any:
        """The mean loss of one batch."""
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
        elif predictions_first:
            values = _called(
                function, "(y_pred, y_true)", y_pred, _labels_for(y, y_pred)
            )
        else:
            values = _called(function, "(y_true, y_pred)", y, y_pred)
        return keras.ops.mean(values) + sum(model.losses)

    return objective


def _takes_predictions_first(function: Callable[..., Any]) -> bool:
    """Whether a loss is one of torch or optax, which take predictions before labels."""
    while isinstance(function, functools.partial):
        function = function.func
    modules = [kind.__module__ for kind in type(function).__mro__]
    modules.append(getattr(inspect.unwrap(function), "__module__", None) or "")
    return any(
        module.startswith(("torch.nn.modules.loss", *_FUNCTIONS))
        for module in modules
    )


def _labels_for(y: Any, y_pred: Tensor) -> Any:
    """Integer labels as losses of torch want them: int64 for classes, floats for each output."""
    if keras.backend.backend() != "torch" or keras.backend.is_float_dtype(
        y.dtype
    ):
        return y
    dtype = y_pred.dtype if y.shape == y_pred.shape else "int64"
    return keras.ops.cast(y, dtype)


def _called(function: Callable[..., Any], order: str, *arguments: Any) -> Any:
    """The values of a loss; ValueError with the order of its arguments if it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        kinds = [
            f"{keras.backend.standardize_dtype(array.dtype)} {tuple(array.shape)}"
            for array in arguments
        ]
        raise ValueError(
            f"RigL calls its `loss` as loss{order}, and it raised an error: give it labels as it "
            "needs them, or a function of (y_true, y_pred) that converts them. Received: "
            f"loss={function!r}, {order} of {' and '.join(kinds)}, "
            f"{type(error).__name__}: {error}"
        ) from error
