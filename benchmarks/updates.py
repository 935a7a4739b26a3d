"""Costs of distributed training: updates of masks, and bytes exchanged.

    python benchmarks/updates.py NAME [options]

The measurements:

- `mask_updates`: time and traffic of one update of masks or thresholds, ranked by NumPy and on
  the device.
- `traffic`: bytes that two workers all-reduce in every training step, counted in the compiled
  program.
"""

import json
import os
import re
import statistics
import time
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from record import RESULTS, chosen, described, finished, machine, markdown, parsed, write

import keras_sparse_ortho as kso
from keras_sparse_ortho._optimizer_slots import zero_slots
from keras_sparse_ortho.callbacks import SET, RigL, TargetDensity, UpdateMasks

# --- mask_updates ---------------------------------------------------------------------------------


# Steps and updates are timed apart.
warnings.simplefilter("ignore", kso.errors.DensityWarning)

DENSITY = 0.1
LAYERS = 4
LINES = RESULTS / "updates.jsonl"
BLOCK = 25  # divides the sides of the layers
STORAGE = {"fixed": "", "compact": ", compact", "blocks": f", blocks {BLOCK}"}
_moved = {"to host": 0, "to device": 0}


def count_bytes() -> None:
    """Counts arrays that are converted to and from NumPy, from now on."""
    to_numpy, to_tensor = keras.ops.convert_to_numpy, keras.ops.convert_to_tensor

    def counted_to_numpy(x):
        found = to_numpy(x)
        _moved["to host"] += found.nbytes
        return found

    def counted_to_tensor(x, *args, **kwargs):
        if isinstance(x, np.ndarray):
            _moved["to device"] += x.nbytes
        return to_tensor(x, *args, **kwargs)

    keras.ops.convert_to_numpy, keras.ops.convert_to_tensor = counted_to_numpy, counted_to_tensor


