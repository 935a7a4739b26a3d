"""Names of other packages, and of earlier versions, with what takes their place here."""

from collections.abc import Mapping
from typing import Any

_MAGNITUDES = "prune(model, density)"
_GRADUAL = "parametrize(model, MagnitudeMask(schedules.Cubic(density)))"
_INSTEAD = {
    # tensorflow-model-optimization
    "prune_low_magnitude": f"{_GRADUAL}, and callbacks.UpdateMasks() in `fit`",
    "strip_pruning": "strip(model)",
    "prune_scope": "import keras_sparse_ortho before keras.saving.load_model: nothing more",
    "PruneLowMagnitude": "PrunableLayer(layer, MagnitudeMask(schedule))",
    "PolynomialDecay": "schedules.Cubic(final_density), or schedules.Polynomial",
    "ConstantSparsity": "schedules.Constant(density)",
    "PruningSchedule": "schedules.Schedule",
    "UpdatePruningStep": "callbacks.UpdateMasks()",
    "PruningSummaries": "callbacks.DensityLogger()",
    "PruningPolicy": "`include` and `exclude` of prune, sparsify and parametrize",
    "quantize_model": "quantize_aware(model)",
    "quantize_annotate_layer": "quantize_aware(model, exclude=...)",
    "quantize_apply": "quantize_aware(model)",
    "cluster_weights": "quantize_aware(model, weights) with a parametrizations.Palette",
    "strip_clustering": "strip(model)",
    # torch.nn.utils.prune
    "l1_unstructured": f'{_MAGNITUDES[:-1]}, budget="uniform")',
    "global_unstructured": _MAGNITUDES,
    "random_unstructured": f'{_MAGNITUDES[:-1]}, score="random")',
    "ln_structured": "remove_channels(model), after training with ChannelSoftThreshold()",
    "random_structured": "sparsify(model, density, structure=Block(rows, cols))",
    "custom_from_mask": "prune(model, masks={path: mask})",
    "identity": "parametrize(model, FixedMask(1.0))",
    "remove": "strip(model)",
    "is_pruned": "report(model).density",
    # guesses, and names that were here
    "density": "report(model).density",
    "sparsity": "1 - report(model).density",
    "apply_masks": "prune(model, masks=...), or prune(model, score=saliency)",
}


def no_attribute(module: Any, name: str, rooms: Mapping[str, Any] | None = None) -> AttributeError:
    """The error for a name that a module does not have, which tells what to use.

    Args:
        module: Name of the module.
        name: What was asked for.
        rooms: By name the public sub-packages that may have it.
    """
    found = [room for room, own in (rooms or {}).items() if name in getattr(own, "__all__", ())]
    instead = f"{found[0]}.{name}" if found else _INSTEAD.get(name)
    if instead is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return AttributeError(
        f"module {module!r} has no attribute {name!r}. In keras_sparse_ortho use: {instead}"
    )
