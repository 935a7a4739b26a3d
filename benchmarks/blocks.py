"""Live blocks: time of a step, accuracy, and blocks of single taps.

    python benchmarks/blocks.py NAME [options]

The measurements:

- `step_times`: a training step on live blocks against the dense model and the masked one,
  interleaved.
- `trained`: accuracy of block-sparse against unstructured and dense training.
- `roads`: ways to live blocks: from scratch, by a probe, moving, gradually, at once.
- `taps`: convolutions on live blocks: of channels with all their taps, or of single taps.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import ops
from networks import TOKENS, VOCABULARY, WHOLE, cnn, vision_transformer
from record import (
    RESULTS,
    append,
    chosen,
    described,
    finished,
    machine,
    markdown,
    middle_of_processes,
    parsed,
    wall_and_cpu,
    write,
)
from small_language_model import SYMBOLS, decoder, windows
from small_language_model import text as python_text
from training import Dataset, load

import keras_sparse_ortho as kso
from keras_sparse_ortho._gathers import divisor_near
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.layers import BlockSparseConv2D, BlockSparseDense
from keras_sparse_ortho.orthogonal import Block, best_blocks, exact_orthogonal

# --- step_times -----------------------------------------------------------------------------------


L = keras.layers
SEQUENCE = 128  # tokens in a sample of the Transformer's block
BYTES = {"bool": 1, "bfloat16": 2, "int32": 4, "int64": 8, "uint32": 4, "float32": 4}
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


def uneven_counts(width: int, block: int, density: float, seed: int) -> list[list[int]]:
    """Their numbers for outputs and inputs, in a square kernel."""
    live = uneven_blocks(width // block, density, seed)
    return [live.sum(axis=axis).tolist() for axis in (0, 1)]


def dense_layer(units, activation, name, rival, **options):
    """A Dense layer: plain, masked, compact, or of live blocks."""
    plain = {"activation": activation, "name": name}
    if isinstance(rival, tuple):
        block = rival[1]
        options["counts"] = uneven_counts(units, block, options["density"], int(name[1:]))
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
        dense_layer(width, "relu" if k < 3 else None, f"d{k}", rival, density=density)
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
    layers = [L.Conv2D(width, 3, **options, name=f"{name}_{k}") for k in range(parts)]

    def call(x):
        found = [layer(x[..., k * width : (k + 1) * width]) for k, layer in enumerate(layers)]
        return L.Concatenate()(found)

    return call


def stage(size, channels, rival, density):
    """A residual pair of 3 x 3 convolutions at one resolution."""

    def convolution(name):
        options = {"padding": "same", "use_bias": False, "name": name}
        if isinstance(rival, int):
            return BlockSparseConv2D(channels, 3, density=density, block=rival, seed=0, **options)
        if rival == SPLIT:
            return in_parts(channels, divisor_near(channels, 1 / density), **options)
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


def made(name, rival, density):
    """A model for a rival."""
    if rival == WORD:
        return kso.sparsify(made(name, "dense", density), density, storage="blocks", seed=0)
    if name not in WHOLE:
        return MODELS[name](rival, density)
    if isinstance(rival, int):
        like = {"structure": kso.Block(rival, rival), "storage": "blocks"}
        return kso.sparsify(WHOLE[name](), density, **like, seed=0)
    return WHOLE[name]()


def stepper(model, xla, batch, steps):
    """A function that trains some steps on prepared data."""
    model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=xla)
    rng = np.random.default_rng(0)
    x = given_to(model, steps * batch, rng)
    y = samples(model.outputs[0], steps * batch, rng)
    if keras.backend.backend() != "tensorflow":
        return lambda: model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True).cache()
    batches = iter(data.repeat())
    model.make_train_function()

    def run():
        for _ in range(steps):
            logs = model.train_function(batches)
        float(logs["loss"])  # waits for the device

    return run


def given_to(model, count, rng):
    """Random inputs, in a dict where the model takes one."""
    # A Sequential has no `input` before it is called.
    inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    return keras.tree.map_structure(lambda tensor: samples(tensor, count, rng), inputs)


def samples(tensor, count, rng):
    """Random data for an input or output of a model; integers are tokens, and none is padding."""
    shape = (count, *(TOKENS if size is None else size for size in tensor.shape[1:]))
    if "int" in tensor.dtype:
        return rng.integers(1, VOCABULARY, shape, dtype="int32")
    return rng.standard_normal(shape, dtype="float32")


def live(model):
    """Live entries of all kernels."""
    return sum(weight.live for weight in kso.prunable_weights(model))


def counts(model):
    """The report, with multiplications for one sample."""
    rng = np.random.default_rng(0)
    return kso.report(model, orthogonality=False, sample=given_to(model, 1, rng))


def state_mib(model):
    """The training state: weights, masks, indices, and the optimizer's moments."""
    return mebibytes([*model.variables, *model.optimizer.variables])


