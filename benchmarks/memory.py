"""Memory, and what is exchanged: of training, of making a model sparse, and of large networks.

python benchmarks/memory.py NAME [options]
"""

import gc
import math
import os
import pathlib
import re
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from record import HERE, finished, last_of_each, machine, markdown, sentences
from runner import Measurement, Run, Setting, grid, main, peak, wall_and_cpu

import keras_sparse_ortho as kso
from keras_sparse_ortho._optimizer_slots import zero_slots
from keras_sparse_ortho.callbacks import SET, RigL, TargetDensity, UpdateMasks
from keras_sparse_ortho.pruning import draw_kernels

# Steps and updates are timed apart.
warnings.simplefilter("ignore", kso.errors.DensityWarning)

L = keras.layers
LAYERS = 4
MASKS = {"masked": kso.FixedMask, "compact": kso.parametrizations.CompactMask}

# --- training -------------------------------------------------------------------------------------

STEPS = 3
FORMS = (
    "dense",
    "masked",
    "compact",
    "blocks 32",
    "blocks 64",
    "sparsify 32",
    "any 32",
    "any 64",
)
STORED = ("weights", "optimizer", "file")
FIGURES = (*STORED, "peak, built", "peak, trained")


class Training(Measurement):
    """Memory of training: weights, optimizer, file and process, in every storage.

        KERAS_BACKEND=jax        python benchmarks/memory.py training
        KERAS_BACKEND=tensorflow python benchmarks/memory.py training --width 2048

    An MLP of four layers of 4096 units is built, trained three steps by Adam, and saved, in a fresh
    process for each form. Sparse forms have density 0.1. "Peak" is the largest resident set of the
    process, less what it has after its imports. "Blocks" are made by the layers themselves, "any"
    not regular; "sparsify" makes the same from a dense model, which is freed before training. The
    page shows the last of each kind.
    """

    page = lines = "memory"
    resumes = False
    apart = True
    settings = {
        "width": Setting(4096, quick=512),
        "batch": Setting(128),
        "density": Setting(0.1),
        "forms": Setting(
            [*FORMS], choices=FORMS, quick=["dense", "masked", "blocks 32"]
        ),
    }

    def runs(self) -> list[Run]:
        given = self.given
        sizes = {
            "width": [given.width],
            "batch": [given.batch],
            "density": [given.density],
        }
        return grid(form=given.forms, **sizes)

    def run(self, which: Run) -> Run:
        """Builds, trains and saves one form in this process; all figures in MiB."""
        width, batch = which["width"], which["batch"]
        rng = np.random.default_rng(0)
        x = rng.normal(size=(STEPS * batch, width)).astype("float32")
        # Keras loads TensorFlow, if there is one, when it first copies or saves a layer.
        keras.saving.serialize_keras_object(keras.initializers.Zeros())
        start = peak()
        model = model_in_form(which["form"], width, which["density"])
        built = peak()
        on_torch = keras.backend.backend() == "torch"
        model.compile("adam", "mse", jit_compile=not on_torch)
        model.fit(x, x, batch_size=batch, verbose=0)
        trained = peak()
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "model.keras"
            model.save(file)
            size = file.stat().st_size / 2**20
        return {
            "backend": keras.backend.backend(),
            "weights": mebibytes(model.weights),
            "optimizer": mebibytes(model.optimizer.variables),
            "file": size,
            "peak, built": built - start,
            "peak, trained": trained - start,
        }

    def report(self, lines: list[Run]) -> str:
        by_kind = last_of_each(
            lines, "backend", "width", "batch", "density", "form"
        )
        rows = []
        for kind in sorted(
            by_kind, key=lambda kind: (kind[:4], FORMS.index(kind[4]))
        ):
            line = by_kind[kind]
            dense = by_kind.get((*kind[:4], "dense"))
            if dense is None:
                continue
            stored = sum(line[name] for name in STORED) / sum(
                dense[name] for name in STORED
            )
            trained = line["peak, trained"] / dense["peak, trained"]
            figures = [f"{line[name]:.0f}" for name in FIGURES]
            names = [*map(str, kind[:3]), kind[4]]
            rows.append([*names, *figures, f"{stored:.3f}", f"{trained:.2f}"])
        about = sentences(
            f"""
            {machine()}. MLP of {LAYERS} layers, Adam, float32, sparse forms at density 0.1; each in
            a process of its own. Stored: weights, optimizer and file, as a ratio to dense. Peak:
            the largest resident set, less that after the imports; blocks 32 are made by
            layers.BlockSparseDense, sparsify 32 from a dense model by sparsify(storage="blocks").
            """
        )
        header = [
            "backend",
            "width",
            "batch",
            "form",
            *FIGURES,
            "stored, ratio",
            "peak, ratio",
        ]
        return "# Memory of training, MiB\n\n" + about + markdown(header, rows)


