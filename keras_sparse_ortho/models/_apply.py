"""`apply`, the only code that makes a plan true."""

import dataclasses
from collections.abc import Mapping

import keras

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError
from keras_sparse_ortho.kernels import PrunableWeight, storages_of, walk
from keras_sparse_ortho.models._origin import remember_origin
from keras_sparse_ortho.models._places import places_to_wrap
from keras_sparse_ortho.models._plan import Plan
from keras_sparse_ortho.models._prunable_weights import prunable_weights
from keras_sparse_ortho.models._result_checks import ResultChecks
from keras_sparse_ortho.models._rewrite import rewrite
from keras_sparse_ortho.storages import (
    KernelChange,
    Target,
    form_layer,
    storage_form,
)


@other_keywords
def apply(
    model: keras.Model, plan: Plan, *, in_place: bool = False
) -> keras.Model:
    """Returns a model whose kernels have become what a plan says.

    `kso.sparsify(model, 0.1)` is `apply(model, kso.sparsify.plan(model, 0.1))`; so are the other
    functions that return models. The new model is compared with the plan, and compiled only after
    conversions of storage.

    Args:
        model: Model that the plan was made for.
        plan: Plan, such as `kso.prune.plan(model, 0.2)`. It can be applied again.
        in_place: bool. Changes the model itself, for subclassed models that cannot be copied; the
            error says so. If anything fails, it stays as it was.

    Raises:
        NotPrunableError: A model that cannot be copied, or whose layers cannot be replaced.
        UnknownWeightError: A plan for kernels that the model does not have.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="head")])
        >>> plan = kso.prune.plan(dense, 0.25)
        >>> print(plan)
        kernel       shape   becomes  live  density  values
        head/kernel  (8, 4)  masked   8     0.25     kept
        >>> kso.models.apply(dense, plan).count_params()  # with the mask
        68
    """
    return carry_out(
        model, dataclasses.replace(plan, targets=dict(plan.targets)), in_place
    )


def carry_out(
    model: keras.Model, plan: Plan, in_place: bool = False
) -> keras.Model:
    """Applies a plan and uses it up: each draw is freed once its layer has it.

    So a model and all its draws are not in memory at once. Arguments and errors are those of
    `apply`.
    """
    weights = {
        weight.path: weight
        for weight in prunable_weights(model, unregistered=True)
    }
    _check_model(plan, weights)
    places = _places(model, plan)
    checks = ResultChecks(model, plan, list(weights))
    variables_set_later = [
        weights[path].variable
        for path, target in plan.targets.items()
        if weights[path].storage is None and _is_set_later(target)
    ]

    def replace(
        layer: keras.layers.Layer, path: str, layer_copy: keras.layers.Layer
    ) -> keras.layers.Layer | None:
        formed = None
        kernels = places.get(id(layer), {})
        if kernels:
            changes = {
                name: KernelChange(weight, _take_target(plan, weight.path))
                for name, weight in kernels.items()
            }
            formed = form_layer(layer_copy, changes)
        layer_change = plan.layer_changes.get(layer)
        if layer_change is None:
            return formed
        return layer_change.change(layer_copy, formed)

    result = rewrite(
        model, replace, checks.complete, variables_set_later, in_place
    )
    if result is not model:
        remember_origin(result, model)
    return result


def _check_model(plan: Plan, weights: Mapping[str, PrunableWeight]) -> None:
    """Refuses a plan that was made for another model, a twin with the same paths included."""
    variables = {id(weight.variable) for weight in weights.values()}
    known_paths = {
        weight.path
        for weight in plan.weights
        if id(weight.variable) in variables
    }
    unknown = sorted(plan.targets.keys() - known_paths)
    if unknown:
        raise UnknownWeightError(
            f"The plan was made for another model. There are: {', '.join(weights)}. "
            f"Received: a plan for {unknown}"
        )


def _is_set_later(target: Target) -> bool:
    """Whether the copy of a plain kernel gets its value from the plan, or is not stored."""
    if target.sets_values:
        return True
    if target.parametrization is not None:
        return target.parametrization.compact
    return not storage_form(target.storage).keeps_dense_kernel


def _take_target(plan: Plan, path: str) -> Target:
    """The target of a kernel, whose draw leaves the plan."""
    target = plan.targets[path]
    plan.targets[path] = dataclasses.replace(target, draw=None)
    return target


def _places(
    model: keras.Model, plan: Plan
) -> dict[int, dict[str, PrunableWeight]]:
    """The layers to replace, by `id`: their kernels by the names below the layer."""
    planned = [weight for weight in plan.weights if weight.path in plan.targets]
    by_path = {weight.path: weight for weight in planned}
    places = {
        layer_id: {name: by_path[path] for name, path in paths.items()}
        for layer_id, paths in places_to_wrap(
            model, [weight for weight in planned if weight.storage is None]
        ).items()
    }
    stored = {
        id(weight.variable): weight
        for weight in planned
        if weight.storage is not None
    }
    if not stored:
        return places
    for layer, path in walk(model, ""):
        storages = storages_of(layer)
        kernels = {
            name: stored[id(storage.weight.variable)]
            for name, storage in storages.items()
            if id(storage.weight.variable) in stored
        }
        if kernels and len(kernels) < len(storages):
            raise NotPrunableError(
                "All kernels of a wrapped layer are converted or quantized, or none. "
                f"Received: some of {path!r}: {sorted(weight.path for weight in kernels.values())}"
            )
        if kernels:
            places[id(layer)] = kernels
    return places
