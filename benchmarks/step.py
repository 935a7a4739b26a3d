"""Time of a training step: parametrizations, quantization, structures, depth.

python benchmarks/step.py NAME [options]
"""

import functools
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from methods_summary import beside, percent
from networks import (
    cnn,
    deep_mlp,
    mlp,
    resnet,
    settings,
    stacked_cnn,
    stacked_mlp,
)
from one_shot import dense_cnn
from record import column, groups, last_of_each, machine, markdown, sentences
from runner import (
    Measurement,
    Run,
    Setting,
    beside_first,
    grid,
    interleaved,
    main,
    wall_and_cpu,
)
from training import Dataset, compiled, crossentropy, load, training_pass

import keras_sparse_ortho as kso

# Steps and updates are timed apart.
warnings.simplefilter("ignore", kso.errors.DensityWarning)

L = keras.layers
KINDS = kso.parametrizations

# --- parametrizations -----------------------------------------------------------------------------

STEPS = 10  # training steps in one sample
PERIOD = 100  # steps between two mask updates
COMPILED = {"tensorflow": [True, False], "jax": [True], "torch": [False]}
"""By backend, with XLA and without."""


STRIDED = {"filters": (32, 64, 64, 128), "strides": (1, 2, 1, 2)}
STEP_MODELS: dict[str, Callable[[int], keras.Model]] = {
    "MLP": lambda width: mlp((width,), 4 * [width]),
    "CNN": lambda width: cnn((32, 32, 3), 10, STRIDED),
}


class Parametrizations(Measurement):
    r"""Time of a training step of every parametrization against the dense model, interleaved.

        KERAS_BACKEND=tensorflow python benchmarks/step.py parametrizations
        KERAS_BACKEND=jax        python benchmarks/step.py parametrizations

    Writes `results/step_<backend>.md`. Rivals are the dense model, the same model with fixed
    masks of density 0.1, the same in compact storage, with soft thresholds, with scheduled masks
    and with straight-through top-k, and a second dense model, whose ratio to the first is the
    noise of the measurement. Scheduled masks are updated every 100 steps; the time of an update
    is measured separately and spread over them. The time of the selects, one for each kernel
    forward and one backward, is measured separately, too: it is the work that a mask adds to a
    step.

    On JAX glibc returns XLA's temporary memory and faults it in again, in some processes at most
    steps, in others rarely; then a fixed mask costs the MLP up to 1.15 instead of 1.03.
    This setting makes it keep memory:

        GLIBC_TUNABLES=glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=4294967296:\
        glibc.malloc.trim_threshold=8589934592
    """

    page = "step"
    settings = {
        "rounds": Setting(21, quick=3),
        "width": Setting(1024, "of the MLP", quick=256),
        "batches": Setting([128, 512], "of the MLP", quick=[128]),
        "cnn": Setting(True, quick=False),
    }

    def runs(self) -> list[Run]:
        given = self.given
        cases = [{"network": "MLP", "batch": batch} for batch in given.batches]
        if given.cnn:
            cases.append({"network": "CNN", "batch": 64})
        xla = COMPILED[keras.backend.backend()]
        return [
            case | {"xla": jit}
            for case in cases
            for jit in (xla[:1] if given.quick else xla)
        ]

    def run(self, which: Run) -> Iterator[Run]:
        rounds = self.given.rounds
        dense = STEP_MODELS[which["network"]](self.given.width)
        rivals = {"dense": dense, **parametrized(dense)}
        # Measurements outside of training come first: on JAX `fit` holds the variables.
        renewals = {key: renewal(rivals[key], 5) for key in list(rivals)[-2:]}
        on_torch = keras.backend.backend() == "torch"
        masking = (
            float("nan") if on_torch else selects(rivals["fixed mask"], 11)
        )
        rivals["dense again"] = keras.models.clone_model(dense)
        passes = {
            key: step_pass(model, which["xla"], which["batch"])
            for key, model in rivals.items()
        }
        times = interleaved(passes, rounds, warm_up=3)
        for key in list(rivals)[1:]:
            line = {"rival": key, "dense_ms": 1e3 * times["dense"] / STEPS}
            line["ms"] = 1e3 * times[key] / STEPS
            if key in renewals:
                line["renewal_ms"] = 1e3 * renewals[key]
            if key == "fixed mask":
                line["selects_ms"] = 1e3 * masking
            yield line

    def write(self) -> None:
        """Each backend has its page."""
        self.page = f"step_{keras.backend.backend()}"
        super().write()

    def report(self, lines: list[Run]) -> str:
        rows = []
        for line in lines:
            size = (
                f" 4 x {self.given.width}" if line["network"] == "MLP" else ""
            )
            xla = "XLA" if line["xla"] else "no XLA"
            name = f"{line['network']}{size}, batch {line['batch']}, {xla}"
            dense, step, renewed = (
                line["dense_ms"],
                line["ms"],
                line.get("renewal_ms"),
            )
            row = [
                name,
                line["rival"],
                f"{dense:.2f}",
                f"{step:.2f}",
                f"{step / dense:.3f}",
            ]
            if renewed is None:
                row += ["", ""]
            else:
                row += [
                    f"{renewed:.1f}",
                    f"{(step + renewed / PERIOD) / dense:.3f}",
                ]
            rows.append(
                [
                    *row,
                    f"{line['selects_ms']:.2f}" if "selects_ms" in line else "",
                ]
            )
        backend = keras.backend.backend()
        text = f"# Training step on {backend}: parametrizations against the dense model\n\n"
        text += sentences(
            f"""
            {machine()}, Keras {keras.__version__}. Adam, float32. Medians of {self.given.rounds}
            interleaved samples of {STEPS} steps. "dense again" is the dense model against itself:
            the noise. Renewals of masks are spread over {PERIOD} steps.
            """
        )
        if "GLIBC_TUNABLES" in os.environ:
            text += f"GLIBC_TUNABLES={os.environ['GLIBC_TUNABLES']}\n\n"
        header = ["model", "rival", "dense [ms]", "step [ms]", "ratio"]
        header += ["renewal [ms]", "ratio with renewals", "selects alone [ms]"]
        return text + markdown(header, rows)