def model_in_form(form: str, width: int, density: float) -> keras.Model:
    """The MLP in one of `FORMS`."""
    kind, _, size = form.partition(" ")
    layers = [
        layer_in_form(kind, size, width, density, k) for k in range(LAYERS)
    ]
    model = keras.Sequential([keras.Input((width,)), *layers])
    if kind == "sparsify":
        blocks = kso.Block(int(size), int(size), regular=True)
        model = kso.sparsify(
            model,
            density,
            "uniform",
            structure=blocks,
            storage="blocks",
            seed=0,
        )
        gc.collect()
    return model


def layer_in_form(
    kind: str, size: str, width: int, density: float, k: int
) -> keras.Layer:
    """Its layer number `k`."""
    from blocks import uneven_counts

    name = f"hidden_{k}"
    if kind in ("blocks", "any"):
        options = {"density": density, "block": int(size), "seed": k}
        if kind == "any":
            options["counts"] = uneven_counts(width, int(size), density, k)
        return kso.layers.BlockSparseDense(width, "relu", name=name, **options)
    if kind not in MASKS:
        return L.Dense(width, "relu", kernel_initializer="he_normal", name=name)
    start = kso.initializers.ExactOrthogonal(density, seed=k)
    return kso.PrunableLayer(
        L.Dense(width, "relu", kernel_initializer=start, name=name),
        MASKS[kind](),
    )


def mebibytes(variables: list[Any]) -> float:
    """The size of variables."""
    sizes = [
        np.prod(v.shape) * np.dtype(str(v.dtype)).itemsize for v in variables
    ]
    return float(sum(sizes)) / 2**20


# --- sparsify -------------------------------------------------------------------------------------

DENSITY = 0.1
NETWORKS: dict[str, Callable[[], keras.Model]] = {
    "ResNet-50": lambda: keras.applications.ResNet50(weights=None),
    "ConvNeXtTiny": lambda: keras.applications.ConvNeXtTiny(weights=None),
    "transformer": lambda: transformer(),
    "small transformer": lambda: transformer(
        layers=2, width=96, vocabulary=200
    ),
}
ACTIONS = ("clone", "sparsify", "draws", "strip")


