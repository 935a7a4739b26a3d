"""Names and keywords of other packages, and guesses, with their counterparts here."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_PACKAGE = "keras_sparse_ortho"
_MASKS = "{w.path: w.mask for w in prunable_weights(model)}"
_INTEGERS = "quantize_aware(model) in training; export_litert(model, path, mode='int8') for a file"
# By name in TFMOT, torch.nn.utils.prune, other packages and guesses.
_INSTEAD = {
    "prune_low_magnitude": (
        "parametrize(model, MagnitudeMask(schedules.Cubic(density))), and callbacks.UpdateMasks() "
        "in `fit`"
    ),
    "strip_pruning": "strip(model)",
    "prune_scope": "keras.saving.load_model(path), after `import keras_sparse_ortho`",
    "PruneLowMagnitude": "PrunableLayer(layer, MagnitudeMask(schedule))",
    "PolynomialDecay": "schedules.Cubic(density), or schedules.Polynomial",
    "ConstantSparsity": "schedules.Constant(density)",
    "PruningSchedule": "schedules.Schedule",
    "UpdatePruningStep": "callbacks.UpdateMasks()",
    "PruningSummaries": "callbacks.DensityLogger()",
    "PruningPolicy": "`include` and `exclude` of prune, sparsify and parametrize",
    **dict.fromkeys(("quantize_model", "quantize_apply"), "quantize_aware(model)"),
    "quantize_annotate_layer": "quantize_aware(model, exclude=...)",
    "cluster_weights": "quantize_aware(model, 'int4')",
    "l1_unstructured": 'prune(model, density, budget="uniform")',
    "global_unstructured": "prune(model, density)",
    "random_unstructured": "prune(model, score=saliency.random(model, density))",
    "ln_structured": "remove_channels(model), after training with ChannelSoftThreshold()",
    "random_structured": "sparsify(model, density, structure=Block(rows, cols))",
    "custom_from_mask": "apply_masks(model, {path: mask})",
    "remove": "strip(model)",
    **dict.fromkeys(("is_pruned", "density"), "report(model).density"),
    "sparsity": "1 - report(model).density",
    "flops": "report(model).flops, and report(model).sparse_flops",
    **dict.fromkeys(("masks", "mask", "get_masks"), _MASKS),
    "quantize": _INTEGERS,
    "export_tflite": "export_litert(model, path)",
}

# By foreign keyword: arguments with this meaning. The first that a function has is named.
_ARGUMENTS = {
    "amount": ("density", "schedule"),
    "density": ("schedule",),
    **dict.fromkeys(("criterion", "method", "importance_scores"), ("score",)),
    **dict.fromkeys(("skip", "skip_layers"), ("exclude",)),
    **dict.fromkeys(("quantize", "quantization", "dtype"), ("mode",)),
    "representative_dataset": ("representative_data",),
    **dict.fromkeys(("begin_epoch", "begin"), ("begin_step",)),
    **dict.fromkeys(("end_epoch", "steps", "end"), ("end_step",)),
}
_NOTES = {
    "density": " It is the fraction that stays: 0.1 to prune 90%.",
    "schedule": " It is a Schedule, or the density of every step.",
    "begin_step": " It is a step, or a fraction of the run such as 0.1.",
    "end_step": " It is a step, or a fraction of the run such as 0.7.",
}
# By foreign keyword: the remedy where a function has none of these arguments.
_ELSEWHERE = {
    "gain": "initializer=initializers.ExactOrthogonal(gain=...)",
    "schedule": "parametrize(model, MagnitudeMask(schedule))",
    "pruning_schedule": "parametrize(model, MagnitudeMask(schedule))",
    **dict.fromkeys(("quantize", "dtype"), _INTEGERS),
    "masks": "apply_masks(model, masks)",
}


def public_names(
    module: str, names: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a room: hints for foreign names, and public names only."""

    def __getattr__(name: str) -> Any:
        rooms = {
            path.removeprefix(f"{_PACKAGE}."): room
            for path, room in sys.modules.items()
            if path.startswith(f"{_PACKAGE}.") and "._" not in path and path != module
        }
        found = [room for room, own in rooms.items() if name in getattr(own, "__all__", ())]
        instead = f"{found[0]}.{name}" if found else _INSTEAD.get(name)
        hint = "" if instead is None else f". In keras_sparse_ortho use: {instead}"
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")

    def __dir__() -> list[str]:
        own = vars(sys.modules[module])
        return sorted({*names, *(name for name in own if name.startswith("__"))})

    return __getattr__, __dir__


def hint_for(keyword: str, parameters: Iterable[str], hints: Mapping[str, str]) -> str:
    """The argument or function to use in place of an unknown keyword."""
    if keyword in hints:
        return f"Use {hints[keyword]}."
    for target in _ARGUMENTS.get(keyword, ()):
        if target in parameters:
            return f"Use `{target}`.{_NOTES.get(target, '')}"
    if keyword in _ELSEWHERE:
        return f"Use {_ELSEWHERE[keyword]}."
    own = ", ".join(key for key in parameters if key not in ("self", "args", "kwargs"))
    return f"Its arguments are: {own}."
