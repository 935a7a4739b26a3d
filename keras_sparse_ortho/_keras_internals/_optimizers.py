"""The state of optimizers: slots of a variable, and how many batches they have applied."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras

from keras_sparse_ortho._types import Optimizer, Tensor

SlotLists = dict[str, list[Any]]
"""The lists of slots of an optimizer by attribute, in the order of the trainable variables."""


class Slot(NamedTuple):
    """A tensor that an optimizer keeps for each entry of a variable.

    Args:
        tensor: `keras.Variable`, or a tensor of `torch.optim`.
        start: float. The value that it starts from.
    """

    tensor: Tensor
    start: float


class _OwnedSlot(NamedTuple):
    """A slot with the optimizer and the attribute that hold it; `variable` is None for scalars."""

    optimizer: Optimizer
    attribute: str
    variable: keras.Variable | None
    slot: keras.Variable


class SlotPair(NamedTuple):
    """A slot, its place in another optimizer, its variable (None for scalars) and its start."""

    slot: keras.Variable
    target: keras.Variable
    variable: keras.Variable | None
    start: float


def optimizer_slots(
    optimizer: Optimizer, variable: keras.Variable
) -> list[Slot]:
    """The slots of a variable's shape in an optimizer of Keras or `torch.optim`."""
    if is_torch_optimizer(optimizer):
        return _torch_slots(optimizer, variable)
    matching_slots = []
    for member in _members(optimizer):
        if not getattr(member, "built", False):
            continue
        index = _index(member, variable)
        if index is None:
            continue
        for slots in _lists_of_slots(member).values():
            slot = slots[index]
            if (
                isinstance(slot, keras.Variable)
                and slot.shape == variable.shape
            ):
                matching_slots.append(Slot(slot, _start(member, slot)))
    return matching_slots


def is_torch_optimizer(optimizer: Optimizer) -> bool:
    """Whether an optimizer is one of `torch.optim`."""
    if keras.backend.backend() != "torch":
        return False
    import torch

    return isinstance(optimizer, torch.optim.Optimizer)


def trains(optimizer: Optimizer, variable: keras.Variable) -> bool:
    """Whether an optimizer updates a variable; one of Keras that is not built yet may."""
    if is_torch_optimizer(optimizer):
        return _torch_group(optimizer, variable.value) is not None
    if not getattr(optimizer, "built", False):
        return True
    built_members = [member for member in _members(optimizer) if member.built]
    return any(_index(member, variable) is not None for member in built_members)


def _torch_group(
    optimizer: Optimizer, parameter: Tensor
) -> Mapping[str, Any] | None:
    """The group of an optimizer of torch that has a parameter."""
    for group in optimizer.param_groups:
        if any(other is parameter for other in group["params"]):
            return group
    return None


def _torch_slots(optimizer: Optimizer, variable: keras.Variable) -> list[Slot]:
    parameter = variable.value
    group = _torch_group(optimizer, parameter) or {}
    # Adagrad's, Rprop's.
    starts = {
        "sum": "initial_accumulator_value",
        "step_size": "lr",
    }
    slots = []
    for name, tensor in optimizer.state.get(parameter, {}).items():
        if getattr(tensor, "shape", None) == parameter.shape:
            start = group.get(starts.get(name, ""), 0.0)
            slots.append(Slot(tensor, float(start)))
    return slots