class Sparsify(Measurement):
    """Time and memory of making a model sparse, against those of cloning it.

        KERAS_BACKEND=tensorflow python benchmarks/memory.py sparsify
        KERAS_BACKEND=jax        python benchmarks/memory.py sparsify --rounds 5

    Every model has a process of its own, in which `keras.models.clone_model(model)`,
    `sparsify(model, 0.1)`, the drawing of the kernels alone, and `strip` of the sparse model run in
    turn; medians. CPU time (`process_time`, all cores) is given beside wall-clock time, which other
    work on the machine disturbs. Another process measures the largest resident set during one
    `sparsify`, minus that before; it includes the new model's weights and masks. The page shows the
    last of each kind.
    """

    page = lines = "sparsify"
    resumes = False
    settings = {
        "models": Setting(
            [*NETWORKS][:3], choices=NETWORKS, quick=["small transformer"]
        ),
        "rounds": Setting(5, quick=2),
    }

    def runs(self) -> list[Run]:
        return grid(
            model=self.given.models,
            backend=[keras.backend.backend()],
            rounds=[self.given.rounds],
        )

    def make(self, which: Run) -> list[Run]:
        """Measures time and memory in two processes."""
        figures = {
            part: self.in_new_process(which | {"part": part})
            for part in ("time", "memory")
        }
        about = {"load": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d")}
        return [self.add(which | figures | about)]

    def run(self, which: Run) -> Run:
        build = NETWORKS[which["model"]]
        if which["part"] == "memory":
            return sparsify_memory(build)
        return sparsify_times(build(), which["rounds"])

    def report(self, lines: list[Run]) -> str:
        rows = []
        for (name, backend), line in sorted(
            last_of_each(lines, "model", "backend").items()
        ):
            figures, used = line["time"], line["memory"]
            cpu, wall = figures["cpu"], figures["wall"]
            row = [name, backend, f"{figures['weights'] / 1e6:.1f}"]
            row += [f"{cpu[action]:.2f}" for action in ACTIONS]
            row += [
                f"{clock['sparsify'] / clock['clone']:.1f}"
                for clock in (cpu, wall)
            ]
            copies = used["peak"] / (figures["weights"] * 4 / 2**20)
            rows.append(
                [
                    *row,
                    f"{used['peak']:.0f}",
                    f"{copies:.2f}",
                    f"{line['load']:.0f}",
                ]
            )
        header = [
            "model",
            "backend",
            "million weights",
            *(f"{action}, s" for action in ACTIONS),
        ]
        header += [
            "sparsify / clone",
            "by the clock",
            "peak, MiB",
            "in copies",
            "load",
        ]
        about = (
            "`benchmarks/memory.py sparsify`, density 0.1, exactly orthogonal kernels. Seconds of "
            "the\nprocessor, medians of interleaved runs; the last column but one is the largest "
            "further\nmemory during `sparsify` in copies of the float32 kernels: one is the new "
            "model's, a\nquarter its masks. `load`: of the machine, afterwards. "
            f"{machine()}.\n\n"
        )
        title = "# Time and memory of making a model sparse\n\n"
        return title + about + markdown(header, rows)


def transformer(
    layers: int = 14, width: int = 768, vocabulary: int = 2000
) -> object:
    """Pre-norm blocks of attention and a feed-forward part: 100 million weights."""
    import keras

    x = ids = keras.Input((64,), dtype="int32")
    x = keras.layers.Embedding(vocabulary, width, name="tokens")(x)
    for k in range(layers):
        y = keras.layers.LayerNormalization(name=f"norm_{k}")(x)
        y = keras.layers.MultiHeadAttention(
            12, width // 12, name=f"attention_{k}"
        )(y, y)
        x = keras.layers.Add(name=f"attended_{k}")([x, y])
        y = keras.layers.LayerNormalization(name=f"second_norm_{k}")(x)
        y = keras.layers.Dense(4 * width, activation="gelu", name=f"wide_{k}")(
            y
        )
        y = keras.layers.Dense(width, name=f"narrow_{k}")(y)
        x = keras.layers.Add(name=f"fed_{k}")([x, y])
    return keras.Model(ids, keras.layers.Dense(10, name="head")(x))


def sparsify_times(model: keras.Model, rounds: int) -> Run:
    """Wall-clock and CPU seconds of each action."""
    weights = kso.prunable_weights(model)
    sparse = kso.sparsify(model, DENSITY, seed=0)
    cases = {
        "clone": lambda: keras.models.clone_model(model),
        "sparsify": lambda: kso.sparsify(model, DENSITY, seed=0),
        "draws": lambda: draw_kernels(
            model, weights, DENSITY, "erk", "exact_orthogonal", seed=0
        ),
        "strip": lambda: kso.strip(sparse),
    }
    times = wall_and_cpu(cases, rounds)
    return {
        "weights": int(sum(weight.size for weight in weights)),
        "matrices": len(weights),
        "wall": {action: wall for action, (wall, _) in times.items()},
        "cpu": {action: cpu for action, (_, cpu) in times.items()},
    }


def sparsify_memory(build: Callable[[], keras.Model]) -> Run:
    """The largest resident set during one `sparsify`, minus that before it, in MiB."""
    small = keras.Sequential([keras.Input((8,)), L.Dense(8), L.Dense(8)])
    kso.sparsify(small, 0.5, seed=0)  # what is loaded and compiled once
    model = build()
    gc.collect()
    before = max(resident(), peak())
    sparse = kso.sparsify(model, DENSITY, seed=0)
    most = peak() - before
    sizes = [getattr(weight.value, "nbytes", 0) for weight in sparse.weights]
    return {"peak": most, "model": sum(sizes) / 2**20}


def resident() -> float:
    """Resident memory now, in MiB."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


# --- mask_updates ---------------------------------------------------------------------------------

BLOCK = 25  # divides the sides of the layers
STORAGE = {"fixed": "", "compact": ", compact", "blocks": f", blocks {BLOCK}"}
UPDATED = ("gmp", "dnw", "fixed", "str", "compact", "blocks")
_moved = {"to host": 0, "to device": 0}


class MaskUpdates(Measurement):
    """Time and traffic of one update of masks or thresholds, ranked by NumPy and on the device.

        KERAS_BACKEND=jax python benchmarks/memory.py mask_updates
        KERAS_BACKEND=jax python benchmarks/memory.py mask_updates --millions 1 --rounds 7

    An MLP of four square layers, Adam, density 0.1. Every rival begins with the same weights, masks
    and moments; the runs of all rivals are interleaved in one process, and medians are shown.
    "sorted" is the first implementation of TargetDensity's freeze: a stable sort of all critical
    offsets in NumPy. "to host" and "to device" are the bytes of arrays that pass between NumPy and
    the backend; on a CPU they are views or copies, on an accelerator they cross its bus. The page
    shows the last of each kind.
    """

    page = lines = "updates"
    resumes = False
    settings = {
        "millions": Setting([1, 25], quick=[1]),
        "rounds": Setting(5, quick=1),
    }

    def measure(self) -> None:
        """Counts what is converted."""
        count_bytes()
        super().measure()

    def runs(self) -> list[Run]:
        return grid(millions=self.given.millions, kind=UPDATED)

    def run(self, which: Run) -> Iterator[Run]:
        keras.utils.clear_session()
        width = round((which["millions"] * 1e6 / LAYERS) ** 0.5)
        model = network(which["kind"], width)
        for name, arm, call in updates_of(which["kind"], model, width):
            places = ["host", "sorted"] if name.endswith("freeze") else ["host"]
            for place, medians in measured(
                arm, call, model, places, self.given.rounds
            ):
                names = ("wall", "cpu", "host_mb", "device_mb")
                yield {"update": name, "ranked": place} | dict(
                    zip(names, medians, strict=True)
                )

    def report(self, lines: list[Run]) -> str:
        updates = [line for line in lines if "update" in line]
        rows = []
        for kind, line in last_of_each(
            updates, "millions", "update", "ranked"
        ).items():
            figures = [f"{line[clock]:.3f}" for clock in ("wall", "cpu")]
            figures += [
                f"{line[moved]:.1f}" for moved in ("host_mb", "device_mb")
            ]
            rows.append([*map(str, kind), *figures])
        about = sentences(
            f"""
            {machine()}, Keras {keras.__version__}. MLP of {LAYERS} square layers, Adam, float32,
            density {DENSITY}; medians of {self.given.rounds} interleaved runs in one process.
            `sorted` is the freeze as it was first. RigL's has its dense gradient in it.
            """
        )
        header = [
            "million weights",
            "update",
            "ranked",
            "seconds",
            "of all cores",
        ]
        header += ["to host [MB]", "to device [MB]"]
        title = f"# Updates of masks and thresholds on {keras.backend.backend()}, CPU\n\n"
        return title + about + markdown(header, rows)


def count_bytes() -> None:
    """Counts arrays that are converted to and from NumPy, from now on."""
    to_numpy, to_tensor = (
        keras.ops.convert_to_numpy,
        keras.ops.convert_to_tensor,
    )

    def counted_to_numpy(x):
        array = to_numpy(x)
        _moved["to host"] += array.nbytes
        return array

    def counted_to_tensor(x, *args, **kwargs):
        if isinstance(x, np.ndarray):
            _moved["to device"] += x.nbytes
        return to_tensor(x, *args, **kwargs)

    keras.ops.convert_to_numpy, keras.ops.convert_to_tensor = (
        counted_to_numpy,
        counted_to_tensor,
    )


def network(kind: str, width: int) -> keras.Model:
    """A trained step of the MLP, with masks, thresholds or scheduled masks."""
    keras.utils.set_random_seed(0)
    if kind == "blocks":
        options = {
            "density": DENSITY,
            "block": BLOCK,
            "kernel_initializer": "glorot_uniform",
        }
        layers = [
            kso.layers.BlockSparseDense(
                width, seed=k, use_bias=False, **options
            )
            for k in range(LAYERS)
        ]
    else:
        layers = [L.Dense(width, use_bias=False) for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    always = kso.schedules.Constant(DENSITY, 0, 1_000_000, 1)
    templates = {
        "gmp": kso.MagnitudeMask(always),
        "dnw": kso.parametrizations.StraightThroughTopK(always),
        "str": kso.SoftThreshold(),
    }
    if kind in templates:
        model = kso.parametrize(model, templates[kind])
    elif kind in ("fixed", "compact"):
        model = kso.prune(model, DENSITY)
    if kind == "compact":
        model = kso.convert(model, "compact")
    model.compile("adam", "mse")
    model.fit(*rows_of(width), batch_size=32, verbose=0)
    return model


def rows_of(width: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch of inputs and targets."""
    x, y = (
        np.random.default_rng(0).normal(size=(2, 32, width)).astype("float32")
    )
    return x, y


def armed(callback, model):
    """A callback as in the middle of a `fit`."""
    callback.set_model(model)
    callback.set_params({"epochs": 1, "steps": 1_000_000})
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    return callback


def updates_of(kind: str, model: keras.Model, width: int):
    """The updates of one kind of model: by name, what arms one and the call to be timed."""
    if kind in ("gmp", "dnw"):
        yield (
            kind.upper(),
            lambda: armed(UpdateMasks(), model),
            lambda callback: callback.on_step(5, 1),
        )
    if kind in STORAGE:
        end = {"frequency": 1, "end_step": 1_000_000}
        yield (
            "SET" + STORAGE[kind],
            lambda: armed(SET(**end), model),
            lambda callback: callback.move(5),
        )
        # Its gradient is compiled once.
        rigl = RigL(rows_of(width), batch_size=32, **end)
        yield (
            "RigL" + STORAGE[kind],
            lambda: armed(rigl, model),
            lambda masks: masks.move(5),
        )
    if kind == "str":

        def steering():
            cubic = kso.schedules.Cubic(DENSITY, 0, 10, frequency=5)
            return armed(TargetDensity(DENSITY, cubic), model)

        yield (
            "TargetDensity, offset",
            steering,
            lambda callback: callback.on_step(5, 1),
        )
        yield (
            "TargetDensity, freeze",
            steering,
            lambda callback: callback.on_step(10, 1),
        )


def sorted_freeze(model: keras.Model) -> None:
    """The first implementation of the freeze, in NumPy, with a sort."""
    thresholds = [
        weight.parametrization
        for weight in kso.prunable_weights(model, flops=False)
    ]
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
        value = keras.ops.convert_to_numpy(
            threshold.effective(keras.ops.convert_to_tensor(raw))
        )
        least = np.finfo(np.float32).tiny * np.sign(
            threshold.weight.raw_value()
        )
        raw.assign(
            np.where(mask, np.where(value == 0, least, value), 0).astype(
                value.dtype
            )
        )
        threshold.active.assign(0.0)
        zero_slots(model.optimizer, raw, ~mask)


def state(model: keras.Model) -> list:
    return [*model.variables, *model.optimizer.variables]


def wait(model: keras.Model) -> None:
    if keras.backend.backend() == "jax":
        import jax

        jax.block_until_ready([variable.value for variable in state(model)])


def measured(
    arm: Callable,
    call: Callable,
    model: keras.Model,
    places: list[str],
    rounds: int,
) -> Iterator[tuple[str, list[float]]]:
    """Median wall-clock and CPU seconds, and bytes, for each place."""
    values = [keras.ops.copy(variable.value) for variable in state(model)]
    samples: dict[str, list[tuple[float, ...]]] = {
        place: [] for place in places
    }
    for _ in range(rounds + 1):  # the first compiles
        for place in places:
            for variable, value in zip(state(model), values, strict=True):
                variable.assign(value)
            callback = None if place == "sorted" else arm()
            wait(model)
            _moved.update({"to host": 0, "to device": 0})
            start = time.perf_counter()
            worked = time.process_time()
            if callback is None:
                sorted_freeze(model)
            else:
                call(callback)
            wait(model)
            seconds = time.perf_counter() - start, time.process_time() - worked
            samples[place].append(
                (*seconds, *(count / 1e6 for count in _moved.values()))
            )
    for place, rows in samples.items():
        yield (
            place,
            [
                statistics.median(column)
                for column in zip(*rows[1:], strict=True)
            ],
        )


# --- traffic --------------------------------------------------------------------------------------

TRAFFIC_FORMS = ("dense", "masked", "compact", "blocks")
BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "bf16": 2,
    "f16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
}
_COLLECTIVE = re.compile(
    r"= (?P<shape>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<sizes>[\d,]*)\]")


