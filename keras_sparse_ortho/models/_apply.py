"""Plans for the kernels of a model, and `apply`, the only code that makes them true."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, cast

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._foreign_names import Answering, for_value, unknown_path
from keras_sparse_ortho._keras_internals import (
    VariableOverrides,
    body_of,
    compile_like,
    from_zero_states,
    own_variables,
    refuse_other_slots,
)
from keras_sparse_ortho._optimizer_slots import copy_slots
from keras_sparse_ortho._values import digest_of, to_numpy
from keras_sparse_ortho.errors import LayoutError, NotPrunableError, UnknownWeightError
from keras_sparse_ortho.initializers import AnyDraw, BlockDraw, Draw, weights_set_later
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight, storages_of, walk
from keras_sparse_ortho.layers import (
    PrunableLayer,
    block_layer_like,
    check_block,
    pattern_of,
    plain_layer,
)
from keras_sparse_ortho.models._flops import open_specs
from keras_sparse_ortho.models._origin import remember_origin
from keras_sparse_ortho.models._rewrite import (
    check_built,
    places_to_wrap,
    prunable_weights,
    rewrite,
)
from keras_sparse_ortho.orthogonal import Block, dead_outputs, depthwise_outputs
from keras_sparse_ortho.parametrizations import (
    CompactMask,
    FakeQuantization,
    FixedMask,
    LowRankSoftThreshold,
    Parametrization,
)

_STORAGES = ("masked", "compact", "blocks")


def check_storage(storage: str) -> None:
    if storage not in _STORAGES:
        raise ValueError(
            f"`storage` must be one of {list(_STORAGES)}.{for_value('storage', storage)} "
            f"Received: {storage=}"
        )


@dataclasses.dataclass(frozen=True)
class Target:
    """The form that one kernel takes."""

    # "masked", "compact", "blocks" (compact where the layer has no such form), "dense" or "kept".
    storage: str
    draw: AnyDraw | None = None  # the mask, and values if these are new; None: the kernel's mask
    parametrization: Parametrization | None = None  # in place of a fixed mask in "masked"
    block: tuple[int, int] | None = None  # size of "blocks", unless the draw has it
    quantizer: FakeQuantization | None = None  # of the effective kernel

    @property
    def is_compact(self) -> bool:
        own = self.parametrization
        return self.storage in ("compact", "blocks") if own is None else own.compact


Around = Callable[[Any, Any, Callable[[], Any]], Any]
"""`(layer, own, make)` -> what takes the place of `own`, the copy of `layer`, or `None`.
`make()` is the new layer by the targets, or `None` where they change nothing."""


@dataclasses.dataclass
class Plan(Mapping[str, Target], Answering):
    """The new form of each kernel of a model, by path; `print` shows it.

    Nothing changes until `models.apply(model, plan)`. Kernels that are not named stay.

    Args:
        weights: list of `PrunableWeight` that change.
        targets: dict from path to `Target`.
        keeps_function: bool. Whether kernels and outputs must stay equal; else live counts are
            compared.
        keeps_training: bool. Whether to carry compilation and optimizer state over.
        around: `Around`. Other replacements of layers.
        check: callable. Gets the result, to raise or to warn.
    """

    weights: list[PrunableWeight]
    targets: dict[str, Target]
    keeps_function: bool = False
    keeps_training: bool = False
    around: Around | None = None
    check: Callable[[Any], None] = lambda result: None

    def __getitem__(self, path: str) -> Target:
        if path not in self.targets:
            raise unknown_path(path, self.targets)
        return self.targets[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.targets)

    def __len__(self) -> int:
        return len(self.targets)

    def __str__(self) -> str:
        rows = [("kernel", "shape", "becomes", "live", "density", "values")]
        for weight in self.weights:
            target = self.targets[weight.path]
            live = weight.live if target.draw is None else target.draw.live
            own = target.parametrization
            becomes = target.storage if own is None else type(own).__name__
            becomes += _outputs_note(weight, target.draw)
            if target.quantizer is not None:
                becomes += f", {type(target.quantizer).__name__}"
            new = target.draw is not None and target.draw.sets_values
            numbers = (f"{live:,}", f"{live / weight.size:.4g}")
            if own is not None and not own.movable:
                numbers = ("-", "-")  # training decides
            values = "new" if new else "kept"
            rows.append((weight.path, f"{weight.shape}", becomes, *numbers, values))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join(lines)

    __repr__ = __str__


def _outputs_note(weight: PrunableWeight, draw: AnyDraw | None) -> str:
    """The words of a plan on the outputs of a depthwise kernel."""
    outputs = depthwise_outputs(weight.shape, weight.layout)
    if draw is None or not outputs:
        return ""
    dead = dead_outputs(draw.mask, weight.layout)
    return f", {dead} of {outputs} outputs dead" if dead else ", each output live"


P = ParamSpec("P")


class Verb(Protocol[P]):
    """Makes a new model; `plan` returns the plan alone, `in_place` changes the given model."""

    def __call__(self, model: keras.Model, *args: P.args, **kwargs: P.kwargs) -> keras.Model: ...

    def plan(self, model: keras.Model, *args: P.args, **kwargs: P.kwargs) -> Plan: ...

    def in_place(self, model: keras.Model, *args: P.args, **kwargs: P.kwargs) -> keras.Model: ...


def verb(plan: Callable[Concatenate[keras.Model, P], Plan]) -> Verb[P]:
    translated = other_keywords(plan)

    def form(in_place: bool) -> Any:
        @functools.wraps(plan)
        def act(*args: Any, **kwargs: Any) -> keras.Model:
            made = translated(*args, **kwargs)
            return _apply(args[0] if args else kwargs["model"], made, in_place)

        signature = inspect.signature(plan).replace(return_annotation="keras.Model")
        vars(act)["__signature__"] = signature
        return act

    act = form(in_place=False)
    vars(act).update(plan=translated, in_place=form(in_place=True))
    return cast(Verb[P], act)


@other_keywords
def apply(model: keras.Model, plan: Plan, *, in_place: bool = False) -> keras.Model:
    """Returns a model whose kernels have become what a plan says.

    `kso.sparsify(model, 0.1)` is `apply(model, kso.sparsify.plan(model, 0.1))`; so are the other
    functions that return models. The new model is compared with the plan, and compiled only after
    conversions of storage.

    Args:
        model: Model that the plan was made for.
        plan: Plan, such as `kso.prune.plan(model, 0.2)`.
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
    return _apply(model, dataclasses.replace(plan, targets=dict(plan.targets)), in_place)