def network(kind: str, width: int) -> keras.Model:
    """A trained step of the MLP, with masks, thresholds or scheduled masks."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(width, use_bias=False) for _ in range(LAYERS)]
    options = {"density": DENSITY, "block": BLOCK, "use_bias": False}
    options["kernel_initializer"] = "glorot_uniform"
    blocks = [kso.layers.BlockSparseDense(width, seed=k, **options) for k in range(LAYERS)]
    dense = keras.Sequential([keras.Input((width,)), *layers])
    always = kso.schedules.Constant(DENSITY, 0, 1_000_000, 1)
    made = {
        "fixed": lambda: kso.prune(dense, DENSITY),
        "gmp": lambda: kso.parametrize(dense, kso.MagnitudeMask(always)),
        "dnw": lambda: kso.parametrize(dense, kso.parametrizations.StraightThroughTopK(always)),
        "str": lambda: kso.parametrize(dense, kso.SoftThreshold()),
        "compact": lambda: kso.convert(kso.prune(dense, DENSITY), "compact"),
        "blocks": lambda: keras.Sequential([keras.Input((width,)), *blocks]),
    }
    model = made[kind]()
    model.compile("adam", "mse")
    model.fit(*batch(width), batch_size=32, verbose=0)
    return model


def batch(width: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.random.default_rng(0).normal(size=(2, 32, width)).astype("float32")
    return x, y


def armed(callback, model):
    """A callback as in the middle of a `fit`."""
    callback.set_model(model)
    callback.set_params({"epochs": 1, "steps": 1_000_000})
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    return callback


def updates(kind: str, model: keras.Model, width: int):
    """The updates of one kind of model: by name, what arms one and the call to be timed."""
    if kind in ("gmp", "dnw"):
        yield kind.upper(), lambda: armed(UpdateMasks(), model), lambda own: own.on_step(5, 1)
    if kind in STORAGE:
        end = {"frequency": 1, "end_step": 1_000_000}
        yield "SET" + STORAGE[kind], lambda: armed(SET(**end), model), lambda own: own.move(5)
        rigl = RigL(batch(width), batch_size=32, **end)  # its gradient is compiled once
        yield "RigL" + STORAGE[kind], lambda: armed(rigl, model), lambda own: own.move(5)
    if kind == "str":

        def steering():
            cubic = kso.schedules.Cubic(DENSITY, 0, 10, frequency=5)
            return armed(TargetDensity(DENSITY, cubic), model)

        yield "TargetDensity, offset", steering, lambda own: own.on_step(5, 1)
        yield "TargetDensity, freeze", steering, lambda own: own.on_step(10, 1)


def sorted_freeze(model: keras.Model) -> None:
    """The first implementation of the freeze, in NumPy, with a sort."""
    thresholds = [weight.parametrization for weight in kso.prunable_weights(model, flops=False)]
    critical = [threshold.critical_offsets() for threshold in thresholds]
    everything = np.concatenate([np.ravel(c) for c in critical])
    count = round(DENSITY * everything.size)
    ranked = np.partition(everything, everything.size - count - 1)
    below = float(ranked[everything.size - count - 1])
    above = float(ranked[everything.size - count :].min())
    for threshold in thresholds:
        threshold.offset.assign((below + above) / 2)
    order = np.argsort(-everything, kind="stable")
    live = np.zeros(everything.size, dtype=bool)
    live[order[:count]] = True
    parts = np.split(live, np.cumsum([c.size for c in critical])[:-1])
    for threshold, part, c in zip(thresholds, parts, critical, strict=True):
        mask = part.reshape(c.shape)
        raw = threshold.weight.variable
        value = keras.ops.convert_to_numpy(threshold.effective(keras.ops.convert_to_tensor(raw)))
        least = np.finfo(np.float32).tiny * np.sign(threshold.weight.raw_value())
        raw.assign(np.where(mask, np.where(value == 0, least, value), 0).astype(value.dtype))
        threshold.active.assign(0.0)
        zero_slots(model.optimizer, raw, ~mask)


def state(model: keras.Model) -> list:
    return [*model.variables, *model.optimizer.variables]


def wait(model: keras.Model) -> None:
    if keras.backend.backend() == "jax":
        import jax

        jax.block_until_ready([variable.value for variable in state(model)])


def measure(name, arm, call, model, places, rounds):
    """Median wall-clock and CPU seconds, and bytes, for each place."""
    kept = [keras.ops.copy(variable.value) for variable in state(model)]
    found = {place: [] for place in places}
    for _ in range(rounds + 1):  # the first compiles
        for place in places:
            for variable, value in zip(state(model), kept, strict=True):
                variable.assign(value)
            own = None if place == "sorted" else arm()
            wait(model)
            _moved.update({"to host": 0, "to device": 0})
            start, worked = time.perf_counter(), time.process_time()
            if place == "sorted":
                sorted_freeze(model)
            else:
                call(own)
            wait(model)
            times = time.perf_counter() - start, time.process_time() - worked
            found[place].append((*times, *(n / 1e6 for n in _moved.values())))
    for place, samples in found.items():
        medians = [statistics.median(column) for column in zip(*samples[1:], strict=True)]
        print(name, place, medians, flush=True)
        yield place, medians


def replace_lines(lines: list[dict], column: str) -> None:
    """Writes lines to `results/updates.jsonl`, in place of the lines that have a column."""
    kept = [line for line in finished(LINES) if column not in line]
    LINES.parent.mkdir(parents=True, exist_ok=True)
    LINES.write_text("".join(json.dumps(line) + "\n" for line in [*kept, *lines]))


def mask_updates() -> None:
    """Time and traffic of one update of masks or thresholds, ranked by NumPy and on the device.

        KERAS_BACKEND=jax python benchmarks/updates.py mask_updates
        KERAS_BACKEND=jax python benchmarks/updates.py mask_updates --millions 1 --rounds 7

    Writes `results/updates.jsonl` and `results/updates.md`. An MLP of four square layers, Adam,
    density 0.1. Every rival begins with the same weights, masks and moments; the runs of all
    rivals are interleaved in one process, and medians are shown. "sorted" is the first
    implementation of TargetDensity's freeze: a stable sort of all critical offsets in NumPy. The
    rows "device" of the table are of commit 936aadd, the last with code for it. "to host" and
    "to device" are the bytes of arrays that pass between NumPy and the backend; on a CPU they are
    views or copies, on an accelerator they cross its bus.
    """
    parser = described(mask_updates)
    parser.add_argument("--millions", nargs="+", type=int, default=[1, 25])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parsed(parser, {"millions": [1], "rounds": 1})
    count_bytes()
    rows, lines = [], []
    for millions in arguments.millions:
        width = round((millions * 1e6 / LAYERS) ** 0.5)
        for kind in ("gmp", "dnw", "fixed", "str", "compact", "blocks"):
            model = network(kind, width)
            for name, arm, call in updates(kind, model, width):
                places = ["host"]
                places += ["sorted"] if name.endswith("freeze") else []
                for place, found in measure(name, arm, call, model, places, arguments.rounds):
                    wall, cpu, to_host, to_device = found
                    line = {"millions": millions, "update": name, "ranked": place, "wall": wall}
                    lines.append({**line, "cpu": cpu, "host_mb": to_host, "device_mb": to_device})
                    figures = [f"{wall:.3f}", f"{cpu:.3f}", f"{to_host:.1f}", f"{to_device:.1f}"]
                    rows.append([str(millions), name, place, *figures])
            del model
            keras.utils.clear_session()
    header = ["million weights", "update", "ranked", "seconds", "of all cores"]
    header += ["to host [MB]", "to device [MB]"]
    text = f"# Updates of masks and thresholds on {keras.backend.backend()}, CPU\n\n{machine()}, "
    text += f"Keras {keras.__version__}. MLP of {LAYERS} square layers, Adam, float32, density "
    text += f"{DENSITY}; medians of {arguments.rounds} interleaved runs in one process. `sorted` "
    text += "is the freeze as it was first. RigL's has its dense gradient in it.\n\n"
    replace_lines(lines, "update")
    write("updates", text + markdown(header, rows))


# --- traffic --------------------------------------------------------------------------------------


FORMS = ("dense", "masked", "compact", "blocks")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
_COLLECTIVE = re.compile(
    r"= (?P<shape>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<sizes>[\d,]*)\]")


def traffic_network(form: str, width: int, density: float, block: int) -> keras.Model:
    """An MLP of square layers in one of the forms, compiled with Adam."""

    def layer(k: int) -> keras.layers.Layer:
        plain = {"use_bias": False, "activation": "relu", "name": f"hidden_{k}"}
        if form == "blocks":
            options = {"density": density, "block": block, "seed": k}
            return kso.layers.BlockSparseDense(width, **options, **plain)
        dense = keras.layers.Dense(width, **plain)
        masks = {"masked": kso.FixedMask, "compact": kso.parametrizations.CompactMask}
        return kso.PrunableLayer(dense, masks[form](density)) if form in masks else dense

    model = keras.Sequential([keras.Input((width,)), *(layer(k) for k in range(LAYERS))])
    model.compile("adam", "mse")
    return model


def compiled_step(model: keras.Model, x: np.ndarray, y: np.ndarray) -> str:
    """The optimized program of a step of `fit`, under the distribution that is set."""
    import jax

    layout = keras.distribution.distribution().get_data_layout(x.shape)
    batch = tuple(jax.device_put(part, layout.backend_layout) for part in (x, y))
    model._symbolic_build(data_batch=batch)
    model.optimizer.build(model.trainable_variables)
    state = tuple(
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    step = jax.jit(lambda state, batch: model.train_step(state, batch), donate_argnums=0)
    # `make test` has XLA compile with the older emitters, which share work out in loops.
    older = "xla_cpu_use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", "")
    options = {"xla_cpu_use_fusion_emitters": True} if older else None
    return step.lower(state, batch).compile(options).as_text()


def collectives(program: str) -> dict[str, int]:
    """The bytes of the results of each kind of exchange in a program."""
    if " while(" in program:
        raise ValueError("The bytes exchanged in a loop cannot be counted. Received: a `while`")
    found: dict[str, int] = {}
    for match in _COLLECTIVE.finditer(program):
        sizes = [
            BYTES[part["dtype"]] * int(np.prod([int(n) for n in part["sizes"].split(",") if n]))
            for part in _SHAPE.finditer(match["shape"])
        ]
        found[match["kind"]] = found.get(match["kind"], 0) + sum(sizes)
    return found


def traffic_measure(form: str, width: int, density: float, block: int, batch: int) -> dict:
    """The exchanges of a step of one form, and the size of its weights."""
    model = traffic_network(form, width, density, block)
    x, y = np.zeros((2, batch, width), "float32")
    found = collectives(compiled_step(model, x, y))
    trained = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    return {"form": form, "width": width, "density": density, "trained": trained, **found}


def traffic() -> None:
    """Bytes that two workers all-reduce in every training step, counted in the compiled program.

        python benchmarks/updates.py traffic
        python benchmarks/updates.py traffic --width 2048 --block 64

    Writes `results/updates.jsonl` and `results/traffic.md`. JAX, data parallel over two devices
    (of one CPU: the program is that of two accelerators), Adam, float32. Counted are the operands
    of all `all-reduce` and the results of all `all-gather` in the optimized program of one step:
    the gradients of trained variables, and some scalars such as the loss.
    """
    # Before JAX starts its devices.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    parser = described(traffic)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    arguments = vars(parsed(parser, {"width": 256}))
    del arguments["quick"]
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    lines = [traffic_measure(form, **arguments) for form in FORMS]
    replace_lines(lines, "form")
    kinds = sorted({kind for line in lines for kind in line if "-" in kind})
    totals = {line["form"]: sum(line.get(kind, 0) for kind in kinds) for line in lines}
    rows = [
        [
            line["form"],
            f"{line['trained']:,}",
            *(f"{line.get(kind, 0):,}" for kind in kinds),
            f"{totals[line['form']] / totals['dense']:.4f}",
        ]
        for line in lines
    ]
    header = ["form", "trained [bytes]", *(f"{kind} [bytes]" for kind in kinds), "ratio to dense"]
    text = f"# Bytes that two workers exchange in a training step\n\n{machine()}, Keras "
    text += f"{keras.__version__}. JAX, `keras.distribution.DataParallel` over two devices, Adam, "
    text += f"float32. MLP of {LAYERS} layers of {arguments['width']}, density "
    text += f"{arguments['density']}, blocks of {arguments['block']}. Counted from the optimized "
    text += "program of one step.\n\n"
    write("traffic", text + markdown(header, rows))


if __name__ == "__main__":
    chosen(mask_updates, traffic)