class Traffic(Measurement):
    """Bytes that two workers all-reduce in every training step, counted in the compiled program.

        KERAS_BACKEND=jax python benchmarks/memory.py traffic
        KERAS_BACKEND=jax python benchmarks/memory.py traffic --width 2048 --block 64

    JAX, data parallel over two devices (of one CPU: the program is that of two accelerators), Adam,
    float32. Counted are the operands of all `all-reduce` and the results of all `all-gather` in the
    optimized program of one step: the gradients of trained variables, and some scalars such as the
    loss. The lines are in the file of `mask_updates`.
    """

    page = "traffic"
    lines = "updates"
    resumes = False
    settings = {
        "width": Setting(1024, quick=256),
        "density": Setting(0.1),
        "block": Setting(32),
        "batch": Setting(64),
    }

    def measure(self) -> None:
        """Asks for two devices before JAX starts its own."""
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        keras.distribution.set_distribution(keras.distribution.DataParallel())
        super().measure()

    def runs(self) -> list[Run]:
        return grid(form=TRAFFIC_FORMS)

    def run(self, which: Run) -> Run:
        given = self.given
        return traffic_measure(
            which["form"], given.width, given.density, given.block, given.batch
        )

    def report(self, lines: list[Run]) -> str:
        by_form = last_of_each(
            [line for line in lines if "form" in line], "form"
        )
        kinds = sorted(
            {kind for line in by_form.values() for kind in line if "-" in kind}
        )
        totals = {
            form: sum(line.get(kind, 0) for kind in kinds)
            for form, line in by_form.items()
        }
        rows = []
        for form, line in by_form.items():
            counts = [f"{line.get(kind, 0):,}" for kind in kinds]
            ratio = f"{totals[form] / totals['dense']:.4f}"
            rows.append([form, f"{line['trained']:,}", *counts, ratio])
        header = [
            "form",
            "trained [bytes]",
            *(f"{kind} [bytes]" for kind in kinds),
        ]
        about = sentences(
            f"""
            {machine()}, Keras {keras.__version__}. JAX, `keras.distribution.DataParallel` over two
            devices, Adam, float32. MLP of {LAYERS} layers of {self.given.width}, density
            {self.given.density}, blocks of {self.given.block}. Counted from the optimized program
            of one step.
            """
        )
        title = "# Bytes that two workers exchange in a training step\n\n"
        return title + about + markdown([*header, "ratio to dense"], rows)


