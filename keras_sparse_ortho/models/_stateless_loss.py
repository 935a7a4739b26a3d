"""`StatelessLoss`: the loss of a model as a pure function of some of its variables."""

import functools
from collections.abc import Callable, Iterable, Sequence

import keras
import numpy as np

from keras_sparse_ortho._backend import (
    ScalarFunction,
    compiled,
    value_and_gradients,
)
from keras_sparse_ortho._keras_internals import compiled_loss_waits
from keras_sparse_ortho._types import Nested, Tensor, TensorLike
from keras_sparse_ortho._values import placed, to_numpy
from keras_sparse_ortho.models._prunable_weights import check_built

Objective = Callable[[keras.Model, Nested, Nested, Nested, bool], Tensor]
"""`objective(model, x, y, sample_weight, training)`, a scalar tensor."""


GradientFunction = Callable[..., list[Tensor]]
"""`(values, x, y, sample_weight, scale)` -> the gradients of the values."""


def compiled_loss(
    model: keras.Model,
    x: Nested,
    y: Nested,
    sample_weight: Nested,
    training: bool,
) -> Tensor:
    """The loss that `fit` minimises: the one of `compile`, `add_loss`, and regularization."""
    check_labels(model, y)
    y_pred = model(x, training=training)
    return model.compute_loss(
        x=x,
        y=y,
        y_pred=y_pred,
        sample_weight=sample_weight,
        training=training,
    )


def check_labels(model: keras.Model, y: Nested) -> None:
    """Raises ValueError for a batch without labels where the compiled loss needs some."""
    losses = keras.tree.flatten(getattr(model, "loss", None))
    has_loss = any(loss is not None for loss in losses)
    has_labels = any(label is not None for label in keras.tree.flatten(y))
    overrides_loss = type(model).compute_loss is not keras.Model.compute_loss
    # One of its own may need none.
    if has_loss and not has_labels and not overrides_loss:
        raise ValueError(
            "The loss that the model was compiled with compares outputs with labels: give `data` "
            "as `(x, y)`, batches of a data set as well, or an `objective` that needs no labels. "
            f"Received: y=None, loss={model.loss!r}"
        )