def step_pass(
    model: keras.Model, jit: bool, batch: int
) -> Callable[[], object]:
    """A function that trains `STEPS` steps on data that is on the device already."""
    model.compile(keras.optimizers.Adam(1e-4), crossentropy(), jit_compile=jit)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * batch, *model.inputs[0].shape[1:])).astype(
        "float32"
    )
    y = rng.integers(0, 10, STEPS * batch).astype("int32")
    return training_pass(model, x, y, batch)


def renewal(model: keras.Model, rounds: int) -> float:
    """Seconds of `UpdateMasks` for all masks, once every `PERIOD` steps."""
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    # Its slots are reset with the masks.
    model.optimizer.build(model.trainable_variables)
    callback = kso.callbacks.UpdateMasks()
    callback.set_model(model)
    callback.on_train_begin()
    return interleaved({"renewal": lambda: callback.on_step(0, 1)}, rounds)[
        "renewal"
    ]


def selects(model: keras.Model, rounds: int) -> float:
    """Seconds of `where(mask, kernel, 0)` for all kernels, twice: forward and backward."""
    ops = keras.ops
    weights = kso.prunable_weights(model)
    masks = [
        ops.convert_to_tensor(w.parametrization.mask_value()) for w in weights
    ]
    kernels = [ops.convert_to_tensor(w.raw_value()) for w in weights]

    def select(kernels: list, masks: list) -> list:
        return [
            ops.where(m, k, ops.zeros((), k.dtype))
            for k, m in zip(kernels, masks, strict=False)
        ]

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        compiled = tf.function(select, jit_compile=True)
    else:
        import jax

        compiled = jax.jit(select)

    def run() -> None:
        for _ in range(2 * STEPS):
            last = compiled(kernels, masks)
        np.asarray(last[0])

    return interleaved({"selects": run}, rounds, warm_up=2)["selects"] / STEPS


