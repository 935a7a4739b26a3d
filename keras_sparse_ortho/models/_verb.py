"""`verb`: a function that makes models gets its plan, and a form that works in place."""

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, cast

import keras

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho.models._apply import carry_out
from keras_sparse_ortho.models._plan import Plan

P = ParamSpec("P")
PlanFunction = Callable[Concatenate[keras.Model, P], Plan]
ModelFunction = Callable[Concatenate[keras.Model, P], keras.Model]


class Verb(Protocol[P]):
    """Makes a new model; `plan` returns the plan alone, `in_place` changes the given model."""

    def __call__(
        self, model: keras.Model, *args: P.args, **kwargs: P.kwargs
    ) -> keras.Model: ...

    def plan(
        self, model: keras.Model, *args: P.args, **kwargs: P.kwargs
    ) -> Plan:
        """Returns what the new model would be."""

    def in_place(
        self, model: keras.Model, *args: P.args, **kwargs: P.kwargs
    ) -> keras.Model:
        """Changes the given model."""


def verb(plan: PlanFunction[P]) -> Callable[[ModelFunction[P]], Verb[P]]:
    """Gives a function that carries a plan out the attributes `plan` and `in_place`.

    Args:
        plan: Function with the same arguments that returns the `Plan`.
    """

    def decorate(function: ModelFunction[P]) -> Verb[P]:
        # Errors about keywords name the public function.
        plan.__name__ = function.__name__
        checked_plan = other_keywords(plan)

        @functools.wraps(function)
        def in_place(
            model: keras.Model,
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> keras.Model:
            plan_of_model = checked_plan(model, *args, **kwargs)
            return carry_out(model, plan_of_model, in_place=True)

        checked_function: Any = other_keywords(function)
        checked_function.plan = checked_plan
        checked_function.in_place = in_place
        return cast(Verb[P], checked_function)

    return decorate
