"""Time of a training step on live blocks: of models, and of convolutions by taps.

python benchmarks/blocks.py NAME [options]
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import ops
from networks import TOKENS, VOCABULARY, WHOLE
from record import (
    last_of_each,
    machine,
    markdown,
    middle_of_processes,
    sentences,
)
from runner import (
    Measurement,
    Run,
    Setting,
    beside_first,
    grid,
    main,
    wall_and_cpu,
)
from training import training_pass

import keras_sparse_ortho as kso
from keras_sparse_ortho._gathers import divisor_near
from keras_sparse_ortho.layers import BlockSparseConv2D, BlockSparseDense
from keras_sparse_ortho.orthogonal import Block, best_blocks

# --- the models -----------------------------------------------------------------------------------

L = keras.layers
SEQUENCE = 128  # tokens in a sample of the Transformer's block
BYTES = {
    "bool": 1,
    "bfloat16": 2,
    "int32": 4,
    "int64": 8,
    "uint32": 4,
    "float32": 4,
}
SPLIT = "split"
WORD = "one word"
MASKS = {"masked": kso.FixedMask, "compact": kso.parametrizations.CompactMask}


def uneven_blocks(size: int, density: float, seed: int) -> np.ndarray:
    """Live blocks of `size` lines a side, as uneven as trained ones, at most 6 counts a side."""
    rng = np.random.default_rng(seed)
    # Half of the spread of scores is of their lines (../shared/design/GRADUAL.md).
    lines = rng.normal(size=(size, 1)) + rng.normal(size=(1, size))
    scores = np.exp(0.5 * lines + rng.normal(size=(size, size)))
    count = max(round(density * size**2), size)
    return best_blocks(Block(1, 1), scores[None, None], count, rng)[0, 0]


def uneven_counts(
    width: int, block: int, density: float, seed: int
) -> list[list[int]]:
    """Their numbers for outputs and inputs, in a square kernel."""
    live = uneven_blocks(width // block, density, seed)
    return [live.sum(axis=axis).tolist() for axis in (0, 1)]


def dense_layer(units, activation, name, rival, **options):
    """A Dense layer: plain, masked, compact, or of live blocks."""
    plain = {"activation": activation, "name": name}
    if isinstance(rival, tuple):
        block = rival[1]
        options["counts"] = uneven_counts(
            units, block, options["density"], int(name[1:])
        )
        return BlockSparseDense(units, block=block, seed=0, **options, **plain)
    if isinstance(rival, int):
        return BlockSparseDense(units, block=rival, seed=0, **options, **plain)
    layer = L.Dense(units, kernel_initializer="lecun_normal", **plain)
    return wrapped(layer, rival, options["density"])


def wrapped(layer, rival, density):
    """A layer as it is, or in a wrapper that masks it."""
    if rival not in MASKS:
        return layer
    return kso.PrunableLayer(layer, MASKS[rival](density))


def mlp(width, rival, density):
    """Four layers of one width."""
    layers = [
        dense_layer(
            width, "relu" if k < 3 else None, f"d{k}", rival, density=density
        )
        for k in range(4)
    ]
    return keras.Sequential([keras.Input((width,)), *layers])


def transformer(rival, density):
    """The feed-forward block of a Transformer, 768-3072-768, at each of 128 tokens."""
    inputs = keras.Input((SEQUENCE, 768))
    x = L.LayerNormalization()(inputs)
    x = dense_layer(3072, "gelu", "up", rival, density=density)(x)
    x = dense_layer(768, None, "down", rival, density=density)(x)
    return keras.Model(inputs, L.Add()([inputs, x]))


def in_parts(channels, parts, name, **options):
    """Plain convolutions of parts of the channels, with as many entries as live blocks have.

    Without gathers: the time of the backend's own convolutions of so few channels.
    """
    width = channels // parts
    layers = [
        L.Conv2D(width, 3, **options, name=f"{name}_{k}") for k in range(parts)
    ]

    def call(x):
        found = [
            layer(x[..., k * width : (k + 1) * width])
            for k, layer in enumerate(layers)
        ]
        return L.Concatenate()(found)

    return call


def stage(size, channels, rival, density):
    """A residual pair of 3 x 3 convolutions at one resolution."""

    def convolution(name):
        options = {"padding": "same", "use_bias": False, "name": name}
        if isinstance(rival, int):
            return BlockSparseConv2D(
                channels, 3, density=density, block=rival, seed=0, **options
            )
        if rival == SPLIT:
            return in_parts(
                channels, divisor_near(channels, 1 / density), **options
            )
        return wrapped(L.Conv2D(channels, 3, **options), rival, density)

    inputs = keras.Input((size, size, channels))
    x = L.ReLU()(L.BatchNormalization()(convolution("c0")(inputs)))
    x = L.BatchNormalization()(convolution("c1")(x))
    return keras.Model(inputs, L.ReLU()(L.Add()([inputs, x])))


MODELS = {
    "mlp256": lambda *which: mlp(256, *which),
    "mlp1024": lambda *which: mlp(1024, *which),
    "mlp2048": lambda *which: mlp(2048, *which),
    "mlp4096": lambda *which: mlp(4096, *which),
    "transformer": transformer,
    "stage28x128": lambda *which: stage(28, 128, *which),
    "stage14x256": lambda *which: stage(14, 256, *which),
    "stage7x512": lambda *which: stage(7, 512, *which),
}


def model_of(name, rival, density):
    """A model for a rival."""
    if rival == WORD:
        return kso.sparsify(
            model_of(name, "dense", density), density, storage="blocks", seed=0
        )
    if name not in WHOLE:
        return MODELS[name](rival, density)
    if isinstance(rival, int):
        like = {"structure": kso.Block(rival, rival), "storage": "blocks"}
        return kso.sparsify(WHOLE[name](), density, **like, seed=0)
    return WHOLE[name]()


def given_to(model, count, rng):
    """Random inputs, in a dict where the model takes one."""
    # A Sequential has no `input` before it is called.
    inputs = (
        model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    )
    return keras.tree.map_structure(
        lambda tensor: samples(tensor, count, rng), inputs
    )


def samples(tensor, count, rng):
    """Random data for an input or output of a model; integers are tokens, and none is padding."""
    shape = (
        count,
        *(TOKENS if size is None else size for size in tensor.shape[1:]),
    )
    if "int" in tensor.dtype:
        return rng.integers(1, VOCABULARY, shape, dtype="int32")
    return rng.standard_normal(shape, dtype="float32")


def live(model):
    """Live entries of all kernels."""
    return sum(weight.live for weight in kso.prunable_weights(model))


def mebibytes(variables):
    """Their size, by shapes: on JAX `fit` holds the values."""
    sizes = [
        np.prod(v.shape, dtype=np.int64) * BYTES[v.dtype] for v in variables
    ]
    return float(sum(sizes)) / 2**20


# --- step_times -----------------------------------------------------------------------------------


class StepTimes(Measurement):
    """A training step on live blocks against the dense model and the masked one, interleaved.

        KERAS_BACKEND=jax        python benchmarks/blocks.py step_times
        KERAS_BACKEND=tensorflow python benchmarks/blocks.py step_times --models mlp4096
        KERAS_BACKEND=tensorflow python benchmarks/blocks.py step_times --no-xla
        KERAS_BACKEND=torch      python benchmarks/blocks.py step_times --models mlp1024

    The page shows the last of each kind, or the median over several processes of one day. Rivals
    are the dense model, a second dense model, whose ratio to the first is the noise of the
    measurement, the model with fixed masks of the same density in masked and in compact storage,
    the model on blocks of each size, and "one word", `sparsify(model, density,
    storage="blocks")`; for convolutions also plain ones over a part of the channels each. Whole
    networks (networks.py) have the dense rivals and that one; `--any-pattern` compares regular
    blocks with others. All train in turn in one process, with Adam; medians of wall-clock and CPU
    time.

    Wall-clock times need an idle machine.
    """

    page = lines = "blocks"
    resumes = False
    settings = {
        "models": Setting(["mlp1024", "mlp2048", "mlp4096"], quick=["mlp256"]),
        "batches": Setting([128]),
        "densities": Setting([0.1]),
        "blocks": Setting([16, 32, 64, 128], quick=[16, 32]),
        "any_pattern": Setting(False, "blocks, and in any pattern, alone"),
        "rounds": Setting(11, quick=3),
        "steps": Setting(4, "training steps in one sample"),
        "xla": Setting(True, "compile with XLA"),
    }

    def runs(self) -> list[Run]:
        given = self.given
        return grid(
            model=given.models, batch=given.batches, density=given.densities
        )

    def rivals(self, name: str) -> dict[str, Any]:
        """By title, what makes the models that train in turn."""
        sizes = self.given.blocks
        if self.given.any_pattern:
            rivals: dict[str, Any] = {"dense": "dense"}
            for size in sizes:
                rivals |= {f"blocks {size}": size, f"any {size}": ("any", size)}
        else:
            rivals = {"dense": "dense", "dense again": "dense", WORD: WORD}
            if name in MODELS:
                rivals |= {mask: mask for mask in MASKS}
            rivals |= {f"blocks {size}": size for size in sizes}
        if name.startswith("stage"):
            rivals["plain, in parts"] = SPLIT
        return rivals

    def run(self, which: Run) -> Iterator[Run]:
        given = self.given
        name, batch, density = which["model"], which["batch"], which["density"]
        keras.utils.set_random_seed(0)
        models = {}
        for title, rival in self.rivals(name).items():
            try:
                models[title] = model_of(name, rival, density)
            except kso.errors.DensityError as error:
                print(f"{name}: no {title}: {error}", flush=True)
        # Before `fit`, which on JAX holds the variables.
        shares = {
            title: live(model) / live(models["dense"])
            for title, model in models.items()
        }
        counted = None if WORD not in models else counts(models[WORD])
        xla = given.xla and keras.backend.backend() != "torch"
        passes = {
            title: step_pass(model, xla, batch, given.steps)
            for title, model in models.items()
        }
        first = {title: seconds_of(call) for title, call in passes.items()}
        times = beside_first(wall_and_cpu(passes, given.rounds, warm_up=2))
        for title, figures in times.items():
            line = {
                "setting": setting_of(xla),
                "rival": title,
                "live": shares[title],
            }
            if title == WORD:
                line["flops"] = counted.sparse_flops / counted.flops
            yield line | {
                "state_mib": state_mib(models[title]),
                "wall_ms": 1e3 * figures["wall"] / given.steps,
                "cpu_ms": 1e3 * figures["cpu"] / given.steps,
                "wall_ratio": figures["wall_ratio"],
                "cpu_ratio": figures["cpu_ratio"],
                "first_s": first[title],
                "rounds": given.rounds,
                "machine": machine(),
                "keras": keras.__version__,
                "tunables": os.environ.get("GLIBC_TUNABLES", ""),
            }
        keras.utils.clear_session()

    def report(self, lines: list[Run]) -> str:
        """The table: for each kind of result the median process of its last day."""
        rows = []
        for line in middle_of_processes(lines, kind, "wall_ratio").values():
            cells = [*map(str, kind(line)), f"{line['live']:.4f}"]
            cells.append(f"{line['flops']:.4f}" if "flops" in line else "")
            cells.append(f"{line['state_mib']:.1f}")
            cells += [f"{line[name]:.2f}" for name in ("wall_ms", "cpu_ms")]
            cells += [
                f"{line[name]:.3f}" for name in ("wall_ratio", "cpu_ratio")
            ]
            cells.append(f"{line['first_s']:.1f}" if "first_s" in line else "")
            rows.append([*cells, str(line["processes"])])
        places = "; ".join(
            sorted(
                {f"{line['machine']}, Keras {line['keras']}" for line in lines}
            )
        )
        header = [
            "setting",
            "model",
            "batch",
            "density",
            "rival",
            "live",
            "FLOPs",
            "state [MiB]",
        ]
        header += [
            "step [ms]",
            "cores [ms]",
            "ratio",
            "ratio of cores",
            "first [s]",
            "processes",
        ]
        about = sentences(
            f"""
            {places}. Adam, float32. Medians of interleaved samples in one process; ratios to the
            dense model; of several processes on one day the one with the median ratio. "dense
            again" is the noise. "cores" is the time that all cores have worked, "state" is weights,
            masks, places and moments, "FLOPs" those of a forward pass, relative to dense, in
            products with kernels. "Any" are blocks whose counts differ from line to line, by at
            most 6 values on a side; "first" is the time of the first call, which compiles.
            """
        )
        title = "# Training step on live blocks against the dense model\n\n"
        return title + about + markdown(header, rows)


class OneWord(StepTimes):
    """A training step of whole networks by `sparsify(model, density, storage="blocks")`.

        KERAS_BACKEND=jax python benchmarks/blocks.py one_word --models gpt2 llama --batches 8

    As `step_times`, with the dense rivals alone. `hub_gpt2` and `hub_llama` need keras-hub.
    """

    page = lines = "one_word"
    settings = StepTimes.settings | {
        "models": Setting(["mlp2048"], quick=["mlp256"])
    }

    def rivals(self, name: str) -> dict[str, Any]:
        """The dense model, twice, and the one word."""
        return {"dense": "dense", "dense again": "dense", WORD: WORD}


def kind(line: Run) -> tuple:
    """The identity of a measurement."""
    return tuple(
        line[name] for name in ("setting", "model", "batch", "density", "rival")
    )


def setting_of(xla: bool) -> str:
    """The backend, and the device where it is a GPU."""
    backend = keras.backend.backend()
    if backend == "tensorflow" and xla:
        return "tensorflow XLA"
    if backend == "jax":
        import jax

        gpus = [
            device.device_kind
            for device in jax.devices()
            if device.platform == "gpu"
        ]
        return " on ".join([backend, *gpus[:1]])
    return backend


def step_pass(
    model: keras.Model, xla: bool, batch: int, steps: int
) -> Callable[[], object]:
    """A function that trains some steps on prepared data."""
    model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=xla)
    rng = np.random.default_rng(0)
    x = given_to(model, steps * batch, rng)
    y = samples(model.outputs[0], steps * batch, rng)
    return training_pass(model, x, y, batch)


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def counts(model):
    """The report, with multiplications for one sample."""
    rng = np.random.default_rng(0)
    return kso.report(
        model, orthogonality=False, sample=given_to(model, 1, rng)
    )


def state_mib(model):
    """The training state: weights, masks, indices, and the optimizer's moments."""
    return mebibytes([*model.variables, *model.optimizer.variables])