def traffic_network(
    form: str, width: int, density: float, block: int
) -> keras.Model:
    """An MLP of square layers in one of the forms, compiled with Adam."""

    def layer(k: int) -> keras.layers.Layer:
        plain = {"use_bias": False, "activation": "relu", "name": f"hidden_{k}"}
        if form == "blocks":
            options = {"density": density, "block": block, "seed": k}
            return kso.layers.BlockSparseDense(width, **options, **plain)
        dense = L.Dense(width, **plain)
        return (
            kso.PrunableLayer(dense, MASKS[form](density))
            if form in MASKS
            else dense
        )

    model = keras.Sequential(
        [keras.Input((width,)), *(layer(k) for k in range(LAYERS))]
    )
    model.compile("adam", "mse")
    return model


def compiled_step(model: keras.Model, x: np.ndarray, y: np.ndarray) -> str:
    """The optimized program of a step of `fit`, under the distribution that is set."""
    import jax

    layout = keras.distribution.distribution().get_data_layout(x.shape)
    batch = tuple(
        jax.device_put(part, layout.backend_layout) for part in (x, y)
    )
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
    step = jax.jit(
        lambda state, batch: model.train_step(state, batch), donate_argnums=0
    )
    # `make test` has XLA compile with the older emitters, which share work out in loops.
    older = "xla_cpu_use_fusion_emitters=false" in os.environ.get(
        "XLA_FLAGS", ""
    )
    options = {"xla_cpu_use_fusion_emitters": True} if older else None
    return step.lower(state, batch).compile(options).as_text()