def _members(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that keep slots: those inside a LossScaleOptimizer and a MultiOptimizer."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return _members(inner)
    return [optimizer, *getattr(optimizer, "optimizers", [])]


def _with_members(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer and those inside it."""
    members = _members(optimizer)
    if members[0] is optimizer:
        return members
    return [optimizer, *members]


def build_restored_optimizer(model: keras.Model) -> None:
    """Builds an optimizer whose slots a TensorFlow checkpoint restores when they exist.

    Keras builds it in the first step, which is too late to move the slots before that step.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return
    waiting = "_self_unconditional_deferred_dependencies"
    if any(
        getattr(member, waiting, None) for member in _with_members(optimizer)
    ):
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)


def _index(optimizer: Optimizer, variable: keras.Variable) -> int | None:
    """The place of a variable among the trained ones of an optimizer of Keras."""
    for index, trained in enumerate(optimizer._trainable_variables):
        if trained is variable:
            return index
    return None


def _lists_of_slots(optimizer: Optimizer) -> SlotLists:
    trained = optimizer._trainable_variables
    no_slots = {id(variable) for variable in (*trained, _iterations(optimizer))}
    lists: SlotLists = {}
    for name, slots in vars(optimizer).items():
        if not isinstance(slots, list) or len(slots) != len(trained):
            continue
        if not any(id(slot) in no_slots for slot in slots):
            lists[name] = slots
    return lists


def _iterations(optimizer: Optimizer) -> keras.Variable:
    # The public `iterations` counts updates, so that it stands still while gradients accumulate.
    return next(
        variable
        for variable in optimizer.variables
        if variable.name == "iteration"
    )


def _start(optimizer: Optimizer, slot: keras.Variable) -> float:
    """The value that a slot starts from: that of the accumulators of Adagrad and Ftrl, or 0."""
    is_accumulator = slot.name.endswith("_accumulator")
    if not is_accumulator or slot.name.endswith("gradient_accumulator"):
        return 0.0
    return float(getattr(optimizer, "initial_accumulator_value", 0.0))


def refuse_other_slots(
    optimizer: Optimizer, converted: Iterable[keras.Variable]
) -> None:
    """Raises ValueError unless an optimizer keeps scalars and lists by variable alone.

    Args:
        optimizer: Optimizer of Keras.
        converted: Variables that get another shape. Their slots must have their shape.
    """
    converted_ids = {id(variable) for variable in converted}
    slots = list(_owned_slots(optimizer))
    wrong_paths = [
        owned.slot.path
        for owned in slots
        if id(owned.variable) in converted_ids and not _have_one_shape(owned)
    ]
    copied_ids = {id(owned.slot) for owned in slots}
    for variable in optimizer.variables:
        if id(variable) not in copied_ids:
            wrong_paths.append(variable.path)
    if wrong_paths:
        raise ValueError(
            f"{type(optimizer).__name__} keeps something that is not of the shape of a weight, and "
            "cannot be converted with it; convert the model before `compile`. "
            f"Received: {wrong_paths[:3]}"
        )


def _have_one_shape(owned: _OwnedSlot) -> bool:
    assert owned.variable is not None
    return tuple(owned.slot.shape) == tuple(owned.variable.shape)


def slot_pairs(
    old: Optimizer, new: Optimizer, partners: Mapping[int, keras.Variable]
) -> Iterator[SlotPair]:
    """Yields what an optimizer keeps, and its place in another one of its class.

    Args:
        old: Optimizer of Keras.
        new: Optimizer of its class, for another model.
        partners: dict from the `id` of a variable of `old` to that of `new`.
    """
    pairs = zip(_with_members(old), _with_members(new), strict=True)
    new_owners = {id(member): new_member for member, new_member in pairs}
    for member, name, variable, slot in _owned_slots(old):
        new_owner = new_owners[id(member)]
        index = None
        if variable is not None:
            partner = partners[id(variable)]
            index = _index(new_owner, partner)
            if index is None:
                raise ValueError(
                    "The MultiOptimizer gives a converted weight to another optimizer: its "
                    "OptimizerMap must match the path before and the one after the conversion. "
                    f"Received: {variable.path}, then {partner.path}"
                )
        target = vars(new_owner)[name]
        if index is not None:
            target = target[index]
        yield SlotPair(slot, target, variable, _start(member, slot))


def _owned_slots(optimizer: Optimizer) -> Iterator[_OwnedSlot]:
    """Yields every slot of an optimizer and of those inside it."""
    for member in _with_members(optimizer):
        trained = member._trainable_variables
        for name, value in vars(member).items():
            if isinstance(value, keras.Variable):
                yield _OwnedSlot(member, name, None, value)
        for name, slots in _lists_of_slots(member).items():
            for variable, slot in zip(trained, slots, strict=True):
                if isinstance(slot, keras.Variable):
                    yield _OwnedSlot(member, name, variable, slot)


def applied_batches(optimizer: Optimizer) -> tuple[int, int]:
    """How many batches an optimizer has applied, and how many it accumulates for one update."""
    inner: Optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    # `int` alone cannot read a variable that is mirrored on several devices.
    applied = int(keras.ops.convert_to_numpy(_iterations(inner)))
    return applied, inner.gradient_accumulation_steps or 1
