"""`StatelessLoss`: the loss of a model as a pure function of some of its variables."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import ScalarFunction, compiled, value_and_gradients
from keras_sparse_ortho._keras_internals import compiled_loss_waits
from keras_sparse_ortho._values import placed, to_numpy
from keras_sparse_ortho.models._prunable_weights import check_built

Objective = Callable[[Any, Any, Any, Any, bool], Any]
"""`objective(model, x, y, sample_weight, training)`, a scalar tensor."""


def compiled_loss(model: Any, x: Any, y: Any, sample_weight: Any, training: bool) -> Any:
    """The loss that `fit` minimises: the one of `compile`, `add_loss`, and regularization."""
    check_labels(model, y)
    y_pred = model(x, training=training)
    return model.compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )


def check_labels(model: Any, y: Any) -> None:
    """Raises ValueError for a batch without labels where the compiled loss needs some."""
    own = type(model).compute_loss is not keras.Model.compute_loss  # which may need none
    needs = any(loss is not None for loss in keras.tree.flatten(getattr(model, "loss", None)))
    if needs and not own and all(label is None for label in keras.tree.flatten(y)):
        raise ValueError(
            "The loss that the model was compiled with compares outputs with labels: give `data` "
            "as `(x, y)`, batches of a data set as well, or an `objective` that needs no labels. "
            f"Received: y=None, loss={model.loss!r}"
        )


class StatelessLoss:
    """`L(values; x, y, sample_weight)`: a model's loss where some variables have given values.

    Updates are forgotten, so two calls draw the same dropout. `held` has pairs of variables and
    values for every call, such as masks set to all `True`. The `objective` is by default the loss
    of `fit`; on JAX it may read variables of the model only.
    """

    def __init__(
        self,
        model: Any,
        variables: Sequence[Any],
        *,
        held: Iterable[tuple[Any, Any]] = (),
        objective: Objective | None = None,
    ) -> None:
        check_built(model)
        if objective is None and not getattr(model, "compiled", False):
            raise ValueError(
                "There is no loss before the model is compiled: call `compile(loss=...)`, or give "
                f"an `objective`. Received: the model {model.name!r}, not compiled"
            )
        self.model = model
        self.variables = list(variables)
        self._held = list(held)
        self._objective = compiled_loss if objective is None else objective
        self._waits = True

    def gradients(
        self, values: Sequence[Any] | None, x: Any, y: Any = None, sample_weight: Any = None
    ) -> list[Any]:
        """The gradients as tensors, compiled, in the order of the variables."""
        # `values` has an array for each variable; `None` stands for those they have. Gradients are
        # scaled like the optimizer's loss (mixed_float16) while small ones could underflow.
        scale = np.float32(1)
        optimizer = getattr(self.model, "optimizer", None)
        if self._objective is compiled_loss and optimizer is not None:
            scale = np.float32(to_numpy(optimizer.scale_loss(keras.ops.ones(()))))
        found: list[Any] = self._gradients(values, x, y, sample_weight, scale)
        if scale != 1:
            found = [keras.ops.cast(gradient, "float32") / float(scale) for gradient in found]
        return found

    @functools.cached_property
    def _gradients(self) -> Callable[..., Any]:
        def function(loss: ScalarFunction, values: list[Any], scale: Any) -> Any:
            def scaled(inner: list[Any]) -> Any:
                value = loss(inner)
                return value * keras.ops.cast(scale, value.dtype)

            return value_and_gradients(scaled, values)[1]

        return self.compiled(function)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles `function(loss, values, *extra)`, where `loss(values)` has batch and state."""
        # Returns `run(values, x, y=None, sample_weight=None, *extra)`, of the same tensors; `extra`
        # are arrays or lists of arrays.

        def step(values: Any, held: Any, others: Any, batch: Any, extra: Any) -> Any:
            def loss(inner: list[Any]) -> Any:
                return self._scoped(inner, held, others, batch)

            return function(loss, values, *extra)

        if not getattr(self.model, "run_eagerly", False):
            step = compiled(step, xla=bool(getattr(self.model, "jit_compile", False)))

        def run(values: Any, x: Any, y: Any = None, sample_weight: Any = None, *extra: Any) -> Any:
            batch = _tensors((x, y, sample_weight))
            if values is None:
                values = [variable.value for variable in self.variables]
            pairs = zip(values, self.variables, strict=True)
            values = [_as(variable, value) for value, variable in pairs]
            held = [_as(variable, value) for variable, value in self._held]
            if self._waits and compiled_loss_waits(self.model):
                # A loss that creates variables at its first call cannot do so while tracing.
                self._scoped(values, held, None, batch)
            self._waits = False
            # JAX would trace these as constants.
            on_jax = keras.backend.backend() == "jax"
            others = [variable.value for variable in self._others] if on_jax else None
            return step(values, held, others, batch, _tensors(extra))

        return run

    @property
    def _others(self) -> list[Any]:
        given = {id(variable) for variable in [*self.variables, *(held for held, _ in self._held)]}
        all_of_them = [*self.model.variables, *getattr(self.model, "metrics_variables", [])]
        found = {id(variable): variable for variable in all_of_them}
        return [variable for key, variable in found.items() if key not in given]

    def _scoped(self, values: Any, held: Any, others: Any, batch: Any) -> Any:
        """The loss; `others` are the values of the other variables, `None` to read them here."""
        x, y, sample_weight = batch
        if others is None:
            others = [variable.value for variable in self._others]
        variables = [*self.variables, *(variable for variable, _ in self._held), *self._others]
        # All of them: Keras looks for regularized weights in the scope and nowhere else.
        pairs = zip(variables, [*values, *held, *others], strict=True)
        with keras.StatelessScope(state_mapping=pairs, collect_losses=True):
            return self._objective(self.model, x, y, sample_weight, True)


def _as(variable: Any, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return placed(value, variable)
    return keras.ops.convert_to_tensor(value, dtype=variable.dtype)


def _tensors(structure: Any) -> Any:
    """Arrays as tensors, floats in Keras' default type as in `fit`; `None` stays."""

    def convert(leaf: Any) -> Any:
        if leaf is None or keras.ops.is_tensor(leaf):
            return leaf
        leaf = np.asarray(leaf)
        is_float = np.issubdtype(leaf.dtype, np.floating)
        return keras.ops.convert_to_tensor(leaf, dtype=keras.config.floatx() if is_float else None)

    return keras.tree.map_structure(convert, structure)
