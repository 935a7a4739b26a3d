"""Names and keywords of other packages, and of earlier versions, with their counterparts here."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from keras_sparse_ortho._checks import as_float, told
from keras_sparse_ortho.errors import DensityError

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGE = "keras_sparse_ortho"
_MAGNITUDES = "prune(model, density)"
_GRADUAL = (
    "parametrize(model, MagnitudeMask(schedules.Cubic(density))), and callbacks.UpdateMasks() in "
    "`fit`"
)
_MASKS = "{w.path: w.mask for w in prunable_weights(model)}"
_INTEGERS = (
    "quantize_aware(model) before training; "
    'export_litert(model, path, quantization="int8") for a file'
)
_INSTEAD = {
    # tensorflow-model-optimization
    "prune_low_magnitude": _GRADUAL,
    "strip_pruning": "strip(model)",
    "prune_scope": "import keras_sparse_ortho before keras.saving.load_model: nothing more",
    "PruneLowMagnitude": "PrunableLayer(layer, MagnitudeMask(schedule))",
    "PolynomialDecay": "schedules.Cubic(density), or schedules.Polynomial",
    "ConstantSparsity": "schedules.Constant(density)",
    "PruningSchedule": "schedules.Schedule",
    "UpdatePruningStep": "callbacks.UpdateMasks()",
    "PruningSummaries": "callbacks.DensityLogger()",
    "PruningPolicy": "`include` and `exclude` of prune, sparsify and parametrize",
    "quantize_model": "quantize_aware(model)",
    "quantize_annotate_layer": "quantize_aware(model, exclude=...)",
    "quantize_apply": "quantize_aware(model)",
    "cluster_weights": "quantize_aware(model, 'int4')",
    "strip_clustering": "strip(model)",
    # torch.nn.utils.prune
    "l1_unstructured": f'{_MAGNITUDES[:-1]}, budget="uniform")',
    "global_unstructured": _MAGNITUDES,
    "random_unstructured": "prune(model, score=saliency.random(model, density))",
    "ln_structured": "remove_channels(model), after training with ChannelSoftThreshold()",
    "random_structured": "sparsify(model, density, structure=Block(rows, cols))",
    "custom_from_mask": "apply_masks(model, {path: mask})",
    "identity": "parametrize(model, FixedMask(1.0))",
    "remove": "strip(model)",
    "is_pruned": "report(model).density",
    # guesses, and names of earlier versions
    "density": "report(model).density",
    "sparsity": "1 - report(model).density",
    "is_sparse": "report(model).density < 1",
    "flops": "report(model).flops, and report(model).sparse_flops",
    "compare": "report(model) for each of the models",
    "adopt_masks": "apply_masks(model)",
    "to_blocks": 'convert(model, "blocks")',
    "to_compact": 'convert(model, "compact")',
    "to_masked": 'convert(model, "masked")',
    "masks": _MASKS,
    "mask": _MASKS,
    "get_masks": _MASKS,
    "set_density": "prune(strip(model), density)",
    "prune_channels": "remove_channels(model), after training with ChannelSoftThreshold()",
    "low_rank": "parametrize(model, LowRankSoftThreshold()), and callbacks.TargetDensity",
    "NofM": "NByM(n, m)",
    "EOI": "sparsify(model, density), or initializers.ExactOrthogonal(density)",
    "singular_values": "analysis.jacobian_singular_values(model, x)",
    "Pruner": _GRADUAL,
    "GradualPruning": _GRADUAL,
    "SparseDense": "layers.BlockSparseDense, or PrunableLayer(keras.layers.Dense(units))",
    "distill": "keras.distillation.Distiller, with the sparse model as the student",
    "quantize": _INTEGERS,
    "load_model": "keras.saving.load_model(path), after `import keras_sparse_ortho`",
    "export_tflite": "export_litert(model, path)",
    "export_c": "export.c_array(path)",
    "c_array": "export.c_array(path)",
    "benchmark": "export.latencies(files), or the command `kso bench`",
}

# By foreign keyword: arguments with this meaning. The first that a function has is named.
_ARGUMENTS = {
    "amount": ("density", "schedule"),
    "density": ("schedule",),
    "final_density": ("density", "schedule"),
    "criterion": ("score",),
    "method": ("score",),
    "importance_scores": ("score",),
    "skip": ("exclude",),
    "skip_layers": ("exclude",),
    "quantize": ("quantization",),
    "dtype": ("quantization",),
    "representative_dataset": ("representative_data",),
    "begin_epoch": ("begin_step",),
    "end_epoch": ("end_step",),
    "steps": ("end_step",),
    "begin": ("begin_step",),
    "end": ("end_step",),
}
_NOTES = {
    "density": " It is the fraction that stays: 0.1 to prune 90%.",
    "schedule": " It is a Schedule, or the density of every step.",
    "begin_step": " It is a step, or a fraction of the run such as 0.1.",
    "end_step": " It is a step, or a fraction of the run such as 0.7.",
}
_PATTERN = "initializer=initializers.ExactOrthogonal(gain=..., taps=...)"
# By foreign keyword: what to use where a function has none of these arguments.
_ELSEWHERE = {
    "gain": _PATTERN,
    "taps": _PATTERN,
    "schedule": "parametrize(model, MagnitudeMask(schedule))",
    "pruning_schedule": "parametrize(model, MagnitudeMask(schedule))",
    "quantize": _INTEGERS,
    "dtype": _INTEGERS,
    "masks": "apply_masks(model, masks)",
    "refit": "`data`, a few hundred rows of x: then live entries are refitted",
    "in_place": "the function's `.in_place`, as in sparsify.in_place(model, density)",
    "unregistered": "`include` or `exclude`, with the full paths of such matrices",
}
# By sparsity: densities that say the same. The first that a function has takes 1 - sparsity.
_DENSITIES = {
    "sparsity": ("density", "schedule"),
    "final_sparsity": ("density",),
    "target_sparsity": ("density",),
    "initial_sparsity": ("initial_density",),
}


def public_names(
    module: str, names: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a room: hints for foreign names, and completion.

    Args:
        module: Name of the room's module.
        names: Its public names, which `dir` lists without those that other rooms import.
    """

    def __getattr__(name: str) -> Any:
        raise no_attribute(module, name)

    def __dir__() -> list[str]:
        own = vars(sys.modules[module])
        return sorted({*names, *(name for name in own if name.startswith("__"))})

    return __getattr__, __dir__