def mebibytes(variables):
    """Their size, by shapes: on JAX `fit` holds the values."""
    sizes = [np.prod(v.shape, dtype=np.int64) * BYTES[v.dtype] for v in variables]
    return float(sum(sizes)) / 2**20


def measure(name, batch, density, blocks, args):
    """Rows of the result file for one model, batch and density."""
    keras.utils.set_random_seed(0)
    rivals = {"dense": "dense", "dense again": "dense", WORD: WORD}
    if not args.one_word:
        masks = {name: name for name in MASKS} if name in MODELS else {}
        rivals.update({**masks, **{f"blocks {k}": k for k in blocks}})
        if args.any_pattern:
            rivals = {"dense": "dense"}
            for k in blocks:
                rivals |= {f"blocks {k}": k, f"any {k}": ("any", k)}
    if name.startswith("stage"):
        rivals["plain, in parts"] = SPLIT
    models, steps = {}, {}
    for title, rival in rivals.items():
        try:
            models[title] = made(name, rival, density)
        except kso.errors.DensityError as error:
            print(f"{name}: no {title}: {error}", flush=True)
    # Before `fit`, which on JAX holds the variables.
    parts = {title: live(model) / live(models["dense"]) for title, model in models.items()}
    counted = None if WORD not in models else counts(models[WORD])
    steps = {title: stepper(model, args.xla, batch, args.steps) for title, model in models.items()}
    first = {}
    for title, step in steps.items():
        start = time.perf_counter()
        step()
        first[title] = time.perf_counter() - start
    times = wall_and_cpu(steps, args.rounds, warm_up=2)
    wall, cpu = times["dense"]
    setting = keras.backend.backend() + (" XLA" if args.xla and args.tensorflow else "")
    if keras.backend.backend() == "jax":
        import jax

        gpus = [device.device_kind for device in jax.devices() if device.platform == "gpu"]
        setting += "".join(f" on {gpu}" for gpu in gpus[:1])
    for title, (its_wall, its_cpu) in times.items():
        yield {
            "setting": setting,
            "model": name,
            "batch": batch,
            "density": density,
            "rival": title,
            "live": parts[title],
            **({"flops": counted.sparse_flops / counted.flops} if title == WORD else {}),
            "state_mib": state_mib(models[title]),
            "wall_ms": 1e3 * its_wall / args.steps,
            "cpu_ms": 1e3 * its_cpu / args.steps,
            "wall_ratio": its_wall / wall,
            "cpu_ratio": its_cpu / cpu,
            "first_s": first[title],
            "rounds": args.rounds,
            "machine": machine(),
            "keras": keras.__version__,
            "tunables": os.environ.get("GLIBC_TUNABLES", ""),
        }


def kind(line):
    """The identity of a measurement."""
    return tuple(line[k] for k in ("setting", "model", "batch", "density", "rival"))


def page(lines):
    """The Markdown page, one part for each kind of result."""
    rows = [
        [
            *map(str, kind(line)),
            f"{line['live']:.4f}",
            f"{line['flops']:.4f}" if "flops" in line else "",
            f"{line['state_mib']:.1f}",
            *(f"{line[k]:.2f}" for k in ("wall_ms", "cpu_ms")),
            *(f"{line[k]:.3f}" for k in ("wall_ratio", "cpu_ratio")),
            f"{line['first_s']:.1f}" if "first_s" in line else "",
            str(line["processes"]),
        ]
        for line in middle_of_processes(lines, kind, "wall_ratio").values()
    ]
    places = "; ".join(sorted({f"{line['machine']}, Keras {line['keras']}" for line in lines}))
    header = ["setting", "model", "batch", "density", "rival", "live", "FLOPs", "state [MiB]"]
    header += ["step [ms]", "cores [ms]", "ratio", "ratio of cores", "first [s]", "processes"]
    text = f"# Training step on live blocks against the dense model\n\n{places}. Adam, float32. "
    text += "Medians of interleaved samples in one process; ratios to the dense model; of several "
    text += "processes on one day the one with the median ratio. "
    text += '"dense again" is the noise. "cores" is the time that all cores have worked, '
    text += '"state" is weights, masks, places and moments, '
    text += '"FLOPs" those of a forward pass, relative to dense, in products with kernels. '
    text += '"Any" are blocks whose counts differ from line to line, by at most 6 values on a '
    text += 'side; "first" is the time of the first call, which compiles.\n\n'
    return text + markdown(header, rows)