def collectives(program: str) -> dict[str, int]:
    """The bytes of the results of each kind of exchange in a program."""
    if " while(" in program:
        raise ValueError(
            "The bytes exchanged in a loop cannot be counted. Received: a `while`"
        )
    counts: dict[str, int] = {}
    for match in _COLLECTIVE.finditer(program):
        sizes = [
            BYTES[part["dtype"]]
            * int(np.prod([int(n) for n in part["sizes"].split(",") if n]))
            for part in _SHAPE.finditer(match["shape"])
        ]
        counts[match["kind"]] = counts.get(match["kind"], 0) + sum(sizes)
    return counts


def traffic_measure(
    form: str, width: int, density: float, block: int, batch: int
) -> Run:
    """The exchanges of a step of one form, and the size of its weights."""
    model = traffic_network(form, width, density, block)
    x, y = np.zeros((2, batch, width), "float32")
    counts = collectives(compiled_step(model, x, y))
    trained = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    return {
        "form": form,
        "width": width,
        "density": density,
        "trained": trained,
        **counts,
    }


# --- planning -------------------------------------------------------------------------------------

# Assumed: an accelerator of today, and the part of its memory and links that a program gets.
MEMORY = 60e9  # bytes for weights and optimizer, of 80e9; the rest is for activations
READS = 2.5e12  # bytes per second from its memory
HOST_LINK = 25e9  # bytes per second between an accelerator and its host
# Bytes per second of each to the others: one machine, a network.
LINKS = {
    8: 300e9,
    256: 40e9,
}
FREQUENCY = 100  # steps between updates
# From the program of a mask update on a device: passes over weights of 4 bytes,
# for the counts of two ranks, ties and masks; and weights and two moments, each read and written.
PASSES = 2 * 18 + 4 + 6
PLANNED_SIZES = (1e9, 10e9)
ACCELERATORS = (1, 8, 256)
PLANNED = {
    "dense": "dense",
    "masked": "masked",
    "compact": "compact",
    "blocks": "blocks 32",
}
# The callback that updates masks by the dense gradient, in each form.
PLANNED_UPDATES = {
    "masked": "RigL",
    "compact": "RigL, compact",
    "blocks": "RigL, blocks 25",
}