def _apply(model: Any, plan: Plan, in_place: bool) -> Any:
    """Applies a plan, and takes its draws out, so that they are not there beside the model."""
    targets = plan.targets
    given = {weight.path: weight for weight in prunable_weights(model, unregistered=True)}
    # A twin has the same paths, but other layers than the plan knows.
    own = {id(weight.variable) for weight in given.values()}
    known = {weight.path for weight in plan.weights if id(weight.variable) in own}
    if unknown := sorted(targets.keys() - known):
        raise UnknownWeightError(
            f"The plan was made for another model. There are: {', '.join(given)}. "
            f"Received: a plan for {unknown}"
        )
    places = _places(model, {path: given[path] for path in targets})
    checks = _Checks(model, plan, list(given))
    later = [
        given[path].variable
        for path, target in targets.items()
        if given[path].storage is None
        and (target.is_compact or (target.draw is not None and target.draw.sets_values))
    ]

    def replace(layer: Any, path: str, own: Any) -> Any:
        keys = places.get(id(layer), {})

        def make() -> Any:
            if not keys:
                return None
            here = {key: targets.pop(full) for key, full in keys.items()}
            weights = {key: given[full] for key, full in keys.items()}
            return _form(own, here, weights, is_copy=own is not layer)

        return make() if plan.around is None else plan.around(layer, own, make)

    result = rewrite(model, replace, checks.complete, later, in_place)
    plan.check(result)
    if result is not model:
        remember_origin(result, model)
    return result