def step_times():
    r"""A training step on live blocks against the dense model and the masked one, interleaved.

        KERAS_BACKEND=jax        python benchmarks/blocks.py step_times
        KERAS_BACKEND=tensorflow python benchmarks/blocks.py step_times --models mlp4096
        KERAS_BACKEND=tensorflow python benchmarks/blocks.py step_times --no-xla
        KERAS_BACKEND=torch      python benchmarks/blocks.py step_times --models mlp1024
        python benchmarks/blocks.py step_times --name one_word --one-word --models mlp2048

    `suite.toml` has the arguments of the other networks of `one_word`; `hub_gpt2` and
    `hub_llama` need keras-hub.

    Appends a line for each rival to `results/blocks.jsonl` and writes `results/blocks.md` from
    all of them: the last of each kind, or the median over several processes of one day. Rivals
    are the dense model, a second dense model, whose ratio to the first is the noise of the
    measurement, the model with fixed masks of the same density in masked and in compact storage,
    the model on blocks of each size, and "one word", `sparsify(model, density,
    storage="blocks")`; for convolutions also plain ones over a part of the channels each. Whole
    networks (`block_networks.py`), and every model with `--one-word`, have the dense rivals and
    that one; `--any-pattern` compares regular blocks with others. All train in turn in one
    process, with Adam; medians of wall-clock and CPU time. JAX and torch train with `fit`,
    TensorFlow with the train function of `fit`, because repeated short calls of `fit` sometimes
    wait.

    Wall-clock times need an idle machine.
    """
    parser = described(step_times)
    parser.add_argument("--models", nargs="+", default=["mlp1024", "mlp2048", "mlp4096"])
    parser.add_argument("--batches", nargs="+", type=int, default=[128])
    parser.add_argument("--densities", nargs="+", type=float, default=[0.1])
    parser.add_argument("--blocks", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--one-word", action="store_true", help="only that rival beside dense")
    parser.add_argument(
        "--any-pattern", action="store_true", help="blocks, and in any pattern, alone"
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=4, help="training steps in one sample")
    parser.add_argument("--no-xla", dest="xla", action="store_false")
    parser.add_argument("--name", default="blocks", help="of the files in results/")
    parser.add_argument("--summary", action="store_true", help="only write the table")
    quick = {"models": ["mlp256"], "blocks": [16, 32], "rounds": 3}
    args = parsed(parser, quick)
    args.tensorflow = keras.backend.backend() == "tensorflow"
    args.xla = args.xla and keras.backend.backend() != "torch"
    results = RESULTS / f"{args.name}.jsonl"
    for name in [] if args.summary else args.models:
        for batch in args.batches:
            for density in args.densities:
                for row in measure(name, batch, density, args.blocks, args):
                    print(json.dumps(row), flush=True)
                    append(results, row)
                keras.utils.clear_session()
    write(args.name, page(finished(results)))


# --- trained --------------------------------------------------------------------------------------

SIZES = ((784, 1024), (1024, 1024), (1024, 512))
KINDS = ("dense", "unstructured", "blocks 16x1")
GAIN = 2**0.5
KEYS = ("kind", "seed", "epochs", "density", "rate")


def hidden(kind: str, k: int, density: float, seed: int) -> keras.Layer:
    inputs, outputs = SIZES[k]
    if kind == "blocks 16x1":
        start = ExactOrthogonal(density, gain=GAIN, seed=seed, structure=kso.Block(16, 1))
        layer = L.Dense(outputs, activation="relu", kernel_initializer=start, name=f"h{k}")
        return kso.PrunableLayer(layer)
    if kind == "dense":
        start = keras.initializers.Orthogonal(GAIN, seed=seed)
        return L.Dense(outputs, activation="relu", kernel_initializer=start, name=f"h{k}")
    kernel, mask = exact_orthogonal((inputs, outputs), density, gain=GAIN, seed=seed)
    layer = L.Dense(outputs, activation="relu", name=f"h{k}")
    wrapped = kso.PrunableLayer(layer, kso.parametrizations.FixedMask(mask=mask))
    wrapped.build((None, inputs))
    layer.kernel.assign(kernel)
    return wrapped


def run(kind: str, data: Dataset, options: argparse.Namespace, seed: int) -> dict:
    """One training; accuracy on the test set after the last epoch."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input(data.x_train.shape[1:]),
            L.Flatten(),
            *(hidden(kind, k, options.density, 100 * seed + k) for k in range(len(SIZES))),
            L.Dense(data.classes),
        ]
    )
    steps = options.epochs * -(-len(data.x_train) // 256)
    model.compile(
        keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(options.rate, steps)),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=keras.backend.backend() != "torch",
    )
    start = time.perf_counter()
    model.fit(data.x_train, data.y_train, batch_size=256, epochs=options.epochs, verbose=0)
    seconds = time.perf_counter() - start
    _, accuracy = model.evaluate(data.x_test, data.y_test, batch_size=1000, verbose=0)
    plain = kso.strip(model) if kind != "dense" else model
    kernels = [np.asarray(layer.kernel) for layer in plain.layers if hasattr(layer, "kernel")]
    return {
        **_key(kind, options, seed),
        "accuracy": float(accuracy),
        "live": int(sum(np.count_nonzero(kernel) for kernel in kernels[:-1])),
        "size": int(sum(kernel.size for kernel in kernels[:-1])),
        "seconds": seconds,
    }


def _key(kind: str, options: argparse.Namespace, seed: int) -> dict:
    return {
        "kind": kind,
        "seed": seed,
        "epochs": options.epochs,
        "density": options.density,
        "rate": options.rate,
        **({"samples": options.samples} if options.samples else {}),
    }


def is_run_of(row: dict, key: dict) -> bool:
    """Whether a line is a run of these settings."""
    return {name: row[name] for name in (*KEYS, "samples") if name in row} == key


def trained() -> None:
    """Accuracy of block-sparse against unstructured and dense training.

        KERAS_BACKEND=tensorflow python benchmarks/blocks.py trained             # about 10 minutes
        KERAS_BACKEND=tensorflow python benchmarks/blocks.py trained --seeds 1 --epochs 1

    Fashion-MNIST, an MLP 784-1024-1024-512-10, Adam with cosine decay; the three hidden kernels
    are dense orthogonal, unstructured EOI at density 0.1, or exactly orthogonal in blocks of 16
    inputs at density 0.1, with fixed masks; the head is dense. Finished runs are lines of
    `results/block_accuracy.jsonl` and not repeated; the table, mean and deviation over the seeds,
    is `results/block_accuracy.md`.
    """
    parser = described(trained)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--rate", type=float, default=2e-3, help="of Adam, at the start")
    parser.add_argument("--samples", type=int, help="train on so many pictures only")
    options = parsed(parser, {"seeds": 1, "epochs": 1, "samples": 4096})
    file = RESULTS / "block_accuracy.jsonl"
    RESULTS.mkdir(exist_ok=True)
    there = finished(file)
    data = load("fashion_mnist")
    if options.samples:
        few = slice(options.samples)
        data = dataclasses.replace(data, x_train=data.x_train[few], y_train=data.y_train[few])
    mine = []
    for seed in range(
        options.seeds
    ):  # the kinds alternate, so that an interrupted run compares them
        for kind in KINDS:
            key = _key(kind, options, seed)
            row = next((r for r in there if is_run_of(r, key)), None)
            if row is None:
                row = run(kind, data, options, seed)
                append(file, row)
            mine.append(row)
            print(row, flush=True)
    text = (
        f"# The price of blocks: Fashion-MNIST, density {options.density:g}\n\n{machine()}, "
        f"Keras {keras.__version__} on {keras.backend.backend()}. MLP 784-1024-1024-512-10, "
        f"{len(data.x_train)} pictures, {options.epochs} epochs of Adam ({options.rate:g}, cosine "
        f"decay), batch 256, {options.seeds} seeds. Test accuracy after the last epoch, mean and "
        "standard deviation; `nonzero` is of the three hidden kernels.\n\n"
    )
    dense = statistics.mean(r["accuracy"] for r in mine if r["kind"] == "dense")
    rows = []
    for kind in KINDS:
        these = [r for r in mine if r["kind"] == kind]
        accuracies = [r["accuracy"] for r in these]
        spread = f" ± {statistics.stdev(accuracies):.2%}" if len(accuracies) > 1 else ""
        rows.append(
            [
                kind,
                f"{these[0]['live']:,} of {these[0]['size']:,}",
                f"{statistics.mean(accuracies):.2%}{spread}",
                f"{100 * (statistics.mean(accuracies) - dense):+.2f}",
                f"{statistics.mean(r['seconds'] for r in these):.0f}",
            ]
        )
    header = ["hidden kernels", "nonzero", "accuracy", "against dense, points", "training [s]"]
    text += markdown(header, rows) + roads_table(there)
    write("block_accuracy", text, seeds=range(options.seeds))


# --- roads ----------------------------------------------------------------------------------------

READ = 16  # characters before the next one
loaded = functools.cache(load)  # for the runs of a process


@dataclasses.dataclass(frozen=True)
class Task:
    """A network, which of its kernels get blocks of which size, what it learns, rates to try."""

    build: Callable[[], keras.Model]
    on_blocks: str
    block: int
    tuned_at: float  # the density at which the rates of all are chosen
    steps: int
    batch: int
    rates: tuple[float, ...]
    rows: Callable[[str, int, int], tuple[np.ndarray, np.ndarray]]
    options: dict[str, Any]
    in_nats: bool = False


def text_rows(
    part: str, count: int, seed: int, length: int = READ, *, all_of_them: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Random windows of a part of Python's standard library, and the characters that follow."""
    trained_on, others = python_text()
    half = len(others) // 2
    symbols = {"train": trained_on, "valid": others[:half], "test": others[half:]}[part]
    x, y = windows(symbols, count, seed, length)
    return x, y if all_of_them else y[:, -1]


def image_rows(part: str, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures of Fashion-MNIST in a random order, of which 10,000 are for validation."""
    data = loaded("fashion_mnist")
    if part == "test":
        return data.x_test, data.y_test
    if part == "valid":
        return data.x_train[50_000:], data.y_train[50_000:]
    rng = np.random.default_rng(seed)
    order = [rng.permutation(50_000) for _ in range(-(-count // 50_000))]
    chosen = np.concatenate(order)[:count]
    return data.x_train[chosen], data.y_train[chosen]


def network_of(units: int, depth: int, classes: int, *inputs: Any) -> keras.Model:
    """An MLP behind layers, which it makes."""
    like = {"activation": "relu", "kernel_initializer": keras.initializers.Orthogonal(GAIN)}
    hidden = [L.Dense(units, **like, name=f"h{k}") for k in range(depth)]
    return keras.Sequential([*(make() for make in inputs), *hidden, L.Dense(classes)])


OF_MLP = {"options": {"initializer": ExactOrthogonal(gain=GAIN)}, "tuned_at": 0.125, "batch": 128}
LATER = {"options": {}, "tuned_at": 0.25, "block": 16}


def on_text(block: int) -> Task:
    """The next character after 16, which uses its inputs unevenly."""

    def build() -> keras.Model:
        inputs = (lambda: keras.Input((READ,), dtype="int32"), lambda: L.Embedding(SYMBOLS, READ))
        return network_of(256, 2, SYMBOLS, *inputs, L.Flatten)

    rates = (4e-3, 8e-3, 1.6e-2)
    own = {"on_blocks": "h[01]/", "block": block, "steps": 3000, "rates": rates}
    return Task(build, rows=text_rows, in_nats=True, **own, **OF_MLP)


TASKS = {
    "text": on_text(16),
    "text, blocks of 32": on_text(32),
    "images": Task(
        lambda: network_of(512, 3, 10, lambda: keras.Input((28, 28, 1)), L.Flatten),
        on_blocks="h[12]/",  # blocks of 16 in 784 x 512 cannot be regular
        block=16,
        steps=2000,
        rates=(5e-4, 1e-3, 2e-3),
        rows=image_rows,
        **OF_MLP,
    ),
    "CNN": Task(
        lambda: cnn((28, 28, 1), 10, {"filters": (32, 64, 64, 64)}),
        on_blocks="conv_[23]/",
        steps=1000,
        batch=128,
        rates=(2e-3, 4e-3, 8e-3),
        rows=image_rows,
        **LATER,
    ),
    "ViT": Task(
        lambda: vision_transformer(
            (28, 28, 1), 10, {"width": 128, "depth": 2, "heads": 4, "patch": 7}
        ),
        on_blocks="attention_[01]/|mlp_",
        steps=1000,
        batch=64,
        rates=(1e-3, 2e-3, 4e-3),
        rows=image_rows,
        **LATER,
    ),
    "Transformer on text": Task(
        lambda: decoder(32, SYMBOLS, 128, 2, 4, 512),
        on_blocks="attention_[01]/|wide_|narrow_",
        steps=1200,
        batch=32,
        rates=(2e-3, 4e-3, 8e-3),
        rows=functools.partial(text_rows, length=32, all_of_them=True),
        in_nats=True,
        **LATER,
    ),
}
UNTUNED = 1e-3  # Adam's
ANY, REGULAR = "blocks in any pattern", "regular blocks"
GRADUAL = {  # are blocks regular (or none), and where the schedule begins and ends
    f"{ANY}, gradually, 0 to 15%": (False, 0.0, 0.15),
    f"{ANY}, gradually, 25 to 75%": (False, 0.25, 0.75),
    f"{ANY}, at once at 15%": (False, 0.15, 0.15),
    f"{REGULAR}, gradually, 0 to 15%": (True, 0.0, 0.15),
    "single entries, gradually, 0 to 50%": (None, 0.0, 0.5),
}
PROBES = {f"{ANY} of a probe of {part:.0%}": part for part in (0.05, 0.1)}
SCRATCH, RIGL = f"{REGULAR} from scratch", f"{REGULAR}, RigL"
ROADS = ("dense", SCRATCH, *PROBES, RIGL, *GRADUAL)


def roads() -> None:
    """Ways to live blocks, with equal steps.

        KERAS_BACKEND=jax python benchmarks/blocks.py roads

    `TASKS` are MLPs on text and images, a CNN, and Transformers on images and text. A probe's
    steps come before those of the others. Gradual roads stay masked; their schedule is in parts
    of all steps. Adam with warm-up and cosine decay. Each road has the best of three rates, by one
    seed on validation rows at one density, and the rate that nobody tuned. Adds lines to
    `results/block_accuracy.jsonl`; `trained` writes the table.
    """
    parser = described(roads)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["text", "images"])
    parser.add_argument("--roads", nargs="+", choices=ROADS, default=list(ROADS))
    parser.add_argument("--densities", nargs="+", type=float, default=[0.25, 0.125, 0.0625])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="for others than those of the table")
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    quick = {"tasks": ["text"], "roads": ["dense", SCRATCH], "densities": [0.125], "seeds": [0]}
    options = parsed(parser, quick | {"steps": 40})
    file = RESULTS / "block_accuracy.jsonl"
    RESULTS.mkdir(exist_ok=True)

    def run_all(keys: list[dict]) -> None:
        lines = finished(file)
        left = [key for key in keys if not any(key.items() <= line.items() for line in lines)]
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(options.jobs, context) as pool:
            done = {pool.submit(run_of_road, key): key for key in left}
            for future in concurrent.futures.as_completed(done):
                append(file, done[future] | future.result())
                print(done[future], future.result(), flush=True)

    pairs = [(task, road) for task in options.tasks for road in options.roads]
    keys = [key_of(*pair, rate) for pair in pairs for rate in TASKS[pair[0]].rates]
    if options.steps:
        keys = [key | {"steps": options.steps} for key in keys]
    run_all(keys)
    lines, tuned, untuned = finished(file), [], []
    for task, road in pairs:
        best, tuned_at = best_rate(lines, task, road), TASKS[task].tuned_at
        densities = options.densities if road != "dense" else [tuned_at]
        for into, rate, at in ((tuned, best, densities), (untuned, UNTUNED, [tuned_at])):
            key = key_of(task, road, rate) | {"part": "test"}
            steps = {"steps": options.steps or key["steps"]}
            own = itertools.product(at, options.seeds)
            into += [key | steps | {"density": density, "seed": seed} for density, seed in own]
    wanted = [*tuned, *(key for key in untuned if key not in tuned)]
    run_all(wanted)


def key_of(task: str, road: str, rate: float) -> dict:
    """The settings of a line of `roads` that chooses a rate."""
    given = {"task": task, "road": road, "density": TASKS[task].tuned_at, "rate": rate, "seed": 100}
    return given | {"steps": TASKS[task].steps, "part": "valid"}


def best_rate(lines: list[dict], task: str, road: str) -> float:
    own = [line for line in lines if line.get("part") == "valid"]
    own = [line for line in own if (line["task"], line["road"]) == (task, road)]
    return max(own, key=lambda line: line["score"])["rate"]


def run_of_road(key: dict) -> dict:
    """One training: the score, accuracy in percent or the negative loss, and what is live."""
    keras.utils.set_random_seed(key["seed"])
    task, road, density, steps = TASKS[key["task"]], key["road"], key["density"], key["steps"]
    model = with_rates(task.build(), key["rate"], steps)
    x, y = task.rows("train", task.batch * steps, 1000 + key["seed"])
    given = task.options | {"storage": "blocks", "seed": key["seed"]}
    kernels, callbacks, begun = {"include": f".*({task.on_blocks}).*"}, [], time.perf_counter()
    fit = {"batch_size": task.batch, "shuffle": False, "verbose": 0}
    if road in PROBES:
        probing = {"steps": round(PROBES[road] * steps), "structure": blocks_of(task, False)}
        found = kso.callbacks.probe(model, density, (x, y), **probing, **kernels, **fit)
        model = kso.sparsify(model, budget=found, **given)
    elif road in (SCRATCH, RIGL):
        structure = {"structure": blocks_of(task, False), "budget": "uniform"}
        model = kso.sparsify(model, density, **structure, **kernels, **given)
        if road == RIGL:
            callbacks = [kso.callbacks.RigL((x, y), task.batch, seed=key["seed"])]
    elif road in GRADUAL:
        regular, first, last = GRADUAL[road]
        ends = (round(first * steps), max(round(last * steps), round(first * steps) + 1))
        schedule = kso.schedules.Cubic(density, *ends)
        structure = None if regular is None else blocks_of(task, regular)
        masks = kso.MagnitudeMask(schedule, structure=structure)
        model = kso.parametrize(model, masks, **kernels)
        callbacks = [kso.callbacks.UpdateMasks()]
    with_rates(model, key["rate"], steps).fit(x, y, callbacks=callbacks, **fit)
    rows = task.rows(key["part"], 2**16 if y.ndim == 1 else 2**12, 1)
    loss, right = model.evaluate(*rows, batch_size=1024, verbose=0)
    there = [w for w in kso.prunable_weights(model) if re.search(task.on_blocks, w.path)]
    score = -loss if task.in_nats else 100 * right
    live = sum(weight.live for weight in there)
    return {"score": score, "live": live, "seconds": time.perf_counter() - begun}


def blocks_of(task: Task, regular: bool) -> kso.Block:
    """The blocks of a task."""
    return kso.Block(task.block, task.block, regular=regular)


def with_rates(model: keras.Model, rate: float, steps: int) -> keras.Model:
    """Compiled with the rates of the whole run, which a probe begins, too."""
    warmup = max(1, steps // 50)
    rates = keras.optimizers.schedules.CosineDecay(
        rate / warmup, steps, warmup_target=rate, warmup_steps=warmup
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rates), loss, metrics=["accuracy"])
    return model


def roads_table(lines: list[dict]) -> str:
    """The tables of the lines of `roads`."""
    tested = [line for line in lines if line.get("part") == "test"]
    found = ""
    for names in (("text", "images"), [name for name in TASKS if name not in ("text", "images")]):
        columns = sorted({(line["task"], line["density"]) for line in tested}, reverse=True)
        columns = [(task, density) for task, density in columns if task in names]
        rows = []
        for road, tuned in itertools.product(ROADS, (True, False)):
            cells = [""] * len(columns)
            for k, (task, density) in enumerate(columns):
                where = {"task": task, "density": density, "road": road}
                mine = [line for line in tested if where.items() <= line.items()]
                rate = best_rate(lines, task, road) if tuned and mine else UNTUNED
                scores = [abs(line["score"]) for line in mine if line["rate"] == rate]
                if len(scores) > 1 and (tuned or density == TASKS[task].tuned_at):
                    digits = 3 if TASKS[task].in_nats else 2
                    mean, spread = statistics.mean(scores), statistics.stdev(scores)
                    cells[k] = f"{mean:.{digits}f} ± {spread:.{digits}f}"
            if any(cells):
                rows.append([road, "tuned" if tuned else f"{UNTUNED:g}", *cells])
        if rows:
            header = ["road", "rate", *(f"{task}, {density:g}" for task, density in columns)]
            found += "\n## Other networks\n\n" * bool(found) + markdown(header, rows)
    if not found:
        return ""
    text, images = TASKS["text"], TASKS["images"]
    return (
        "\n## Roads to blocks\n\nBlocks of 16 x 16 unless a column says otherwise, by density; "
        f"equal steps of Adam with warm-up and cosine decay, batch {text.batch}, 3 seeds. text: an "
        f"MLP, the next character of Python's standard library after {READ}, two hidden layers of "
        f"256 units, both on blocks, {text.steps} steps, loss in nats. images: Fashion-MNIST, "
        f"three of 512, the last two on blocks, {images.steps} steps, accuracy in percent, on an "
        "H100, with at most 8 different counts of blocks on a side (elsewhere 6). CNN: four "
        "convolutions with batch normalization, of 32 and three times 64 channels, the last two "
        f"on blocks, Fashion-MNIST, {TASKS['CNN'].steps} steps. ViT: two blocks, 128 wide, of "
        f"16 patches, attention as well on blocks, Fashion-MNIST, {TASKS['ViT'].steps} steps, "
        "batch 64. Transformer on text: two such blocks, 32 characters, "
        f"{TASKS['Transformer on text'].steps} steps, batch 32, nats. Rates are chosen among three "
        "by one more seed on validation rows, at density 0.125, or 0.25 where it is the only one; "
        "all roads of the CNN, and some of the others, took the largest. In the CNN each line has "
        "one live block, which RigL cannot move. A probe's steps come first; percentages are parts "
        "of all steps. On JAX.\n\n"
    ) + found


# --- taps -----------------------------------------------------------------------------------------


LINES = RESULTS / "taps.jsonl"
TAPS_SIZES = ["14-256-16-32", "28-128-16-16", "28-128-16-32", "7-512-32-32"]


class BlocksOfTaps(keras.layers.Layer):
    """A 3x3 convolution of live blocks `(tap, block of inputs) -> block of outputs`.

    `y[o] = sum_k shift(x, tap[o, k])[input[o, k]] W[o, k]`, with as many `k` for every block `o`.
    """

    def __init__(self, channels: int, block: int, density: float, seed: int = 0) -> None:
        super().__init__()
        rng = np.random.default_rng(seed)
        self.block, blocks = block, channels // block
        count = round(9 * blocks * density)
        pairs = np.stack([rng.permutation(9 * blocks)[:count] for _ in range(blocks)])
        self.pairs = np.sort(pairs, axis=1)
        self.values = self.add_weight(
            shape=(blocks, count * block, block), initializer="glorot_uniform"
        )

    def call(self, x):
        """A product for each block of outputs."""
        _, height, width, channels = x.shape
        padded = ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        outputs = []
        for pairs, values in zip(self.pairs, ops.unstack(1 * self.values), strict=True):
            parts = []
            for pair in pairs:
                tap, part = divmod(int(pair), channels // self.block)
                (row, column), first = divmod(tap, 3), part * self.block
                shifted = padded[:, row : row + height, column : column + width]
                parts.append(shifted[..., first : first + self.block])
            outputs.append(ops.matmul(ops.concatenate(parts, axis=-1), values))
        return ops.concatenate(outputs, axis=-1)


def taps_stepper(layer: keras.layers.Layer, x: np.ndarray):
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
        return tape.gradient(total, [x, *[w.value for w in layer.trainable_weights]])

    given = tf.constant(x)
    return lambda: [g.numpy() for g in step(given)]


def taps_measure(given: argparse.Namespace) -> None:
    """Appends the times of the three, measured in turns, for each size."""
    rng = np.random.default_rng(0)
    for side, channels, batch, block in given.sizes:
        x = rng.normal(size=(batch, side, side, channels)).astype("float32")
        density = max(given.density, 2 * block / channels)
        common = {"kernel_size": 3, "padding": "same", "use_bias": False}
        layers = {
            "dense": keras.layers.Conv2D(channels, **common),
            "blocks of channels": kso.layers.BlockSparseConv2D(
                channels, density=density, block=block, seed=0, **common
            ),
            "blocks of taps": BlocksOfTaps(channels, block, density),
        }
        steps = {name: taps_stepper(layer, x) for name, layer in layers.items()}
        times = wall_and_cpu(steps, given.rounds, warm_up=2)
        for name, (wall, cpu) in times.items():
            run = {"side": side, "channels": channels, "batch": batch, "block": block}
            run |= {"density": density, "layer": name, "wall": wall, "cpu": cpu}
            run |= {"wall_ratio": wall / times["dense"][0], "cpu_ratio": cpu / times["dense"][1]}
            append(LINES, run | {"backend": keras.backend.backend()})
            print(run, flush=True)


def summarize() -> None:
    """Writes the table of the latest lines."""
    keys = ("backend", "side", "channels", "batch", "block", "layer")
    latest = {tuple(run[key] for key in keys): run for run in finished(LINES)}
    rows = []
    for key, run in latest.items():
        backend, side, channels, batch, block, layer = key
        size = f"{side} x {side} x {channels}, batch {batch}"
        times = [f"{1000 * run[clock]:.1f}" for clock in ("wall", "cpu")]
        ratios = [f"{run[f'{clock}_ratio']:.2f}" for clock in ("wall", "cpu")]
        rows.append([backend, size, str(block), f"{run['density']:.4g}", layer, *times, *ratios])
    header = ["backend", "images", "block", "density", "layer", "step [ms]", "cores [ms]"]
    text = "# Blocks of channels, blocks of single taps\n\n"
    text += (
        "A 3x3 convolution and its gradients, compiled by XLA, medians of interleaved calls; "
        "`cores` is the time that all cores have worked; ratios to dense.\n\n"
    )
    write("taps", text + markdown([*header, "ratio", "ratio of cores"], rows), [0])


def taps() -> None:
    """Convolutions on live blocks: of channels with all their taps, or of single taps.

        KERAS_BACKEND=jax python benchmarks/blocks.py taps [--rounds 9]

    A 3x3 convolution and its gradients, compiled by XLA: dense; `BlockSparseConv2D`, whose blocks
    have all nine taps of their channels; and one product over blocks of channels under single
    taps: for each block of outputs the images, shifted by its taps, are gathered, and multiplied
    at once. Each run is a line of `results/taps.jsonl`; `results/taps.md` has the medians.
    """
    parser = described(taps)
    parser.add_argument("--sizes", nargs="+", default=TAPS_SIZES, help="side-channels-batch-block")
    parser.add_argument("--density", type=float, default=0.1, help="or two blocks of each row")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--summary", action="store_true", help="only write the table")
    given = parsed(parser, quick={"sizes": ["4-32-2-8"], "rounds": 2})
    given.sizes = [tuple(int(part) for part in one.split("-")) for one in given.sizes]
    if not given.summary:
        taps_measure(given)
    summarize()


if __name__ == "__main__":
    chosen(step_times, trained, roads, taps)