def no_attribute(module: str, name: str) -> AttributeError:
    """The error for a name that a module does not have. It says what to use.

    Args:
        module: Name of the module.
        name: The missing name.
    """
    rooms = {
        path.removeprefix(f"{_PACKAGE}."): room
        for path, room in sys.modules.items()
        if path.startswith(f"{_PACKAGE}.") and "._" not in path and path != module
    }
    found = [room for room, own in rooms.items() if name in getattr(own, "__all__", ())]
    instead = f"{found[0]}.{name}" if found else _INSTEAD.get(name)
    if instead is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return AttributeError(
        f"module {module!r} has no attribute {name!r}. In keras_sparse_ortho use: {instead}"
    )


def other_keywords(**hints: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a function or constructor answer keywords of other packages.

    `sparsity=` is taken as `1 - density`. Other keywords that the function does not have raise a
    TypeError with the name that it has, or with all its names.

    Args:
        hints: By keyword, what to use in this function.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        parameters = signature.parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if not kwargs.keys() <= parameters.keys():
                name = function.__name__
                name = type(args[0]).__name__ if name == "__init__" else name
                given = {*list(parameters)[: len(args)], *kwargs}
                for keyword in [key for key in kwargs if key not in parameters]:
                    value: Any = kwargs.pop(keyword)
                    target = _first(_DENSITIES.get(keyword, ()), parameters)
                    if target is not None:
                        if target in given:
                            raise TypeError(
                                f"{name}() takes `{target}` or `{keyword}`, which is 1 - {target}. "
                                f"Received: both, {keyword}={told(value)}"
                            )
                        kwargs[target] = _density_of(keyword, value)
                        given.add(target)
                    elif takes_any and keyword not in hints:
                        kwargs[keyword] = value
                    else:
                        raise _no_argument(name, keyword, value, parameters, hints)
            return function(*args, **kwargs)

        # Keras reads the arguments of layers without following `__wrapped__`.
        checked.__signature__ = signature  # type: ignore[attr-defined]
        return checked

    return decorated


def _first(names: Sequence[str], parameters: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in parameters), None)


def _density_of(name: str, sparsity: Any) -> Any:
    """`1 - sparsity`, for each entry of a dict or list as well."""
    if isinstance(sparsity, Mapping):
        return {key: _density_of(name, value) for key, value in sparsity.items()}
    if isinstance(sparsity, list | tuple) or getattr(sparsity, "ndim", 0) == 1:
        return [_density_of(name, value) for value in sparsity]
    value = as_float(sparsity)
    if not 0.0 <= value < 1.0:
        percent = ""
        if 1.0 < value < 100.0:
            percent = (
                f" It is a fraction, not a percentage: {name}={value / 100:g} prunes {value:g}%."
            )
        raise DensityError(
            f"`{name}` must be a number in [0, 1).{percent} Received: {name}={told(sparsity)}"
        )
    return float(f"{1.0 - value:.12g}")  # 0.1 for 0.9, not 0.0999...


def _no_argument(
    name: str, keyword: str, value: Any, parameters: Mapping[str, Any], hints: Mapping[str, str]
) -> TypeError:
    target = _first(_ARGUMENTS.get(keyword, ()), parameters)
    if keyword in hints:
        use = f"Use {hints[keyword]}."
    elif target is not None:
        use = f"Use `{target}`.{_NOTES.get(target, '')}"
    elif keyword in _ELSEWHERE:
        use = f"Use {_ELSEWHERE[keyword]}."
    else:
        own = ", ".join(key for key in parameters if key not in ("self", "args", "kwargs"))
        use = f"Its arguments are: {own}."
    return TypeError(
        f"{name}() has no argument `{keyword}`. {use} Received: {keyword}={told(value)}"
    )