def _places(model: Any, weights: Mapping[str, PrunableWeight]) -> dict[int, dict[str, str]]:
    """The layers to replace, by `id`: the paths of their kernels by the names below the layer."""
    places = places_to_wrap(model, [w for w in weights.values() if w.storage is None])
    held = {id(w.variable): path for path, w in weights.items() if w.storage is not None}
    for layer, path in walk(model, "") if held else ():
        keys = {key: held.get(id(own.weight.variable)) for key, own in storages_of(layer).items()}
        chosen = {key: full for key, full in keys.items() if full is not None}
        if chosen and len(chosen) < len(keys):
            raise NotPrunableError(
                "All kernels of a wrapped layer are converted or quantized, or none. "
                f"Received: some of {path!r}: {sorted(chosen)}"
            )
        if chosen:
            places[id(layer)] = chosen
    return places


def _form(
    own: Any, targets: Mapping[str, Target], weights: Mapping[str, PrunableWeight], *, is_copy: bool
) -> Any:
    """The new layer, built, for one whose kernels become `targets`, by their names below it."""
    (storage,) = {target.storage for target in targets.values()}
    if storage == "dense":
        return plain_layer(own)
    if storage == "kept":
        new = body_of(own)
        new.set_quantizer(next(iter(targets.values())).quantizer)
        return new
    with weights_set_later():
        return _sparse_form(own, targets, weights, storage, is_copy)


def _sparse_form(
    own: Any,
    targets: Mapping[str, Target],
    weights: Mapping[str, PrunableWeight],
    storage: str,
    is_copy: bool,
) -> Any:
    held = storages_of(own)
    draws = {key: target.draw or mask_of(held.get(key)) for key, target in targets.items()}
    if storage == "blocks":
        values = {key: held.get(key) or weight for key, weight in weights.items()}
        new = _on_blocks(own, targets, draws, values)
        if new is not None:
            return new
    kind = FixedMask if storage == "masked" else CompactMask
    table = {
        key: target.parametrization
        or kind(mask=draws[key].mask, initializer=draws[key].initializer)
        for key, target in targets.items()
    }
    body = plain_layer(own) if held else body_of(own)
    quantizer = next(iter(targets.values())).quantizer
    options = {"name": own.name, "trainable": own.trainable, "quantizer": quantizer}
    wrapper = PrunableLayer(body, table, **options)
    wrapper.build()
    for key, made in wrapper.parametrizations.items():
        drawn = draws[key]
        kernel = drawn.kernel if drawn is not None and drawn.sets_values else None
        if kernel is not None:
            made.assign_raw(kernel)
        elif is_copy and not held and made.compact:  # whose dense copy has no value
            made.assign_raw(weights[key].variable.value)
        if kernel is None or not made.movable:
            made.settle()  # what is drawn is zero where its mask is not live
        if drawn is not None and drawn.fresh:
            made.mark_as_drawn(kernel)
    return wrapper


def mask_of(storage: Any) -> Any:
    if storage is None:
        return None
    structure = getattr(storage, "structure", None)  # of a MagnitudeMask
    block = (structure.rows, structure.cols) if isinstance(structure, Block) else None
    return Draw(storage.mask_value(), None, storage.drawn_by, storage.is_as_drawn(), block)


