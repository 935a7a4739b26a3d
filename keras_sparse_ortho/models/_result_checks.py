"""`ResultChecks`: a new model is compared with its plan, and takes over compilation and slots."""

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import compile_like, refuse_other_slots
from keras_sparse_ortho._optimizer_slots import copy_slots
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import Storage, storages_of, walk
from keras_sparse_ortho.models._plan import Plan
from keras_sparse_ortho.models._prunable_weights import (
    check_built,
    prunable_weights,
)
from keras_sparse_ortho.models._same_function import SameFunction, probe_of_copy


class ResultChecks:
    """Facts that the result is compared with, noted before anything changes.

    Args:
        model: Model that the plan was made for.
        plan: Plan, before its draws are used up.
        paths: list of str. Paths of all kernels of the model, unregistered ones included.
    """

    def __init__(
        self, model: keras.Model, plan: Plan, paths: list[str]
    ) -> None:
        check_built(model)
        self._model = model
        self._plan = plan
        self._paths = paths
        self._planned_paths = list(plan.targets)
        self._live_counts = {
            path: target.draw.live
            for path, target in plan.targets.items()
            if target.draw is not None
        }
        self._quantized_paths = [
            path
            for path, target in plan.targets.items()
            if target.quantizer is not None
        ]
        self._changes_outputs = bool(
            self._quantized_paths or plan.layer_changes
        )
        self._same_function = (
            SameFunction(model) if plan.keeps_function else None
        )
        self._optimizer = self._optimizer_to_carry()
        self._variables = (
            _variables_in_order(model) if plan.keeps_training else []
        )

    def complete(self, result: keras.Model) -> keras.Model:
        """Checks the new model and carries the training state over; returns it."""
        if self._same_function is not None:
            self._same_function.check(result)
        else:
            self._check_counts(result)
        if self._plan.keeps_training:
            is_compiled = compile_like(result, self._model)
            if is_compiled and self._optimizer is not None:
                self._carry_slots(result)
        return result

    def _optimizer_to_carry(self) -> keras.Optimizer | None:
        """The built optimizer whose slots go to the new model; refuses slots of other shapes."""
        if not self._plan.keeps_training:
            return None
        optimizer = getattr(self._model, "optimizer", None)
        if not getattr(optimizer, "built", False):
            return None
        refuse_other_slots(
            optimizer, [weight.variable for weight in self._plan.weights]
        )
        return optimizer

    def _check_counts(self, result: keras.Model) -> None:
        """Refuses a model with other kernels, live counts or quantizers than were planned."""
        weights = prunable_weights(result, unregistered=True)
        storages = {
            weight.path: weight.storage
            for weight in weights
            if weight.storage is not None
        }
        wrong_paths = set(self._paths).symmetric_difference(
            weight.path for weight in weights
        )
        wrong_paths |= set(self._planned_paths) - storages.keys()
        # All processes gather live counts, so the order must be the same in each.
        for path, live_count in self._live_counts.items():
            if path not in wrong_paths and storages[path].live != live_count:
                wrong_paths.add(path)
        for path in self._quantized_paths:
            if path not in storages or storages[path].quantizer is None:
                wrong_paths.add(path)
        if wrong_paths or len(weights) != len(self._paths):
            raise NotPrunableError(
                "The new model would not have the kernels of the given one, each with the mask "
                f"and quantizer that were planned. There were: {self._paths}. "
                f"Received: others for {sorted(wrong_paths)}"
            )
        if result is not self._model and not self._changes_outputs:
            probe_of_copy(self._model, result).check(result)

    def _carry_slots(self, result: keras.Model) -> None:
        """Copies the optimizer's slots, each in the form of its kernel's new storage."""
        result.optimizer.build(result.trainable_variables)
        pairs = zip(self._variables, _variables_in_order(result), strict=True)
        partners = {id(old): new for old, new in pairs}
        new_storages = {
            weight.path: weight.storage for weight in prunable_weights(result)
        }
        storage_pairs: dict[int, tuple[Storage, Storage]] = {}
        for weight in self._plan.weights:
            new_storage = new_storages[weight.path]
            assert weight.storage is not None
            assert new_storage is not None
            storage_pairs[id(weight.variable)] = weight.storage, new_storage

        def converted(
            variable: keras.Variable, slot: np.ndarray, start: float
        ) -> np.ndarray:
            if id(variable) not in storage_pairs:
                return slot
            old_storage, new_storage = storage_pairs[id(variable)]
            return new_storage.slot_from_dense(
                old_storage.slot_to_dense(slot, start)
            )

        copy_slots(self._optimizer, result.optimizer, partners, converted)


def _variables_in_order(model: keras.Model) -> list[keras.Variable]:
    """Kernels, then other weights but for masks and indices: the same order in any storage."""
    support_ids = {
        id(variable)
        for layer, _ in walk(model, "")
        for storage in storages_of(layer).values()
        for variable in storage.support()
    }
    weights = sorted(prunable_weights(model), key=lambda weight: weight.path)
    kernels = [weight.variable for weight in weights]
    kernel_ids = {id(kernel) for kernel in kernels}
    others = [
        variable
        for variable in model.weights
        if id(variable) not in support_ids | kernel_ids
    ]
    return kernels + others
