"""The state of optimizers: slots of a variable, and how many batches they have applied."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras


class Slot(NamedTuple):
    """A tensor that an optimizer keeps for each entry of a variable."""

    tensor: Any  # a `keras.Variable`, or a tensor of `torch.optim`
    start: float  # the value that it starts from


def optimizer_slots(optimizer: Any, variable: Any) -> list[Slot]:
    """The slots of a variable's shape in an optimizer of Keras or `torch.optim`."""
    if is_torch_optimizer(optimizer):
        return _torch_slots(optimizer, variable)
    return [
        Slot(slot, _start(part, slot))
        for part in _parts(optimizer)
        if getattr(part, "built", False) and (index := _place(part, variable)) is not None
        for name, slots in _lists_of_slots(part)
        if isinstance(slot := slots[index], keras.Variable) and slot.shape == variable.shape
    ]


def is_torch_optimizer(optimizer: Any) -> bool:
    if keras.backend.backend() != "torch":
        return False
    import torch

    return isinstance(optimizer, torch.optim.Optimizer)


def trains(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer updates a variable; one of Keras that is not built yet may."""
    if is_torch_optimizer(optimizer):
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        return any(parameter is variable.value for parameter in parameters)
    if not getattr(optimizer, "built", False):
        return True
    return any(_place(part, variable) is not None for part in _parts(optimizer) if part.built)


def _torch_slots(optimizer: Any, variable: Any) -> list[Slot]:
    parameter = variable.value
    group: dict[str, Any] = next(
        (g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), {}
    )
    starts = {"sum": "initial_accumulator_value", "step_size": "lr"}  # Adagrad's, Rprop's
    return [
        Slot(slot, float(group.get(starts.get(name, ""), 0.0)))
        for name, slot in optimizer.state.get(parameter, {}).items()
        if getattr(slot, "shape", None) == parameter.shape
    ]


def _parts(optimizer: Any) -> list[Any]:
    """The optimizers that keep slots: those inside a LossScaleOptimizer and a MultiOptimizer."""
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return _parts(inner)
    return [optimizer, *getattr(optimizer, "optimizers", [])]


def build_restored_optimizer(model: Any) -> None:
    """Builds an optimizer whose slots a TensorFlow checkpoint restores when they exist."""
    # Keras builds it in the first step, which is too late to move the slots before that step.
    optimizer: Any = getattr(model, "optimizer", None)
    parts = [] if optimizer is None else _all(optimizer)
    if any(getattr(one, "_self_unconditional_deferred_dependencies", None) for one in parts):
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)


def _place(optimizer: Any, variable: Any) -> int | None:
    known = enumerate(optimizer._trainable_variables)
    return next((place for place, other in known if other is variable), None)


def _lists_of_slots(optimizer: Any) -> list[tuple[str, list[Any]]]:
    """The lists, one a kind of slot, in the order of the trainable variables, by attribute."""
    known = optimizer._trainable_variables
    others = {id(variable) for variable in (*known, _iterations(optimizer))}
    return [
        (name, slots)
        for name, slots in vars(optimizer).items()
        if isinstance(slots, list)
        and len(slots) == len(known)
        and not any(id(slot) in others for slot in slots)
    ]


def _iterations(optimizer: Any) -> Any:
    # The public `iterations` counts updates, so that it stands still while gradients accumulate.
    return next(variable for variable in optimizer.variables if variable.name == "iteration")


def _start(optimizer: Any, slot: Any) -> float:
    # Adagrad's and Ftrl's; those of gradients are 0 at first.
    if not slot.name.endswith("_accumulator") or slot.name.endswith("gradient_accumulator"):
        return 0.0
    return float(getattr(optimizer, "initial_accumulator_value", 0.0))


def refuse_other_slots(optimizer: Any, converted: Iterable[Any]) -> None:
    """Raises ValueError unless an optimizer keeps scalars and lists by variable alone."""
    # Slots of variables `converted` to another shape must have their shape.
    ids = {id(variable) for variable in converted}
    known = list(_kept(optimizer))
    wrong = [
        slot.path
        for _, _, variable, slot in known
        if id(variable) in ids and tuple(slot.shape) != tuple(variable.shape)
    ]
    copied = {id(slot) for _, _, _, slot in known}
    wrong += [variable.path for variable in optimizer.variables if id(variable) not in copied]
    if wrong:
        raise ValueError(
            f"{type(optimizer).__name__} keeps something that is not of the shape of a weight, and "
            "cannot be converted with it; convert the model before `compile`. "
            f"Received: {wrong[:3]}"
        )


def slot_pairs(
    old: Any, new: Any, partners: Mapping[int, Any]
) -> Iterator[tuple[Any, Any, Any, float]]:
    """Yields what an optimizer keeps, and its place in another one of its class."""
    # `partners` maps the `id` of a variable to that of the new optimizer. Yields two slots, the old
    # variable (`None` for scalars, such as the step count), and the value that they start from.
    owners = {id(ours): theirs for ours, theirs in zip(_all(old), _all(new), strict=True)}
    for ours, name, variable, slot in _kept(old):
        owner = owners[id(ours)]
        partner = None if variable is None else partners[id(variable)]
        place = None if partner is None else _place(owner, partner)
        if partner is not None and place is None:
            raise ValueError(
                "The MultiOptimizer gives a converted weight to another optimizer: its "
                "OptimizerMap must match the path before and the one after the conversion. "
                f"Received: {variable.path}, then {partner.path}"
            )
        target = vars(owner)[name]
        yield slot, target if place is None else target[place], variable, _start(ours, slot)


def _kept(optimizer: Any) -> Iterator[tuple[Any, str, Any, Any]]:
    """Yields every slot with its optimizer, attribute and variable (`None` for scalars)."""
    for ours in _all(optimizer):
        known = ours._trainable_variables
        for name, value in vars(ours).items():
            if isinstance(value, keras.Variable):
                yield ours, name, None, value
        for name, slots in _lists_of_slots(ours):
            for variable, slot in zip(known, slots, strict=True):
                if isinstance(slot, keras.Variable):
                    yield ours, name, variable, slot


def _all(optimizer: Any) -> list[Any]:
    parts = _parts(optimizer)
    return parts if parts[0] is optimizer else [optimizer, *parts]


def applied_batches(optimizer: Any) -> tuple[int, int]:
    """How many batches an optimizer has applied, and how many it accumulates for one update."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # `int` alone cannot read a variable that is mirrored on several devices.
    seen = int(keras.ops.convert_to_numpy(_iterations(inner)))
    return seen, inner.gradient_accumulation_steps or 1