def _on_blocks(
    own: Any, targets: Mapping[str, Target], draws: Mapping[str, AnyDraw], values: Mapping[str, Any]
) -> Any:
    """The layer of live blocks, built, or `None` where layer or masks have no such form."""
    # `values` have kernels to keep, as `raw_value()`.
    plain = own.layer if storages_of(own) else own
    try:
        new = blocks_like(plain, draws, {key: t.block for key, t in targets.items()}, values)
    except (NotPrunableError, LayoutError, KeyError):
        return None
    new.trainable = own.trainable
    new.build_like(plain)
    for key, drawn in draws.items():
        storage: Any = storages_of(new)[key]
        before = getattr(values[key], "weight", values[key]).variable
        storage.weight.variable.trainable = before.trainable
        if _is_in_place(drawn):
            storage.set_drawn(drawn.blocks)  # type: ignore[union-attr]
            continue
        kernel: Any = drawn.kernel if drawn.sets_values else values[key].raw_value()
        storage.set_kernel(np.where(drawn.mask, kernel, 0.0), drawn.mask)
        if drawn.fresh:
            storage.mark_as_drawn()
    return new


def blocks_like(
    plain: Any, draws: Mapping[str, AnyDraw], blocks: Mapping[str, Any], weights: Mapping[str, Any]
) -> Any:
    """The unbuilt layer of live blocks for a plain one, or an error that says why not."""
    sizes: dict[str, tuple[Any, ...]] = {}
    for key, drawn in draws.items():
        structure = getattr(drawn.initializer, "structure", None)
        found = blocks[key]
        if found is None and isinstance(drawn, Draw):
            found = drawn.block
        if found is None and isinstance(structure, Block):
            found = structure.rows, structure.cols
        if found is None:
            raise NotPrunableError(
                "its mask was not drawn with Block(rows, cols); give `block` if it is one of such "
                f"blocks. Received: structure={structure}"
            )
        if _is_in_place(drawn):
            *_, rows, cols = drawn.blocks.blocks.shape  # type: ignore[union-attr]
            sizes[key.rpartition("/")[2]] = drawn.blocks.density, (rows, cols), None  # type: ignore[union-attr]
            continue
        mask = drawn.mask  # not the nonzero entries: live ones may be zero, at other taps
        weight = getattr(weights[key], "weight", weights[key])
        matrices = (weight.layout or KernelLayout.convolution()).to_canonical(mask)[0]
        side_by_side = np.concatenate([*matrices], axis=-1)
        grid, _ = pattern_of(side_by_side, check_block(found), len(matrices))
        sizes[key.rpartition("/")[2]] = grid.density, found, grid.counts
    density, block, counts = ({k: size[n] for k, size in sizes.items()} for n in range(3))
    return block_layer_like(plain, density=density, block=block, counts=counts, seed=0)


def _is_in_place(drawn: AnyDraw) -> bool:
    """Whether a draw is of blocks along the axes of its layer."""
    return isinstance(drawn, BlockDraw) and drawn.initializer.layout is None