def parametrized(dense: keras.Model) -> dict[str, keras.Model]:
    """The rivals of the dense model."""
    straight = KINDS.StraightThroughTopK(0.1, frequency=PERIOD)
    return {
        "fixed mask": kso.sparsify(dense, 0.1, seed=0),
        "compact": kso.sparsify(dense, 0.1, seed=0, storage="compact"),
        "soft threshold": kso.parametrize(
            dense, KINDS.SoftThreshold(s_init=-5.0)
        ),
        "magnitude mask": kso.parametrize(
            dense, KINDS.MagnitudeMask(0.1, frequency=PERIOD)
        ),
        "straight-through top-k": kso.parametrize(dense, straight),
    }


# --- quantized ------------------------------------------------------------------------------------

QUANTIZED_STEPS = 3  # of one measurement
QUANTIZED_NETS: dict[str, tuple[Callable[[], keras.Model], tuple[int, ...]]] = {
    "CNN": (dense_cnn, (28, 28, 1)),
    "MLP of 1024": (lambda: mlp((1024,), 3 * [1024]), (1024,)),
}


class Quantized(Measurement):
    """The time of a step of quantization-aware training, beside that of the masked network.

        KERAS_BACKEND=jax python benchmarks/step.py quantized

    Steps of the CNN of `one_shot.py` and of an MLP of three layers of 1024 units, density 0.1,
    batch 128, under XLA and interleaved. The page has the last of each backend.
    """

    page = lines = "quantized_step"
    resumes = False
    settings = {
        "nets": Setting([*QUANTIZED_NETS], choices=QUANTIZED_NETS),
        "rounds": Setting(15, quick=1),
    }

    def runs(self) -> list[Run]:
        return grid(backend=[keras.backend.backend()], network=self.given.nets)

    def run(self, which: Run) -> Iterator[Run]:
        build, shape = QUANTIZED_NETS[which["network"]]
        rng = np.random.default_rng(0)
        x = rng.normal(size=(128, *shape)).astype("float32")
        y = rng.integers(0, 10, 128)
        masked = kso.sparsify(build(), 0.1, seed=0)
        models = {
            "masked": masked,
            "int8, weights alone": kso.quantize_aware(masked, "int8", None),
            "int8": kso.quantize_aware(masked, "int8"),
            "int4": kso.quantize_aware(masked, "int4"),
        }
        for model in models.values():
            model.compile(
                keras.optimizers.Adam(1e-3), crossentropy(), jit_compile=True
            )
        calls = {
            kind: functools.partial(some_steps, m, x, y)
            for kind, m in models.items()
        }
        times = beside_first(wall_and_cpu(calls, self.given.rounds, warm_up=2))
        for kind, figures in times.items():
            yield {
                "kind": kind,
                "ms": 1e3 * figures["wall"] / QUANTIZED_STEPS,
                "cpu_ms": 1e3 * figures["cpu"] / QUANTIZED_STEPS,
                "relative": figures["wall_ratio"],
                "cpu": figures["cpu_ratio"],
            }

    def report(self, lines: list[Run]) -> str:
        by_kind = last_of_each(lines, "backend", "network", "kind")
        rows = [
            [
                *kind,
                f"{line['ms']:.1f}",
                f"{line['relative']:.2f}",
                f"{line['cpu']:.2f}",
            ]
            for kind, line in sorted(by_kind.items())
        ]
        header = [
            "backend",
            "network",
            "weights",
            "step [ms]",
            "to masked",
            "CPU time to masked",
        ]
        about = sentences(
            """
            Under XLA, batch 128, density 0.1; medians of interleaved calls. Activations are int8
            but in the second kind.
            """
        )
        return (
            "# A step of quantization-aware training\n\n"
            + about
            + markdown(header, rows)
        )


