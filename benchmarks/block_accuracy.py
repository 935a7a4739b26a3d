"""The accuracy that live blocks cost: trained from scratch, on other roads, and from trained ones.

python benchmarks/block_accuracy.py NAME [options]
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from networks import cnn, vision_transformer
from one_shot import fashion_mnist, fit_with_warm_up
from record import (
    column,
    edge_of,
    groups,
    last_of_each,
    machine,
    markdown,
    matching,
    mean_and_deviation,
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
from slice_transformer import decoder
from training import (
    BATCH,
    LENGTH,
    SYMBOLS,
    accuracy,
    cached,
    compiled,
    crossentropy,
    first_rows,
    fit_language_model,
    load,
    perplexity,
    python_text,
    trained_language_model,
    windows,
)

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.orthogonal import exact_orthogonal

L = keras.layers
GAIN = 2**0.5

# --- trained --------------------------------------------------------------------------------------

SIZES = ((784, 1024), (1024, 1024), (1024, 512))
KINDS = ("dense", "unstructured", "blocks 16x1")


class Trained(Measurement):
    """Accuracy of block-sparse against unstructured and dense training.

        KERAS_BACKEND=tensorflow python benchmarks/block_accuracy.py trained     # about 10 minutes
        KERAS_BACKEND=tensorflow python benchmarks/block_accuracy.py trained --seeds 1 --epochs 1

    Fashion-MNIST, an MLP 784-1024-1024-512-10, Adam with cosine decay; the three hidden kernels
    are dense orthogonal, unstructured EOI at density 0.1, or exactly orthogonal in blocks of 16
    inputs at density 0.1, with fixed masks; the head is dense.
    """

    page = lines = "block_accuracy"
    settings = {
        "seeds": Setting(3, quick=1),
        "epochs": Setting(6, quick=1),
        "density": Setting(0.1),
        "rate": Setting(2e-3, "of Adam, at the start"),
        "samples": Setting(int, "train on so many pictures only", quick=4096),
    }

    def runs(self) -> list[Run]:
        """The kinds alternate, so that an interrupted run compares them."""
        given = self.given
        few = {"samples": [given.samples]} if given.samples else {}
        axes = {
            "epochs": [given.epochs],
            "density": [given.density],
            "rate": [given.rate],
        }
        return grid(seed=range(given.seeds), kind=KINDS, **axes, **few)

    def run(self, which: Run) -> Run:
        """One training; accuracy on the test set after the last epoch."""
        data = first_rows(load("fashion_mnist"), which.get("samples"))
        seed = which["seed"]
        keras.utils.set_random_seed(seed)
        layers = [
            hidden(which["kind"], k, which["density"], 100 * seed + k)
            for k in range(len(SIZES))
        ]
        inputs = keras.Input(data.x_train.shape[1:])
        model = keras.Sequential(
            [inputs, L.Flatten(), *layers, L.Dense(data.classes)]
        )
        steps = which["epochs"] * -(-len(data.x_train) // 256)
        rates = keras.optimizers.schedules.CosineDecay(which["rate"], steps)
        jit = keras.backend.backend() != "torch"
        compiled(model, keras.optimizers.Adam(rates), jit_compile=jit)
        start = time.perf_counter()
        model.fit(
            data.x_train, data.y_train, 256, epochs=which["epochs"], verbose=0
        )
        seconds = time.perf_counter() - start
        share = accuracy(model, data) / 100
        plain = model if which["kind"] == "dense" else kso.strip(model)
        kernels = [
            np.asarray(layer.kernel)
            for layer in plain.layers
            if hasattr(layer, "kernel")
        ]
        return {
            "accuracy": share,
            "live": int(
                sum(np.count_nonzero(kernel) for kernel in kernels[:-1])
            ),
            "size": int(sum(kernel.size for kernel in kernels[:-1])),
            "seconds": seconds,
        }

    def report(self, lines: list[Run]) -> str:
        given = self.given
        runs = [self.line_of(which) for which in self.runs()]
        by_kind = groups([run for run in runs if run is not None], "kind")
        dense = statistics.mean(column(by_kind["dense"], "accuracy"))
        rows = []
        for kind, members in by_kind.items():
            accuracies = column(members, "accuracy")
            spread = (
                f" ± {statistics.stdev(accuracies):.2%}"
                if len(accuracies) > 1
                else ""
            )
            mean = statistics.mean(accuracies)
            live = f"{members[0]['live']:,} of {members[0]['size']:,}"
            seconds = statistics.mean(column(members, "seconds"))
            ahead = f"{100 * (mean - dense):+.2f}"
            rows.append(
                [kind, live, f"{mean:.2%}{spread}", ahead, f"{seconds:.0f}"]
            )
        about = sentences(
            f"""
            {machine()}, Keras {keras.__version__} on {keras.backend.backend()}. MLP
            784-1024-1024-512-10, {given.samples or 60000} pictures, {given.epochs} epochs of Adam
            ({given.rate:g}, cosine decay), batch 256, {given.seeds} seeds. Test accuracy after the
            last epoch, mean and standard deviation; `nonzero` is of the three hidden kernels.
            """
        )
        header = [
            "hidden kernels",
            "nonzero",
            "accuracy",
            "against dense, points",
            "training [s]",
        ]
        title = f"# The price of blocks: Fashion-MNIST, density {given.density:g}\n\n"
        return title + about + markdown(header, rows) + roads_table(lines)


def hidden(kind: str, k: int, density: float, seed: int) -> keras.Layer:
    """A hidden layer of one of the kinds."""
    inputs, outputs = SIZES[k]
    options: Run = {"activation": "relu", "name": f"h{k}"}
    if kind == "blocks 16x1":
        start = ExactOrthogonal(
            density, gain=GAIN, seed=seed, structure=kso.Block(16, 1)
        )
        return kso.PrunableLayer(
            L.Dense(outputs, kernel_initializer=start, **options)
        )
    if kind == "dense":
        start = keras.initializers.Orthogonal(GAIN, seed=seed)
        return L.Dense(outputs, kernel_initializer=start, **options)
    kernel, mask = exact_orthogonal(
        (inputs, outputs), density, gain=GAIN, seed=seed
    )
    layer = L.Dense(outputs, **options)
    wrapped = kso.PrunableLayer(
        layer, kso.parametrizations.FixedMask(mask=mask)
    )
    wrapped.build((None, inputs))
    layer.kernel.assign(kernel)
    return wrapped


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
    part: str,
    count: int,
    seed: int,
    length: int = READ,
    *,
    all_of_them: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Random windows of a part of Python's standard library, and the characters that follow."""
    trained_on, others = python_text()
    half = len(others) // 2
    symbols = {
        "train": trained_on,
        "valid": others[:half],
        "test": others[half:],
    }[part]
    x, y = windows(symbols, count, seed, length)
    return x, y if all_of_them else y[:, -1]