class _Checks:
    """Facts that the result is compared with, noted before anything changes."""

    def __init__(self, model: Any, plan: Plan, before: list[str]) -> None:
        check_built(model)
        self._model, self._plan, self._before = model, plan, before
        drawn = {path: target.draw for path, target in plan.targets.items()}
        self._live = {path: draw.live for path, draw in drawn.items() if draw is not None}
        self._quantized = {path for path, own in plan.targets.items() if own.quantizer is not None}
        self._paths = list(plan.targets)
        self._rounds = bool(self._quantized) or plan.around is not None
        self._same = SameFunction(model) if plan.keeps_function else None
        self._optimizer = getattr(model, "optimizer", None) if plan.keeps_training else None
        if not getattr(self._optimizer, "built", False):
            self._optimizer = None
        else:
            refuse_other_slots(self._optimizer, [weight.variable for weight in plan.weights])
        self._variables = _without_support(model) if plan.keeps_training else []

    def complete(self, result: Any) -> Any:
        if self._same is not None:
            self._same.check(result)
        else:
            self._check_counts(result)
        if self._plan.keeps_training and compile_like(result, self._model) and self._optimizer:
            self._carry_slots(result)
        return result

    def _check_counts(self, result: Any) -> None:
        found = prunable_weights(result, unregistered=True)
        stored = {weight.path: weight for weight in found if weight.storage is not None}
        wrong = set(self._before) ^ {weight.path for weight in found}
        wrong |= set(self._paths) - stored.keys()
        # All processes gather live counts, so the order must be the same.
        live = self._live.items()
        wrong |= {path for path, n in live if path not in wrong and stored[path].live != n}
        rounded = {path for path, w in stored.items() if getattr(w.storage, "quantizer", None)}
        wrong |= self._quantized - rounded
        if wrong or len(found) != len(self._before):
            raise NotPrunableError(
                "The new model would not have the kernels of the given one, each with the mask "
                f"and quantizer that were planned. There were: {self._before}. "
                f"Received: others for {sorted(wrong)}"
            )
        if result is not self._model and not self._rounds:
            probe_of_copy(self._model, result).check(result)

    def _carry_slots(self, result: Any) -> None:
        result.optimizer.build(result.trainable_variables)
        pairs = zip(self._variables, _without_support(result), strict=True)
        partners = {id(old): now for old, now in pairs}
        storages = {weight.path: weight.storage for weight in prunable_weights(result)}
        stored: dict[int, Any] = {
            id(w.variable): (w.storage, storages[w.path]) for w in self._plan.weights
        }

        def converted(variable: Any, slot: np.ndarray, start: float) -> np.ndarray:
            if id(variable) not in stored:
                return slot
            old, new = stored[id(variable)]
            found: np.ndarray = new.slot_from_dense(old.slot_to_dense(slot, start))
            return found

        copy_slots(self._optimizer, result.optimizer, partners, converted)


def _without_support(model: Any) -> list[Any]:
    """Kernels, then other weights but for masks and indices: the same order in any storage."""
    own = [storage for layer, _ in walk(model, "") for storage in storages_of(layer).values()]
    support = {id(variable) for storage in own for variable in storage.support()}
    kernels = sorted(prunable_weights(model), key=lambda weight: weight.path)
    first = [weight.variable for weight in kernels]
    left_out = support | {id(variable) for variable in first}
    return first + [variable for variable in model.weights if id(variable) not in left_out]


class SameFunction:
    """Effective kernels of a model, to the bit, number of other weights, and outputs (`Probe`)."""

    def __init__(self, model: Any) -> None:
        self._name = getattr(model, "name", model)
        # A layer whose kernel is a product may become two layers: only outputs are compared.
        self._divided = tuple(
            f"{path}/"
            for layer, path in walk(model, "")
            if any(isinstance(own, LowRankSoftThreshold) for own in storages_of(layer).values())
        )
        self._kernels, self._others = self._weights_of(model)
        self._probe = Probe(model, always=bool(self._divided))

    def check(self, model: Any) -> None:
        kernels, others = self._weights_of(model)
        paths = sorted(kernels.keys() | self._kernels.keys())
        wrong = [path for path in paths if kernels.get(path) != self._kernels.get(path)]
        if wrong or (others != self._others and not self._divided):
            raise NotPrunableError(
                f"The model {self._name!r} would not keep all of its weights. Received: other "
                f"values or none for {wrong}; {others} weights besides kernels, not {self._others}"
            )
        self._probe.check(model)

    def _weights_of(self, model: Any) -> tuple[dict[str, str], int]:
        """Digests of kernels by path, and the number of weights that are not beside kernels."""
        kernels = {
            # Plus 0.0: a dropped entry may be -0.0 in one form, and 0.0 in another.
            weight.path: digest_of(weight.value + 0.0)
            for weight in prunable_weights(model, unregistered=True)
            if not weight.path.startswith(self._divided)
        }
        return kernels, len({id(variable) for variable in model.weights} - beside_kernels(model))