def some_steps(model: keras.Model, x: np.ndarray, y: np.ndarray) -> None:
    """Steps, each waited for."""
    for _ in range(QUANTIZED_STEPS):
        float(model.train_on_batch(x, y))


# --- structures -----------------------------------------------------------------------------------

SHAPE = (28, 28, 1)


def lstm(units: int, rank: int | None = None) -> keras.Model:
    """The rows of a picture, one after the other; with a rank, a thin layer before each cell."""
    layers: list[keras.Layer] = []
    for name in ("lower", "upper"):
        if rank is not None:
            layers.append(L.Dense(rank, use_bias=False, name=f"{name}_thin"))
        sequences = name == "lower"
        layers.append(L.LSTM(units, return_sequences=sequences, name=name))
    return keras.Sequential(
        [
            keras.Input(SHAPE),
            L.Reshape(SHAPE[:2]),
            *layers,
            L.Dense(10, name="head"),
        ]
    )


def thin_mlp(rank: int) -> keras.Model:
    """The MLP, whose kernels are products of two matrices."""
    layers: list[keras.Layer] = []
    for k in range(2):
        thin = L.Dense(rank, use_bias=False, name=f"hidden_{k}_thin")
        layers += [thin, L.Dense(512, "relu", name=f"hidden_{k}")]
    head = L.Dense(10, name="head")
    return keras.Sequential([keras.Input(SHAPE), L.Flatten(), *layers, head])


def shares_of(widths: Sequence[int], share: float) -> list[int]:
    """The widths times a share, and 1 at least."""
    return [max(round(width * share), 1) for width in widths]


BUILD: dict[str, Callable[[float], keras.Model]] = {
    "CNN 32-64-64-128": lambda share: cnn(
        SHAPE, 10, {"filters": shares_of((32, 64, 64, 128), share)}
    ),
    "ResNet-20 8-16-32": lambda share: resnet(
        SHAPE, 10, {"filters": shares_of((8, 16, 32), share), "blocks": 3}
    ),
    "MLP 784-512-512-10": lambda share: mlp(
        SHAPE, shares_of((512, 512), share)
    ),
    "LSTM 128-128": lambda share: lstm(*shares_of((128,), share)),
}
"""The networks, by the share of their widths."""
RANKS = {"MLP 784-512-512-10": 256, "LSTM 128-128": 128}
"""The ranks that networks of low rank start from; of the others channels are removed."""
THIN: dict[str, Callable[[int], keras.Model]] = {
    "MLP 784-512-512-10": thin_mlp,
    "LSTM 128-128": lambda rank: lstm(128, rank),
}
"""The same networks with one rank that is fixed from the start."""
GRAIN = 256
"""Steps between the shares of widths that are tried."""


def largest_below(
    build: Callable[[int], keras.Model], sizes: range, most: int
) -> keras.Model:
    """The network of the largest size that has at most so many parameters."""
    low, high = sizes.start, sizes.stop
    while high - low > 1:
        middle = (low + high) // 2
        if build(middle).count_params() <= most:
            low = middle
        else:
            high = middle
    return build(low)