# --- taps -----------------------------------------------------------------------------------------

TAPS_SIZES = ["14-256-16-32", "28-128-16-16", "28-128-16-32", "7-512-32-32"]


class Taps(Measurement):
    """Convolutions on live blocks: of channels with all their taps, or of single taps.

        KERAS_BACKEND=jax python benchmarks/blocks.py taps [--rounds 9]

    A 3x3 convolution and its gradients, compiled by XLA: dense; `BlockSparseConv2D`, whose blocks
    have all nine taps of their channels; and one product over blocks of channels under single
    taps: for each block of outputs the images, shifted by its taps, are gathered, and multiplied
    at once.
    """

    page = lines = "taps"
    resumes = False
    settings = {
        "sizes": Setting(
            TAPS_SIZES, "side-channels-batch-block", quick=["4-32-2-8"]
        ),
        "density": Setting(0.1, "or two blocks of each row"),
        "rounds": Setting(9, quick=2),
    }

    def runs(self) -> Iterable[Run]:
        for size in self.given.sizes:
            side, channels, batch, block = map(int, size.split("-"))
            density = max(self.given.density, 2 * block / channels)
            yield {
                "backend": keras.backend.backend(),
                "side": side,
                "channels": channels,
                "batch": batch,
                "block": block,
                "density": density,
            }

    def run(self, which: Run) -> Iterator[Run]:
        side, channels, block = which["side"], which["channels"], which["block"]
        rng = np.random.default_rng(0)
        x = rng.normal(size=(which["batch"], side, side, channels)).astype(
            "float32"
        )
        common = {"kernel_size": 3, "padding": "same", "use_bias": False}
        sparse = {"density": which["density"], "block": block, "seed": 0}
        layers = {
            "dense": L.Conv2D(channels, **common),
            "blocks of channels": BlockSparseConv2D(
                channels, **sparse, **common
            ),
            "blocks of taps": BlocksOfTaps(channels, block, which["density"]),
        }
        calls = {name: taps_pass(layer, x) for name, layer in layers.items()}
        times = beside_first(wall_and_cpu(calls, self.given.rounds, warm_up=2))
        for name, figures in times.items():
            yield {"layer": name} | figures

    def report(self, lines: list[Run]) -> str:
        kinds = ("backend", "side", "channels", "batch", "block", "layer")
        rows = []
        for key, line in last_of_each(lines, *kinds).items():
            backend, side, channels, batch, block, layer = key
            size = f"{side} x {side} x {channels}, batch {batch}"
            cells = [backend, size, str(block), f"{line['density']:.4g}", layer]
            cells += [f"{1000 * line[clock]:.1f}" for clock in ("wall", "cpu")]
            rows.append(
                [
                    *cells,
                    *(
                        f"{line[f'{clock}_ratio']:.2f}"
                        for clock in ("wall", "cpu")
                    ),
                ]
            )
        header = [
            "backend",
            "images",
            "block",
            "density",
            "layer",
            "step [ms]",
            "cores [ms]",
        ]
        about = sentences(
            """
            A 3x3 convolution and its gradients, compiled by XLA, medians of interleaved calls;
            `cores` is the time that all cores have worked; ratios to dense.
            """
        )
        table = markdown([*header, "ratio", "ratio of cores"], rows)
        return "# Blocks of channels, blocks of single taps\n\n" + about + table