def measured_lines(name: str) -> list[Run]:
    """The lines of a file of `results`, with `--quick` as well."""
    return finished(HERE / f"results/{name}.jsonl")


def stored() -> dict[str, float]:
    """Measured: bytes of weights, masks, indices and Adam's moments per weight of the network."""
    lines = [
        line for line in measured_lines("memory") if line["backend"] == "jax"
    ]
    by_form = last_of_each(
        [line for line in lines if line["width"] == 4096], "form"
    )
    bytes_of = {}
    for form, title in PLANNED.items():
        line = by_form[title]
        weights = 4 * line["width"] ** 2
        bytes_of[form] = 2**20 * (line["weights"] + line["optimizer"]) / weights
    return bytes_of


def exchanged() -> dict[str, float]:
    """Measured: bytes all-reduced per step, per weight of the network."""
    lines = [line for line in measured_lines("updates") if "form" in line]
    bytes_of = {}
    for line in lines:
        counts = [count for kind, count in line.items() if "-" in kind]
        bytes_of[line["form"]] = sum(counts) / (4 * line["width"] ** 2)
    return bytes_of


def updates() -> dict[str, tuple[float, float]]:
    """Measured: bytes to and from the host, and seconds of cores, per weight, of one update."""
    lines = [
        line
        for line in measured_lines("updates")
        if line.get("ranked") == "host"
    ]
    most = max(line["millions"] for line in lines)
    by_name = last_of_each(
        [line for line in lines if line["millions"] == most], "update"
    )
    costs = {}
    for form, name in PLANNED_UPDATES.items():
        line = by_name[name]
        moved = (line["host_mb"] + line["device_mb"]) / most
        costs[form] = moved, line["cpu"] / (most * 1e6)
    return costs