def image_rows(
    part: str, count: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
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


def network_of(
    units: int, depth: int, classes: int, *inputs: Any
) -> keras.Model:
    """An MLP behind layers, which it makes."""
    like = {
        "activation": "relu",
        "kernel_initializer": keras.initializers.Orthogonal(GAIN),
    }
    hidden = [L.Dense(units, **like, name=f"h{k}") for k in range(depth)]
    return keras.Sequential(
        [*(make() for make in inputs), *hidden, L.Dense(classes)]
    )


OF_MLP = {
    "options": {"initializer": ExactOrthogonal(gain=GAIN)},
    "tuned_at": 0.125,
    "batch": 128,
}
LATER = {"options": {}, "tuned_at": 0.25, "block": 16}


def on_text(block: int) -> Task:
    """The next character after 16, which uses its inputs unevenly."""

    def build() -> keras.Model:
        inputs = (
            lambda: keras.Input((READ,), dtype="int32"),
            lambda: L.Embedding(SYMBOLS, READ),
        )
        return network_of(256, 2, SYMBOLS, *inputs, L.Flatten)

    rates = (4e-3, 8e-3, 1.6e-2)
    own = {"on_blocks": "h[01]/", "block": block, "steps": 3000, "rates": rates}
    return Task(build, rows=text_rows, in_nats=True, **own, **OF_MLP)


TASKS = {
    "text": on_text(16),
    "text, blocks of 32": on_text(32),
    "images": Task(
        lambda: network_of(
            512, 3, 10, lambda: keras.Input((28, 28, 1)), L.Flatten
        ),
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
OF_MLPS = ("text", "images")
"""The tasks of the first table."""


class Roads(Measurement):
    """Ways to live blocks, with equal steps.

        KERAS_BACKEND=jax python benchmarks/block_accuracy.py roads

    `TASKS` are MLPs on text and images, a CNN, and Transformers on images and text. A probe's
    steps come before those of the others. Gradual roads stay masked; their schedule is in parts
    of all steps. Adam with warm-up and cosine decay. Each road has the best of three rates, by one
    seed on validation rows at one density, and the rate that nobody tuned. Adds lines to
    `results/block_accuracy.jsonl`; `trained` writes the page.
    """

    lines = "block_accuracy"
    settings = {
        "tasks": Setting([*OF_MLPS], choices=TASKS, quick=["text"]),
        "roads": Setting([*ROADS], choices=ROADS, quick=["dense", SCRATCH]),
        "densities": Setting([0.25, 0.125, 0.0625], quick=[0.125]),
        "seeds": Setting([0, 1, 2], quick=[0]),
        "steps": Setting(int, "for others than those of the table", quick=40),
        "jobs": Setting(1, "processes of one thread each"),
    }

    def measure(self) -> None:
        """Chooses the rates first, then makes the runs of the tables."""
        given = self.given
        pairs = [(task, road) for task in given.tasks for road in given.roads]
        self.make_all(
            self.case(task, road, rate)
            for task, road in pairs
            for rate in TASKS[task].rates
        )
        lines = self.finished()
        tuned, untuned = [], []
        for task, road in pairs:
            tuned_at = TASKS[task].tuned_at
            densities = [tuned_at] if road == "dense" else given.densities
            best = self.case(task, road, best_rate(lines, task, road))
            tuned += self.tests(best, densities)
            untuned += self.tests(self.case(task, road, UNTUNED), [tuned_at])
        self.make_all(
            [*tuned, *(which for which in untuned if which not in tuned)]
        )

    def case(self, task: str, road: str, rate: float) -> Run:
        """The settings of a run that chooses a rate."""
        steps = self.given.steps or TASKS[task].steps
        case = {
            "task": task,
            "road": road,
            "density": TASKS[task].tuned_at,
            "rate": rate,
        }
        return case | {"seed": 100, "steps": steps, "part": "valid"}

    def tests(self, case: Run, densities: Iterable[float]) -> list[Run]:
        """The runs of a table like this one."""
        axes = grid(density=densities, seed=self.given.seeds)
        return [case | {"part": "test"} | axis for axis in axes]

    def make_all(self, cases: Iterable[Run]) -> None:
        """Makes the runs that are missing, several at a time."""
        missing = [which for which in cases if self.line_of(which) is None]
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(
            self.given.jobs, context
        ) as pool:
            futures = {
                pool.submit(run_of_road, which): which for which in missing
            }
            for future in concurrent.futures.as_completed(futures):
                self.add(futures[future] | future.result())


def best_rate(lines: list[dict], task: str, road: str) -> float:
    own = [line for line in lines if line.get("part") == "valid"]
    own = [line for line in own if (line["task"], line["road"]) == (task, road)]
    return max(own, key=lambda line: line["score"])["rate"]


def run_of_road(key: dict) -> dict:
    """One training: the score, accuracy in percent or the negative loss, and what is live."""
    keras.utils.set_random_seed(key["seed"])
    task, road, density, steps = (
        TASKS[key["task"]],
        key["road"],
        key["density"],
        key["steps"],
    )
    model = with_rates(task.build(), key["rate"], steps)
    x, y = task.rows("train", task.batch * steps, 1000 + key["seed"])
    given = task.options | {"storage": "blocks", "seed": key["seed"]}
    kernels, callbacks, begun = (
        {"include": f".*({task.on_blocks}).*"},
        [],
        time.perf_counter(),
    )
    fit = {"batch_size": task.batch, "shuffle": False, "verbose": 0}
    if road in PROBES:
        probing = {
            "steps": round(PROBES[road] * steps),
            "structure": blocks_of(task, False),
        }
        found = kso.callbacks.probe(
            model, density, (x, y), **probing, **kernels, **fit
        )
        model = kso.sparsify(model, budget=found, **given)
    elif road in (SCRATCH, RIGL):
        structure = {"structure": blocks_of(task, False), "budget": "uniform"}
        model = kso.sparsify(model, density, **structure, **kernels, **given)
        if road == RIGL:
            callbacks = [
                kso.callbacks.RigL((x, y), task.batch, seed=key["seed"])
            ]
    elif road in GRADUAL:
        regular, first, last = GRADUAL[road]
        ends = (
            round(first * steps),
            max(round(last * steps), round(first * steps) + 1),
        )
        schedule = kso.schedules.Cubic(density, *ends)
        structure = None if regular is None else blocks_of(task, regular)
        masks = kso.MagnitudeMask(schedule, structure=structure)
        model = kso.parametrize(model, masks, **kernels)
        callbacks = [kso.callbacks.UpdateMasks()]
    with_rates(model, key["rate"], steps).fit(x, y, callbacks=callbacks, **fit)
    rows = task.rows(key["part"], 2**16 if y.ndim == 1 else 2**12, 1)
    loss, right = model.evaluate(*rows, batch_size=1024, verbose=0)
    there = [
        w
        for w in kso.prunable_weights(model)
        if re.search(task.on_blocks, w.path)
    ]
    score = -loss if task.in_nats else 100 * right
    live = sum(weight.live for weight in there)
    return {
        "score": score,
        "live": live,
        "seconds": time.perf_counter() - begun,
    }


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


def roads_table(lines: list[Run]) -> str:
    """The tables of the lines of `roads`."""
    runs = matching(lines, part="test")
    others = [name for name in TASKS if name not in OF_MLPS]
    tables = [roads_of_tasks(lines, runs, names) for names in (OF_MLPS, others)]
    tables = [table for table in tables if table]
    if not tables:
        return ""
    text, images = TASKS["text"], TASKS["images"]
    about = sentences(
        f"""
        Blocks of 16 x 16 unless a column says otherwise, by density; equal steps of Adam with
        warm-up and cosine decay, batch {text.batch}, 3 seeds. text: an MLP, the next character of
        Python's standard library after {READ}, two hidden layers of 256 units, both on blocks,
        {text.steps} steps, loss in nats. images: Fashion-MNIST, three of 512, the last two on
        blocks, {images.steps} steps, accuracy in percent, on an H100, with at most 8 different
        counts of blocks on a side (elsewhere 6). CNN: four convolutions with batch normalization,
        of 32 and three times 64 channels, the last two on blocks, Fashion-MNIST,
        {TASKS["CNN"].steps} steps. ViT: two blocks, 128 wide, of 16 patches, attention as well on
        blocks, Fashion-MNIST, {TASKS["ViT"].steps} steps, batch 64. Transformer on text: two such
        blocks, 32 characters, {TASKS["Transformer on text"].steps} steps, batch 32, nats. Rates are
        chosen among three by one more seed on validation rows, at density 0.125, or 0.25 where it
        is the only one. At `low` or `high` it is the least or the largest of the three: a better
        one may lie beyond. In the CNN
        each line has one live block, which RigL cannot move. A probe's steps come first;
        percentages are parts of all steps. On JAX.
        """
    )
    return (
        "\n## Roads to blocks\n\n"
        + about
        + "\n## Other networks\n\n".join(tables)
    )


def roads_of_tasks(
    lines: list[Run], runs: list[Run], names: Iterable[str]
) -> str:
    """The table of some tasks, or nothing."""
    columns = sorted(
        {(run["task"], run["density"]) for run in runs}, reverse=True
    )
    columns = [(task, density) for task, density in columns if task in names]
    rows = []
    for road, tuned in itertools.product(ROADS, (True, False)):
        cells = [
            road_cell(lines, runs, road, tuned, *where) for where in columns
        ]
        if any(cells):
            rows.append([road, "tuned" if tuned else f"{UNTUNED:g}", *cells])
    if not rows:
        return ""
    header = [
        "road",
        "rate",
        *(f"{task}, {density:g}" for task, density in columns),
    ]
    return markdown(header, rows)


def road_cell(
    lines: list[Run],
    runs: list[Run],
    road: str,
    tuned: bool,
    task: str,
    density: float,
) -> str:
    """Mean and deviation of a road at the tuned rate, or at the one that nobody tuned."""
    members = matching(runs, task=task, density=density, road=road)
    if not members or not (tuned or density == TASKS[task].tuned_at):
        return ""
    rate = best_rate(lines, task, road) if tuned else UNTUNED
    scores = [abs(run["score"]) for run in members if run["rate"] == rate]
    if len(scores) < 2:
        return ""
    digits = 3 if TASKS[task].in_nats else 2
    cell = mean_and_deviation(scores, digits, "±")
    edge = edge_of(rate, TASKS[task].rates)
    return f"{cell} {edge}" if tuned and edge != "-" else cell


# --- pruned ---------------------------------------------------------------------------------------

MLP_WIDTH, MLP_EPOCHS = 1024, 4
CALIBRATION = {"mlp": 2048, "text": 512}
PRUNE = {
    "OBS": {"score": "obs"},
    "OBS, any pattern": {"score": "obs"},
    "magnitude, refit": {"score": "magnitude"},
}
# Method, side of a block.
CASES = {"mlp": [(method, 32) for method in PRUNE]}
CASES["text"] = [*CASES["mlp"], ("OBS", 16), ("OBS, any pattern", 16)]
CASES["text_epoch"] = [("OBS", 32)]
STAY_DENSE = {
    "mlp": ["head"],
    "text": ["embedding", "head"],
    "text_epoch": ["embedding", "head"],
}
"""Layers that stay dense."""


def framed_mlp(width: int = MLP_WIDTH) -> keras.Model:
    """Three hidden layers for images with a frame, so that blocks divide the inputs."""
    hidden = [
        L.Dense(width, activation="relu", name=f"hidden_{k}") for k in range(3)
    ]
    head = L.Dense(10, name="head")
    return keras.Sequential([keras.Input((32, 32)), L.Flatten(), *hidden, head])


def framed(images: np.ndarray) -> np.ndarray:
    """Images of 32 x 32 pixels."""
    return np.pad(images[..., 0], ((0, 0), (2, 2), (2, 2)))


class Mlp:
    """The MLP: percent of the test images."""

    def __init__(self, width: int, images: int) -> None:
        self.width = width
        self.images = images
        data = fashion_mnist(images)
        x, x_test = (
            np.pad(x[..., 0], ((0, 0), (2, 2), (2, 2)))
            for x in (data.x_train, data.x_test)
        )
        self.data = dataclasses.replace(data, x_train=x, x_test=x_test)
        self.inputs = x[: CALIBRATION["mlp"]]

    def trained(self, seed: int) -> keras.Model:
        """The dense network, from its file if there is one."""
        keras.utils.set_random_seed(seed)
        model = framed_mlp(self.width)
        name = f"{self.width}-{seed}-{self.images}"
        fit = functools.partial(
            fit_with_warm_up, model, self.data, MLP_EPOCHS, 1e-3
        )
        return cached("trained_blocks", name, model, fit)

    def train_on(self, model: keras.Model, seed: int) -> None:
        """One epoch."""
        fit_with_warm_up(model, self.data, 1, 5e-4)

    def score(self, model: keras.Model) -> float:
        """Percent."""
        return accuracy(compiled(model, "sgd"), self.data)


class Text:
    """The language model: perplexity; trained on for as many steps as before, or for an epoch."""

    def __init__(self, steps: int, epoch: bool) -> None:
        self.steps = steps
        symbols, _ = python_text()
        self.more = len(symbols) // (BATCH * LENGTH) if epoch else steps
        self.inputs, _ = windows(symbols, CALIBRATION["text"], 7)

    def trained(self, seed: int) -> keras.Model:
        """The dense model."""
        return trained_language_model(seed, self.steps)

    def train_on(self, model: keras.Model, seed: int) -> None:
        """On other windows."""
        fit_language_model(model, self.more, 100 + seed, 3e-3)

    def score(self, model: keras.Model) -> float:
        """Perplexity."""
        return perplexity(model)


def on_blocks(
    model: keras.Model,
    name: str,
    method: str,
    side: int,
    density: float,
    inputs: Any,
) -> keras.Model:
    """The trained model of a network on live blocks."""
    return kso.prune(
        model,
        density,
        data=inputs,
        structure=kso.Block(side, side, regular="any" not in method),
        storage="blocks",
        exclude=STAY_DENSE[name],
        **PRUNE[method],
    )


class Pruned(Measurement):
    """Trained networks onto live blocks: accuracy at once and after some training.

        KERAS_BACKEND=jax python benchmarks/block_accuracy.py pruned [--networks mlp text]

    An MLP on Fashion-MNIST and the small language model of training.py are trained, and pruned to
    blocks at one density. Then they are trained on live blocks: the MLP for an epoch, the language
    model for as many steps as it was trained before, and for an epoch of its text.
    """

    page = lines = "trained_blocks"
    settings = {
        "networks": Setting([*CASES], choices=CASES, quick=["mlp"]),
        "seeds": Setting(3, quick=1),
        "density": Setting(0.25),
        "width": Setting(MLP_WIDTH, "of the MLP", quick=128),
        "images": Setting(50000, "for the MLP", quick=2000),
        "steps": Setting(1500, "of the language model"),
    }

    def runs(self) -> Iterable[Run]:
        given = self.given
        for seed, network in itertools.product(
            range(given.seeds), given.networks
        ):
            setting = {
                "network": network,
                "seed": seed,
                "density": given.density,
            }
            setting |= (
                {"width": given.width}
                if network == "mlp"
                else {"steps": given.steps}
            )
            for method, block in [("dense", 0), *CASES[network]]:
                yield setting | {"method": method, "block": block}

    def run(self, which: Run) -> Run:
        network, seed, method = which["network"], which["seed"], which["method"]
        task = self.task(network)
        model = task.trained(seed)
        start = time.perf_counter()
        if method != "dense":
            model = on_blocks(
                model,
                network,
                method,
                which["block"],
                which["density"],
                task.inputs,
            )
        results = {
            "seconds": time.perf_counter() - start,
            "at_once": task.score(model),
        }
        kernels = [
            weight
            for weight in kso.prunable_weights(model)
            if weight.live < weight.size
        ]
        if kernels:
            live = sum(weight.live for weight in kernels)
            results["live"] = live / sum(weight.size for weight in kernels)
        start = time.perf_counter()
        task.train_on(model, seed)
        return results | {
            "training": time.perf_counter() - start,
            "after": task.score(model),
        }

    def task(self, network: str) -> Mlp | Text:
        """The data, training and score of a network."""
        if network == "mlp":
            return Mlp(self.given.width, self.given.images)
        return Text(self.given.steps, epoch=network == "text_epoch")

    def report(self, lines: list[Run]) -> str:
        given = self.given
        runs = matching(lines, density=given.density)
        text = "# Trained networks onto live blocks\n\n" + sentences(
            f"""
            Kernels of blocks at density {given.density:g}, regular or in any pattern, all but
            embeddings and heads; mean and standard deviation over the seeds. OBS and refits on
            calibration data. Dense networks are trained on for as many steps, too; differences are
            to the dense one before that.
            """
        )
        about = {
            "mlp": f"""MLP\n\nFashion-MNIST, three hidden layers of {given.width}, {MLP_EPOCHS}
            epochs on {given.images} images, then one epoch; {CALIBRATION["mlp"]} images for
            calibration. Test accuracy in percent.""",
            "text": f"""Language model\n\nThe one of `one_shot.py on_text`, 128 wide, trained for
            {given.steps} batches, and for as many again; {CALIBRATION["text"]} windows for
            calibration. Perplexity; differences in percent.""",
            "text_epoch": """An epoch of the text\n\nThe language model, trained on for as many
            steps as have all text once.""",
        }
        for network, words in about.items():
            members = matching(runs, network=network)
            members = [
                run
                for run in members
                if run.get("width", given.width) == given.width
            ]
            if members:
                heading, _, paragraph = words.partition("\n\n")
                text += f"## {heading}\n\n{sentences(paragraph)}"
                text += f"{pruned_table(network, members)}\n"
        return text + pruned_times_table(runs)


def pruned_table(network: str, runs: list[Run]) -> str:
    """A row for each method and size of blocks."""
    dense = {
        run["seed"]: run["at_once"] for run in matching(runs, method="dense")
    }

    def change(run: Run, key: str) -> float:
        before = dense[run["seed"]]
        return (
            run[key] - before
            if network == "mlp"
            else 100 * (run[key] / before - 1)
        )

    rows = []
    for method, block in [("dense", 0), *CASES[network]]:
        members = matching(runs, method=method, block=block)
        if not members:
            continue
        row = [method, str(block or "")]
        for key in ("at_once", "after"):
            row.append(mean_and_deviation(column(members, key)))
            row.append(
                f"{statistics.mean(change(run, key) for run in members):+.2f}"
            )
        rows.append(
            [*row, f"{statistics.mean(column(members, 'seconds')):.0f}"]
        )
    header = ["method", "block", "at once", "to dense", "after training"]
    return markdown([*header, "then to dense", "time to prune [s]"], rows)


class PrunedTimes(Pruned):
    """The time of a training step of the networks of `pruned`, dense and on blocks.

        KERAS_BACKEND=jax python benchmarks/block_accuracy.py pruned_times

    Adam, by `fit`; models train in turn. The lines and the page are those of `pruned`.
    """

    resumes = False
    settings = Pruned.settings | {
        "timed": Setting(
            [
                "mlp-2048-128-12",
                "mlp-2048-64-20",
                "text-128-16-24",
                "text-512-16-4",
            ],
            "network-width-batch-steps",
            quick=["mlp-256-8-2"],
        ),
        "blocks": Setting([32, 64, 128], quick=[32]),
        "rounds": Setting(7, quick=1),
    }

    def runs(self) -> Iterable[Run]:
        for case in self.given.timed:
            network, width, batch, _ = case.split("-")
            yield {"timed": network, "width": int(width), "batch": int(batch)}

    def run(self, which: Run) -> Iterable[Run]:
        given = self.given
        width, batch = which["width"], which["batch"]
        case = f"{which['timed']}-{width}-{batch}-"
        steps = next(
            int(timed.split("-")[3])
            for timed in given.timed
            if timed.startswith(case)
        )
        rng = np.random.default_rng(0)
        count = batch * steps
        if which["timed"] == "mlp":
            model = framed_mlp(width)
            x = rng.normal(size=(count, 32, 32))
            y = rng.integers(0, 10, count)
        else:
            heads = width // (32 if width < 256 else 64)
            model = decoder(LENGTH, SYMBOLS, width, 2, heads, 4 * width)
            x = y = rng.integers(0, SYMBOLS, (count, LENGTH)).astype("int32")
        models = {0: model}
        for side in given.blocks:
            if side < width // 2:
                models[side] = kso.prune(
                    model,
                    given.density,
                    structure=kso.Block(side, side),
                    storage="blocks",
                    exclude=STAY_DENSE[which["timed"]],
                )
        fits = {}
        for side, sparse in models.items():
            sparse.compile(keras.optimizers.Adam(1e-4), crossentropy())
            fits[side] = functools.partial(
                sparse.fit, x, y, batch_size=batch, shuffle=False, verbose=0
            )
        times = beside_first(wall_and_cpu(fits, given.rounds, warm_up=2))
        for side, figures in times.items():
            of_step = {
                clock: figures[clock] / steps for clock in ("wall", "cpu")
            }
            line = {"block": side, "density": given.density} | figures | of_step
            yield line | {"backend": keras.backend.backend()}


def pruned_times_table(runs: list[Run]) -> str:
    """The section on the time of a step, if there are times."""
    timed = [run for run in runs if "timed" in run]
    if not timed:
        return ""
    rows = []
    for key, run in last_of_each(
        timed, "backend", "timed", "width", "batch", "block"
    ).items():
        times = [f"{1000 * run[clock]:.1f}" for clock in ("wall", "cpu")]
        ratios = [f"{run[f'{clock}_ratio']:.2f}" for clock in ("wall", "cpu")]
        rows.append(
            [*map(str, key[:4]), str(key[4] or "dense"), *times, *ratios]
        )
    header = [
        "backend",
        "network",
        "width",
        "batch",
        "block",
        "step [ms]",
        "cores [ms]",
    ]
    about = sentences(
        """
        Adam, medians of interleaved runs of `fit`; `cores` is the time that all cores have worked;
        ratios to dense.
        """
    )
    table = markdown([*header, "ratio", "ratio of cores"], rows)
    return "## Time of a training step\n\n" + about + table


if __name__ == "__main__":
    main(Trained, Roads, Pruned, PrunedTimes)