class StatelessLoss:
    """`L(values; x, y, sample_weight)`: a model's loss where some variables have given values.

    Updates are forgotten, so two calls draw the same dropout.

    Args:
        model: Model. Compiled, unless there is an `objective`.
        variables: Variables that get other values.
        held: Pairs of variables and values for every call, such as masks set to all `True`.
        objective: `Objective`, by default the loss of `fit`. On JAX it may read variables of the
            model only.
    """

    def __init__(
        self,
        model: keras.Model,
        variables: Sequence[keras.Variable],
        *,
        held: Iterable[tuple[keras.Variable, TensorLike]] = (),
        objective: Objective | None = None,
    ) -> None:
        check_built(model)
        if objective is None:
            if not getattr(model, "compiled", False):
                raise ValueError(
                    "There is no loss before the model is compiled: call `compile(loss=...)`, or "
                    f"give an `objective`. Received: the model {model.name!r}, not compiled"
                )
            objective = compiled_loss
        self.model = model
        self.variables = list(variables)
        self._constants = list(held)
        self._objective = objective
        self._waits = True

    def gradients(
        self,
        values: Sequence[TensorLike] | None,
        x: Nested,
        y: Nested = None,
        sample_weight: Nested = None,
    ) -> list[Tensor]:
        """The gradients as tensors, compiled, in the order of the variables.

        They are computed from a loss that is scaled like the optimizer's (mixed_float16), while
        small ones could underflow.

        Args:
            values: An array for each variable; `None` stands for those they have.
            x: Inputs of a batch.
            y: Its labels.
            sample_weight: Its sample weights.
        """
        scale = np.float32(1)
        optimizer = getattr(self.model, "optimizer", None)
        if self._objective is compiled_loss and optimizer is not None:
            scaled_one = optimizer.scale_loss(keras.ops.ones(()))
            scale = np.float32(to_numpy(scaled_one))
        gradients = self._gradients(values, x, y, sample_weight, scale)
        if scale == 1:
            return gradients
        return [
            keras.ops.cast(gradient, "float32") / float(scale)
            for gradient in gradients
        ]

    @functools.cached_property
    def _gradients(self) -> GradientFunction:
        def function(
            loss: ScalarFunction, values: list[Tensor], scale: Tensor
        ) -> list[Tensor]:
            def scaled(inner_values: list[Tensor]) -> Tensor:
                value = loss(inner_values)
                return value * keras.ops.cast(scale, value.dtype)

            _, gradients = value_and_gradients(scaled, values)
            return gradients

        return self.compiled(function)

    def compiled(
        self, function: Callable[..., Nested]
    ) -> Callable[..., Nested]:
        """Compiles `function(loss, values, *extra)`, where `loss(values)` has batch and state.

        Returns `run(values, x, y=None, sample_weight=None, *extra)`, of the same tensors; `extra`
        are arrays or lists of arrays.
        """

        def step(
            values: list[Tensor],
            constants: list[Tensor],
            state: list[Tensor] | None,
            batch: Nested,
            extra: Nested,
        ) -> Nested:
            def loss(inner_values: list[Tensor]) -> Tensor:
                return self._scoped_loss(inner_values, constants, state, batch)

            return function(loss, values, *extra)

        if not getattr(self.model, "run_eagerly", False):
            step = compiled(
                step, xla=bool(getattr(self.model, "jit_compile", False))
            )

        def run(
            values: Sequence[TensorLike] | None,
            x: Nested,
            y: Nested = None,
            sample_weight: Nested = None,
            *extra: Nested,
        ) -> Nested:
            """The loss for given values of the variables."""
            batch = _tensors((x, y, sample_weight))
            if values is None:
                values = [variable.value for variable in self.variables]
            pairs = zip(self.variables, values, strict=True)
            tensors = [
                _tensor_like(variable, value) for variable, value in pairs
            ]
            constants = [
                _tensor_like(variable, value)
                for variable, value in self._constants
            ]
            if self._waits and compiled_loss_waits(self.model):
                # A loss that creates variables at its first call cannot do so while tracing.
                self._scoped_loss(tensors, constants, None, batch)
            self._waits = False
            state = None
            # Which would trace these as constants.
            if keras.backend.backend() == "jax":
                state = [variable.value for variable in self._state_variables]
            return step(tensors, constants, state, batch, _tensors(extra))

        return run

    @property
    def _state_variables(self) -> list[keras.Variable]:
        """The variables of the model without values of their own here."""
        constant_variables = [variable for variable, _ in self._constants]
        excluded_ids = {
            id(variable) for variable in [*self.variables, *constant_variables]
        }
        state_variables: dict[int, keras.Variable] = {}
        for variable in [
            *self.model.variables,
            *getattr(self.model, "metrics_variables", []),
        ]:
            if id(variable) not in excluded_ids:
                state_variables[id(variable)] = variable
        return list(state_variables.values())

    def _scoped_loss(
        self,
        values: list[Tensor],
        constants: list[Tensor],
        state: list[Tensor] | None,
        batch: Nested,
    ) -> Tensor:
        """The loss for values of all variables; `state` is read here if it is `None`."""
        x, y, sample_weight = batch
        state_variables = self._state_variables
        if state is None:
            state = [variable.value for variable in state_variables]
        constant_variables = [variable for variable, _ in self._constants]
        variables = [*self.variables, *constant_variables, *state_variables]
        # All of them: Keras looks for regularized weights in the scope and nowhere else.
        pairs = zip(variables, [*values, *constants, *state], strict=True)
        with keras.StatelessScope(state_mapping=pairs, collect_losses=True):
            return self._objective(self.model, x, y, sample_weight, True)


def _tensor_like(variable: keras.Variable, value: TensorLike) -> Tensor:
    """A value as a tensor of a variable's dtype and layout."""
    if isinstance(value, np.ndarray):
        return placed(value, variable)
    return keras.ops.convert_to_tensor(value, dtype=variable.dtype)


def _tensors(structure: Nested) -> Nested:
    """Arrays as tensors, floats in Keras' default type as in `fit`; `None` stays."""

    def convert(leaf: TensorLike) -> Tensor:
        if leaf is None or keras.ops.is_tensor(leaf):
            return leaf
        array = np.asarray(leaf)
        dtype = None
        if np.issubdtype(array.dtype, np.floating):
            dtype = keras.config.floatx()
        return keras.ops.convert_to_tensor(array, dtype=dtype)

    return keras.tree.map_structure(convert, structure)