class Structures(Measurement):
    """Networks after structured STR: parameters, multiply-adds, latency, outputs.

        KERAS_BACKEND=tensorflow python benchmarks/step.py structures

    Trains briefly on a part of Fashion-MNIST: `ChannelSoftThreshold` under `TargetDensity` on the
    CNN and the ResNet-20 of networks.py, which `remove_channels` then makes small, and
    `LowRankSoftThreshold` on an MLP and an LSTM, which `strip` turns into thin layers. "dense" is
    the same network without any wrapper. Its rivals have as many parameters as the converted
    network: "narrow" has smaller widths, all by one share, and "fixed rank" thin layers of one
    rank. All are trained in the same way.
    """

    page = lines = "structured"
    settings = {
        "rows": Setting(4096, quick=1024),
        "epochs": Setting(6, quick=1),
        "density": Setting(0.3),
        "networks": Setting([*BUILD], choices=BUILD, quick=[*BUILD][::2]),
        "seeds": Setting([0, 1, 2], quick=[0]),
    }

    def runs(self) -> list[Run]:
        return grid(network=self.given.networks, seed=self.given.seeds)

    def run(self, which: Run) -> Iterator[Run]:
        """Dense, parametrized, converted and rival networks, all trained in the same way."""
        data = load("fashion_mnist")
        network = which["network"]
        keras.utils.clear_session()
        keras.utils.set_random_seed(which["seed"])
        dense = BUILD[network](1.0)
        wrapped = structured(dense, RANKS.get(network))
        forms = {"strip": kso.strip}
        if network not in RANKS:
            forms["remove_channels"] = kso.remove_channels
        steering = kso.callbacks.TargetDensity(self.given.density, frequency=20)
        accuracies = {"dense": self.fitted(dense, data)}
        accuracies["wrapped"] = self.fitted(wrapped, data, steering)
        models = {"dense": dense, "wrapped": wrapped}
        models |= {name: form(wrapped) for name, form in forms.items()}
        most = [*models.values()][-1].count_params()
        for name, rival in rivals_of(network, most).items():
            models[name] = rival
            accuracies[name] = self.fitted(rival, data)
        live = live_structures(wrapped)
        for line in figures_of(models, data):
            if line["model"] in accuracies:
                line["accuracy"] = accuracies[line["model"]]
            yield line | {"live": live}

    def fitted(
        self, model: keras.Model, data: Dataset, *callbacks: Any
    ) -> float:
        """Trains the model, and returns its accuracy on the test set."""
        compiled(model, keras.optimizers.Adam(2e-3), jit_compile=False)
        x, y = data.x_train[: self.given.rows], data.y_train[: self.given.rows]
        model.fit(
            x,
            y,
            32,
            epochs=self.given.epochs,
            verbose=0,
            callbacks=[*callbacks],
        )
        return model.evaluate(data.x_test, data.y_test, verbose=0)[1]

    def report(self, lines: list[Run]) -> str:
        given = self.given
        about = sentences(
            f"""
            {machine()}, {keras.backend.backend()}, Keras {keras.__version__}, no XLA.
            Fashion-MNIST, {given.rows} pictures, {given.epochs} epochs of Adam, so accuracies are
            those of a short run: mean and standard deviation over seeds, of all test pictures.
            `ChannelSoftThreshold` (CNN, ResNet), and `LowRankSoftThreshold(rank)` with ranks 256
            (MLP) and 128 (LSTM), under `TargetDensity({given.density})`. "narrow" and "fixed rank"
            are trained dense networks with at most the parameters of the converted one; the
            wrapped one is compared with them by Student's test. Parameters and multiply-adds are
            means over seeds. Latency: medians of 101 interleaved `predict_on_batch`, on a machine
            with other work. The difference is the largest of the outputs from those of the
            wrapped model, on 512 pictures.
            """
        )
        by_model = groups(lines, "network", "model")
        rows = [
            structured_row(network, model, by_model)
            for network, model in by_model
        ]
        header = ["network", "model", "parameters", "million multiply-adds"]
        header += ["ms, batch 64", "ms, batch 1", "accuracy", "seeds"]
        header += ["wrapped ahead by", "p", "difference"]
        text = (
            "# Structured STR: before and after\n\n"
            + about
            + markdown(header, rows)
        )
        text += "\nLive channels, or ranks, of the kernels in order:\n\n"
        for network, line in last_of_each(lines, "network").items():
            text += f"- {network}: {', '.join(line['live'])}\n"
        return text


def structured(dense: keras.Model, rank: int | None) -> keras.Model:
    """The network with thresholds on channels, or on ranks if there is one."""
    # Recurrent kernels have no thin form in Keras.
    ends = "head/kernel", "/recurrent_kernel"
    paths = [weight.path for weight in kso.prunable_weights(dense)]
    exclude = [path for path in paths if path.endswith(ends)]
    if rank is None:
        channels = KINDS.ChannelSoftThreshold(s_init=-4.0)
        return kso.parametrize(dense, channels, exclude=exclude)
    ranks = KINDS.LowRankSoftThreshold(rank, s_init=-4.0)
    return kso.parametrize(dense, ranks, exclude=exclude)