class BlocksOfTaps(keras.layers.Layer):
    """A 3x3 convolution of live blocks `(tap, block of inputs) -> block of outputs`.

    `y[o] = sum_k shift(x, tap[o, k])[input[o, k]] W[o, k]`, with as many `k` for every block `o`.
    """

    def __init__(
        self, channels: int, block: int, density: float, seed: int = 0
    ) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.block, blocks = block, channels // block
        count = round(9 * blocks * density)
        pairs = np.stack(
            [rng.permutation(9 * blocks)[:count] for _ in range(blocks)]
        )
        self.pairs = np.sort(pairs, axis=1)
        self.values = self.add_weight(
            shape=(blocks, count * block, block), initializer="glorot_uniform"
        )

    def call(self, x):
        """A product for each block of outputs."""
        _, height, width, channels = x.shape
        padded = ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        outputs = []
        for pairs, values in zip(
            self.pairs, ops.unstack(1 * self.values), strict=True
        ):
            parts = []
            for pair in pairs:
                tap, part = divmod(int(pair), channels // self.block)
                (row, column), first = divmod(tap, 3), part * self.block
                shifted = padded[:, row : row + height, column : column + width]
                parts.append(shifted[..., first : first + self.block])
            outputs.append(ops.matmul(ops.concatenate(parts, axis=-1), values))
        return ops.concatenate(outputs, axis=-1)


def taps_pass(layer: keras.layers.Layer, x: np.ndarray):
    """A compiled call with the gradients of the inputs and weights."""
    layer(x[:1])
    weights = [w.value for w in layer.trainable_weights]
    if keras.backend.backend() == "jax":
        import jax

        fixed = [w.value for w in layer.non_trainable_weights]

        def loss(weights, x):
            return ops.sum(layer.stateless_call(weights, fixed, x)[0] ** 2)

        step = jax.jit(jax.grad(loss, argnums=(0, 1)))
        return lambda: jax.block_until_ready(step(weights, x))
    import tensorflow as tf

    @tf.function(jit_compile=True)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(layer(x) ** 2)
        return tape.gradient(
            total, [x, *[w.value for w in layer.trainable_weights]]
        )

    given = tf.constant(x)
    return lambda: [g.numpy() for g in step(given)]


if __name__ == "__main__":
    main(StepTimes, OneWord, Taps)