class Probe:
    """The outputs of a model for one sample, if inputs are known, and layers not all Keras'."""

    def __init__(
        self, model: Any, values: Iterable[tuple[Any, Any]] = (), *, always: bool = False
    ) -> None:
        self._name = getattr(model, "name", model)
        self._sample = _sample_for(model) if always or _is_of_others(model) else None
        self._outputs: list[np.ndarray] | None = None
        if self._sample is None:
            return
        try:
            found, again = (_outputs(model, self._sample, values) for _ in range(2))
        except Exception:  # of someone else's code, on inputs that it has not chosen
            return
        # Layers that draw random numbers in calls never give the same twice.
        if all(np.isfinite(o).all() for o in found) and all(map(np.array_equal, found, again)):
            self._outputs = found

    def check(self, model: Any) -> None:
        if self._outputs is None:
            return
        # Live blocks and products sum in another order.
        types = {layer.compute_dtype for layer, _ in walk(model, "")}
        tolerance = 1e-3 if types <= {"float32", "float64"} else 0.1
        for before, after in zip(self._outputs, _outputs(model, self._sample), strict=True):
            error = float(np.max(np.abs(after - before), initial=0.0))
            scale = float(np.max(np.abs(before), initial=1e-6))
            if not error <= tolerance * scale:
                raise NotPrunableError(
                    f"The model {self._name!r} would compute something else, although its weights "
                    "are correct: its code depends on the class of a layer, or uses a variable "
                    f"where Keras does not see it. Received: outputs of up to {scale:.3g} that "
                    f"differ by up to {error:.3g} for one sample"
                )


def probe_of_copy(model: Any, copy: Any) -> Probe:
    """The outputs that a model would have with the effective kernels of a copy of it."""
    if not _is_of_others(model):
        return Probe(model)  # which compares nothing
    theirs = {weight.path: weight for weight in prunable_weights(copy, unregistered=True)}
    ours = prunable_weights(model, unregistered=True)
    found = ((weight.variable, theirs[weight.path].value) for weight in ours)  # one at a time
    return Probe(model, [(v, keras.ops.convert_to_tensor(value, v.dtype)) for v, value in found])


def beside_kernels(model: Any) -> set[int]:
    """Masks, indices, thresholds and other variables beside kernels, by `id`."""
    found: set[int] = set()
    for layer, _ in walk(model, ""):
        found |= {id(v) for storage in storages_of(layer).values() for v in storage.support()}
        if hasattr(layer, "transparent_path"):
            found |= {id(variable) for variable in own_variables(layer)}
    return found


def _is_of_others(model: Any) -> bool:
    """Whether a model holds, or is of, a class that is neither Keras' nor ours."""
    packages = {type(layer).__module__.partition(".")[0] for layer, _ in walk(model, "")}
    return not packages <= {"keras", __name__.partition(".")[0]}


def _sample_for(model: Any) -> Any:
    """Inputs of batch one, or `None` where it is not known what they are like."""
    specs = open_specs(model)
    rng = np.random.default_rng(0)

    def draw(spec: Any) -> Any:
        shape = (1, *(8 if size is None else size for size in spec.shape[1:]))
        # From [0, 1): it may be cast to an index, which is 0 then.
        return keras.ops.convert_to_tensor(rng.random(shape), dtype=spec.dtype)

    try:
        return None if specs is None else keras.tree.map_structure(draw, specs)
    except Exception:  # strings and the like
        return None


def _outputs(model: Any, sample: Any, values: Iterable[tuple[Any, Any]] = ()) -> list[np.ndarray]:
    # In a scope that takes all updates, so that no state of the model changes.
    with keras.StatelessScope(), VariableOverrides(values), from_zero_states(model):
        outputs = keras.tree.flatten(model(sample, training=False))
    # A class that is changed may round its numbers, or find another largest one, elsewhere.
    return [to_numpy(o) for o in outputs if keras.backend.is_float_dtype(o.dtype)]