def rivals_of(network: str, most: int) -> dict[str, keras.Model]:
    """Plain networks with at most so many parameters."""
    shares = range(1, GRAIN + 1)
    build = BUILD[network]
    rivals = {"narrow": largest_below(lambda k: build(k / GRAIN), shares, most)}
    if network in THIN:
        ranks = range(1, RANKS[network] + 1)
        rivals["fixed rank"] = largest_below(THIN[network], ranks, most)
    return rivals


def structured_row(
    network: str, model: str, by_model: Mapping[tuple[str, str], list[Run]]
) -> list[str]:
    """A row of the page: one model of a network, over the seeds."""
    members = by_model[network, model]
    row = [network, model]
    if model == "wrapped":
        row += ["", ""]
    else:
        row.append(f"{np.mean(column(members, 'parameters')):.0f}")
        row.append(f"{np.mean(column(members, 'flops')) / 1e6:.3f}")
    for batch in (64, 1):
        seconds = np.median(column(members, f"seconds_{batch}"))
        row.append(f"{1e3 * seconds:.2f}")
    trained = [line for line in members if "accuracy" in line]
    accuracies = column(trained, "accuracy")
    row.append(percent(accuracies) if trained else "")
    row.append(f"{len(members)}")
    if model in ("narrow", "fixed rank"):
        wrapped = column(by_model[network, "wrapped"], "accuracy")
        row += beside(wrapped, accuracies)[:2]
    else:
        row += ["", ""]
    converted = model not in ("dense", "narrow", "fixed rank")
    largest = max(column(members, "difference"))
    return [*row, f"{largest:.1e}" if converted else ""]


def figures_of(models: dict[str, keras.Model], data: Dataset) -> Iterator[Run]:
    """Size, latency and outputs of each model; the difference is to those of the wrapped one."""
    seconds = {}
    for batch in (64, 1):
        part = data.x_test[:batch]
        calls = {
            name: functools.partial(m.predict_on_batch, part)
            for name, m in models.items()
        }
        seconds[batch] = interleaved(calls, rounds=101, warm_up=5)
    outputs = {
        name: m.predict(data.x_test[:512], verbose=0)
        for name, m in models.items()
    }
    for name, model in models.items():
        yield {
            "model": name,
            "parameters": model.count_params(),
            "flops": kso.report(model).flops,
            "seconds_64": seconds[64][name],
            "seconds_1": seconds[1][name],
            "difference": float(
                np.abs(outputs[name] - outputs["wrapped"]).max()
            ),
        }


def live_structures(model: keras.Model) -> list[str]:
    """How many channels, or ranks, of each kernel are live."""
    texts = []
    for weight in kso.prunable_weights(model):
        thresholds = weight.parametrization
        if isinstance(thresholds, KINDS.ChannelSoftThreshold):
            texts.append(
                f"{thresholds.live_channels().sum()}/{weight.shape[-1]}"
            )
        elif isinstance(thresholds, KINDS.LowRankSoftThreshold):
            texts.append(f"{thresholds.live_rank}/{min(weight.shape)}")
    return texts


# --- very_deep ------------------------------------------------------------------------------------

DEEP = settings("deep")
DEEP_NETS: dict[str, tuple[str, Callable[..., keras.Model]]] = {
    "stack": ("thousand_mlp", stacked_mlp),
    "layers": ("thousand_mlp", deep_mlp),
    "convolutions": ("circular_cnn", stacked_cnn),
}