def constants() -> str:
    """The table of measured constants."""
    bytes_stored, bytes_sent, costs = stored(), exchanged(), updates()
    rows = []
    for form in PLANNED:
        row = [form, f"{bytes_stored[form]:.2f}", f"{bytes_sent[form]:.2f}"]
        if form in costs:
            moved, seconds = costs[form]
            row += [f"{moved:.2f}", f"{seconds * 1e9:.0f}"]
        else:
            row += ["", ""]
        rows.append(row)
    header = ["form", "stored [bytes]", "all-reduced per step [bytes]"]
    header += ["RigL update on the host: transferred [bytes]", "CPU time [ns]"]
    return markdown(header, rows)


def planned_memory() -> str:
    """Bytes on each accelerator, and the smallest number of accelerators that holds the network."""
    rows = []
    for size in PLANNED_SIZES:
        for form, bytes_each in stored().items():
            whole = size * bytes_each
            shared = [f"{whole / count / 1e9:.2f}" for count in ACCELERATORS]
            rows.append(
                [
                    f"{size / 1e9:.0f}",
                    form,
                    *shared,
                    str(math.ceil(whole / MEMORY)),
                ]
            )
    header = ["billion weights", "form", "on 1 [GB]"]
    header += [f"sharded over {count} [GB]" for count in ACCELERATORS[1:]]
    return markdown([*header, f"accelerators of {MEMORY / 1e9:.0f} GB"], rows)


def traffic() -> str:
    """Time of a ring all-reduce of the gradients of a step."""
    rows = []
    for size in PLANNED_SIZES:
        for form, bytes_each in exchanged().items():
            whole = size * bytes_each
            times = [
                f"{1e3 * 2 * (n - 1) / n * whole / rate:.1f}"
                for n, rate in LINKS.items()
            ]
            rows.append(
                [f"{size / 1e9:.0f}", form, f"{whole / 1e9:.2f}", "0", *times]
            )
    header = [
        "billion weights",
        "form",
        "all-reduced [GB]",
        "1 [ms]",
        "8 [ms]",
        "256 [ms]",
    ]
    return markdown(header, rows)


def cost_of_updates() -> str:
    """Time of a mask update on the host and on the devices, divided by the steps between two."""
    rows = []
    for size in PLANNED_SIZES:
        for form, place, seconds in update_seconds(size):
            times = [f"{1e3 * second / FREQUENCY:.2f}" for second in seconds]
            rows.append([f"{size / 1e9:.0f}", form, place, *times])
    header = [
        "billion weights",
        "form",
        "ranked on",
        "1 [ms]",
        "8 [ms]",
        "256 [ms]",
    ]
    return markdown(header, rows)


def update_seconds(size: float) -> Iterator[tuple[str, str, list[float]]]:
    """Form, place, and seconds of an update on each number of accelerators."""
    for form, (moved, work) in updates().items():
        # Every host ranks the whole network.
        on_host = size * (moved / HOST_LINK + work)
        yield form, "host", [on_host for _ in ACCELERATORS]
        if form == "masked":
            yield (
                form,
                "device",
                [size * 4 * PASSES / READS / n for n in ACCELERATORS],
            )


class Planning(Measurement):
    """Memory and traffic on 1, 8 and 256 accelerators: the tables of `docs/planning.md`.

        python benchmarks/memory.py planning

    Nothing is run: bytes per weight come from `results/memory.jsonl`, bytes exchanged per step, and
    time and bytes of an update, from `results/updates.jsonl`. The speeds of accelerators and links
    are assumed, above.
    """

    def measure(self) -> None:
        """Prints the tables."""
        for part in (constants, planned_memory, traffic, cost_of_updates):
            print(f"<!-- {part.__name__} -->\n{part()}")


if __name__ == "__main__":
    main(Training, Sparsify, MaskUpdates, Traffic, Planning)