class VeryDeep(Measurement):
    """Compile time and step time over depth: in a `ScannedStack`, and layer by layer.

        KERAS_BACKEND=jax        python benchmarks/step.py very_deep
        KERAS_BACKEND=tensorflow python benchmarks/step.py very_deep --depths 10 100
        KERAS_BACKEND=torch      python benchmarks/step.py very_deep
        python benchmarks/step.py very_deep --kinds convolutions --depths 100 300

    The network of `thousand_mlp` in methods.toml: layers of 128 units, tanh, density 0.125, fixed
    masks, SGD with momentum, batch 128, by `fit`; or that of `circular_cnn`, a stack of
    convolutions, without XLA where its settings say so. Compile time is the difference between
    the first call of `fit` and the median one: tracing, lowering, XLA. Layer by layer goes up to
    `--in-a-row` layers. Each network is built and compiled alone; after that all train in turn. The
    page shows the last of each kind.
    """

    page = lines = "depth"
    resumes = False
    settings = {
        "kinds": Setting(["stack", "layers"], choices=DEEP_NETS),
        "depths": Setting([10, 100, 1000], quick=[4, 16]),
        "in_a_row": Setting(100, quick=16),
        "steps": Setting(5, quick=2),
        "rounds": Setting(5, quick=1),
    }

    def run(self, which: Run) -> Iterator[Run]:
        """A line for each network."""
        given = self.given
        batch = DEEP["thousand_mlp"]["batch_size"]
        rng = np.random.default_rng(0)
        x = rng.normal(size=(given.steps * batch, 28, 28, 1)).astype("float32")
        y = np.zeros(len(x))
        first, fits = {}, {}
        for depth in given.depths:
            for kind in given.kinds:
                if kind == "layers" and depth > given.in_a_row:
                    continue
                model = deep_network(kind, depth)
                fit = functools.partial(
                    model.fit, x, y, batch_size=batch, verbose=0
                )
                start = time.perf_counter()
                fit()
                first[kind, depth] = time.perf_counter() - start
                fits[kind, depth] = fit
        for (kind, depth), seconds in interleaved(fits, given.rounds).items():
            compiling = first[kind, depth] - seconds
            line = {"kind": kind, "depth": depth, "compiling": compiling}
            backend = keras.backend.backend()
            if backend == "tensorflow" and xla(kind):
                backend += " XLA"
            yield line | {"step": seconds / given.steps, "backend": backend}

    def report(self, lines: list[Run]) -> str:
        rows = []
        by_kind = last_of_each(lines, "backend", "depth", "kind")
        for (backend, depth, kind), line in sorted(by_kind.items()):
            step = 1e3 * line["step"]
            cells = [
                f"{line['compiling']:.1f}",
                f"{step:.1f}",
                f"{step / depth:.2f}",
            ]
            rows.append([backend, str(depth), kind, *cells])
        about = sentences(
            f"""
            {machine()}, Keras {keras.__version__}. An MLP of so many layers of 128 units, tanh,
            density 0.125 in fixed masks, SGD with momentum, batch 128. `stack`: a ScannedStack,
            `layers`: the same layers in a row; `convolutions`: a stack of circular 3x3 ones, 16
            channels on 4 x 4 pixels. Compiling is what the first call of `fit` takes longer than
            the median one; steps are medians of interleaved calls by the clock.
            """
        )
        header = [
            "backend",
            "depth",
            "kind",
            "compiling [s]",
            "step [ms]",
            "step / depth [ms]",
        ]
        return (
            "# Depth: compiling and a step of training\n\n"
            + about
            + markdown(header, rows)
        )


def xla(kind: str) -> bool:
    """Whether XLA compiles it, on TensorFlow."""
    return DEEP[DEEP_NETS[kind][0]].get("jit", True)


def deep_network(kind: str, depth: int) -> keras.Model:
    """Sparse and compiled."""
    name, build = DEEP_NETS[kind]
    dense = build((28, 28, 1), 10, DEEP[name] | {"depth": depth})
    model = kso.sparsify(dense, 0.125, "uniform", "random_sparse", seed=0)
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    model.compile(
        optimizer, crossentropy(), jit_compile="auto" if xla(kind) else False
    )
    return model


if __name__ == "__main__":
    main(Parametrizations, Quantized, Structures, VeryDeep)
