"""Time of a training step: parametrizations, structures, depth.

    python benchmarks/step.py NAME [options]

The measurements:

- `parametrizations`: time of a training step of every parametrization against the dense model,
  interleaved.
- `structures`: networks after structured STR: parameters, multiply-adds, latency, outputs.
- `very_deep`: compile time and step time over depth: in a `ScannedStack`, and layer by layer.
"""

import functools
import os
import time
import warnings
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from networks import cnn, deep_mlp, resnet, settings, stacked_cnn, stacked_mlp
from record import (
    RESULTS,
    append,
    chosen,
    described,
    finished,
    interleaved,
    machine,
    markdown,
    parsed,
    write,
)
from training import Dataset, load

import keras_sparse_ortho as kso

# --- parametrizations -----------------------------------------------------------------------------


# Steps and updates are timed apart.
warnings.simplefilter("ignore", kso.errors.DensityWarning)

L = keras.layers
STEPS = 10  # training steps in one sample
PERIOD = 100  # steps between two mask updates


def mlp(width: int) -> keras.Model:
    layers = [L.Dense(width, activation="relu", name=f"hidden_{k}") for k in range(4)]
    return keras.Sequential([keras.Input((width,)), *layers, L.Dense(10, name="head")])


def small_cnn() -> keras.Model:
    layers: list[keras.layers.Layer] = [keras.Input((32, 32, 3))]
    for k, filters in enumerate((32, 64, 64, 128)):
        layers += [
            L.Conv2D(filters, 3, strides=1 + k % 2, padding="same", use_bias=False, name=f"c{k}"),
            L.BatchNormalization(),
            L.ReLU(),
        ]
    return keras.Sequential([*layers, L.GlobalAveragePooling2D(), L.Dense(10, name="head")])


def stepper(model: keras.Model, jit: bool, batch: int):
    """A function that trains `STEPS` steps on data that is on the device already."""
    model.compile(
        keras.optimizers.Adam(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit,
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * batch, *model.inputs[0].shape[1:])).astype("float32")
    y = rng.integers(0, 10, STEPS * batch).astype("int32")

    if keras.backend.backend() != "tensorflow":
        return lambda: model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True).cache()
    batches = iter(data.repeat())
    model.make_train_function()

    def run() -> None:
        for _ in range(STEPS):
            logs = model.train_function(batches)
        float(logs["loss"])  # waits for the device

    return run


def renewal(model: keras.Model, rounds: int) -> float:
    """Seconds of `UpdateMasks` for all masks, once every `PERIOD` steps."""
    model.compile(keras.optimizers.Adam(1e-4), "mse")
    model.optimizer.build(model.trainable_variables)  # its slots are reset with the masks
    callback = kso.callbacks.UpdateMasks()
    callback.set_model(model)
    callback.on_train_begin()
    return interleaved({"renewal": lambda: callback.on_step(0, 1)}, rounds)["renewal"]


def selects(model: keras.Model, rounds: int) -> float:
    """Seconds of `where(mask, kernel, 0)` for all kernels, twice: forward and backward."""
    ops = keras.ops
    weights = kso.prunable_weights(model)
    masks = [ops.convert_to_tensor(w.parametrization.mask_value()) for w in weights]
    kernels = [ops.convert_to_tensor(w.raw_value()) for w in weights]

    def select(kernels: list, masks: list) -> list:
        return [
            ops.where(m, k, ops.zeros((), k.dtype)) for k, m in zip(kernels, masks, strict=False)
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
    kinds = kso.parametrizations
    return {
        "fixed mask": kso.sparsify(dense, 0.1, seed=0),
        "compact": kso.sparsify(dense, 0.1, seed=0, storage="compact"),
        "soft threshold": kso.parametrize(dense, kinds.SoftThreshold(s_init=-5.0)),
        "magnitude mask": kso.parametrize(dense, kinds.MagnitudeMask(0.1, frequency=PERIOD)),
        "straight-through top-k": kso.parametrize(
            dense, kinds.StraightThroughTopK(0.1, frequency=PERIOD)
        ),
    }


def parametrizations() -> None:
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
    parser = described(parametrizations)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--width", type=int, default=1024, help="of the MLP")
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 512], help="of the MLP")
    parser.add_argument("--no-cnn", dest="cnn", action="store_false")
    quick = {"rounds": 3, "width": 256, "batches": [128], "cnn": False}
    given = parsed(parser, quick)
    rounds, dense_mlp = given.rounds, functools.partial(mlp, given.width)
    cases = [(f"MLP 4 x {given.width}", dense_mlp, batch) for batch in given.batches]
    cases += [("CNN", small_cnn, 64)] if given.cnn else []
    backend = keras.backend.backend()
    settings = {"tensorflow": (True, False), "jax": (True,), "torch": (False,)}[backend]
    settings = settings[:1] if given.quick else settings
    rows = []
    for name, build, batch in cases:
        for jit in settings:
            dense = build()
            rivals = {"dense": dense, **parametrized(dense)}
            # Measurements outside of training come first: on JAX `fit` holds the variables.
            renewals = {key: renewal(rivals[key], 5) for key in list(rivals)[-2:]}
            masking = selects(rivals["fixed mask"], 11) if backend != "torch" else float("nan")
            rivals["dense again"] = keras.models.clone_model(dense)
            steps = {key: stepper(model, jit, batch) for key, model in rivals.items()}
            times = interleaved(steps, rounds, warm_up=3)
            base = times["dense"] / STEPS
            for key in list(rivals)[1:]:
                step = times[key] / STEPS
                spread = step + renewals.get(key, 0.0) / PERIOD
                rows.append(
                    [
                        f"{name}, batch {batch}, {'XLA' if jit else 'no XLA'}",
                        key,
                        f"{1e3 * base:.2f}",
                        f"{1e3 * step:.2f}",
                        f"{step / base:.3f}",
                        f"{1e3 * renewals[key]:.1f}" if key in renewals else "",
                        f"{spread / base:.3f}" if key in renewals else "",
                        f"{1e3 * masking:.2f}" if key == "fixed mask" else "",
                    ]
                )
                print(rows[-1], flush=True)
    text = (
        f"# Training step on {backend}: parametrizations against the dense model\n\n{machine()}, "
    )
    text += f"Keras {keras.__version__}. Adam, float32. Medians of {rounds} interleaved samples "
    text += f'of {STEPS} steps. "dense again" is the dense model against itself: the noise. '
    text += f"Renewals of masks are spread over {PERIOD} steps.\n\n"
    if "GLIBC_TUNABLES" in os.environ:
        text += f"GLIBC_TUNABLES={os.environ['GLIBC_TUNABLES']}\n\n"
    header = ["model", "rival", "dense [ms]", "step [ms]", "ratio"]
    header += ["renewal [ms]", "ratio with renewals", "selects alone [ms]"]
    write(f"step_{backend}", text + markdown(header, rows))


# --- structures -----------------------------------------------------------------------------------

SHAPE = (28, 28, 1)


def structures_mlp() -> keras.Model:
    hidden = [L.Dense(512, activation="relu", name=f"hidden_{k}") for k in range(2)]
    return keras.Sequential([keras.Input(SHAPE), L.Flatten(), *hidden, L.Dense(10, name="head")])


def lstm() -> keras.Model:
    """The rows of a picture, one after the other."""
    layers = [L.LSTM(128, return_sequences=True, name="lower"), L.LSTM(128, name="upper")]
    return keras.Sequential(
        [keras.Input(SHAPE), L.Reshape(SHAPE[:2]), *layers, L.Dense(10, name="head")]
    )


CHANNELS = {
    "CNN 32-64-64-128": lambda: cnn(SHAPE, 10, {"filters": (32, 64, 64, 128)}),
    "ResNet-20 8-16-32": lambda: resnet(SHAPE, 10, {"filters": (8, 16, 32), "blocks": 3}),
}
# With the rank that they start from.
LOW_RANK = {"MLP 784-512-512-10": (structures_mlp, 256), "LSTM 128-128": (lstm, 128)}


def trained(model: keras.Model, data: Dataset, rows: int, epochs: int, *callbacks) -> float:
    """Trains the model, and returns its accuracy on the test set."""
    model.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    x, y = data.x_train[:rows], data.y_train[:rows]
    model.fit(x, y, batch_size=32, epochs=epochs, verbose=0, callbacks=[*callbacks])
    return model.evaluate(data.x_test[:2000], data.y_test[:2000], verbose=0)[1]


def lines(
    name: str, models: dict[str, keras.Model], accuracies: dict[str, float], data: Dataset
) -> list[list[str]]:
    """A line of the table for each model; the second one is what outputs are compared with."""
    x = data.x_test[:64]
    times = {}
    for batch in (64, 1):
        part = x[:batch]
        cases = {k: functools.partial(m.predict_on_batch, part) for k, m in models.items()}
        times[batch] = interleaved(cases, rounds=101, warm_up=5)
    outputs = {key: model.predict(data.x_test[:512], verbose=0) for key, model in models.items()}
    table = []
    for key, model in models.items():
        wrapped = any(isinstance(layer, kso.PrunableLayer) for layer in model.layers)
        flops = kso.report(model).flops
        difference = np.abs(outputs[key] - outputs[list(models)[1]]).max()
        table.append(
            [
                name,
                key,
                "" if wrapped else f"{model.count_params()}",
                "" if wrapped else f"{flops / 1e6:.3f}",
                f"{1e3 * times[64][key]:.2f}",
                f"{1e3 * times[1][key]:.2f}",
                f"{100 * accuracies[key]:.1f}%" if key in accuracies else "",
                "" if key == "dense" else f"{difference:.1e}",
            ]
        )
        print(table[-1], flush=True)
    return table


def compare(name, make, template, options, data, rows, epochs, *callbacks):
    """Dense and parametrized network, trained the same way, and the latter after conversion."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    dense = make()
    # Recurrent kernels have no thin form in Keras.
    weights = kso.prunable_weights(dense)
    keep = [w.path for w in weights if w.path.endswith(("head/kernel", "/recurrent_kernel"))]
    model = kso.parametrize(dense, template, exclude=keep)
    accuracies = {"dense": trained(dense, data, rows, epochs)}
    accuracies["wrapped"] = trained(model, data, rows, epochs, *callbacks)
    models = {"dense": dense, "wrapped": model} | {k: f(model) for k, f in options.items()}
    left = []
    for weight in kso.prunable_weights(model):
        made = weight.parametrization
        if isinstance(made, kso.parametrizations.ChannelSoftThreshold):
            left.append(f"{made.live_channels().sum()}/{weight.shape[-1]}")
        elif isinstance(made, kso.parametrizations.LowRankSoftThreshold):
            left.append(f"{made.live_rank}/{min(weight.shape)}")
    print(name, left, flush=True)
    return lines(name, models, accuracies, data), f"{name}: {', '.join(left)}"


def structures() -> None:
    """Networks after structured STR: parameters, multiply-adds, latency, outputs.

        KERAS_BACKEND=tensorflow python benchmarks/step.py structures

    Trains briefly on a part of Fashion-MNIST: `ChannelSoftThreshold` under `TargetDensity` on the
    CNN and the ResNet-20 of networks.py, which `remove_channels` then makes small, and
    `LowRankSoftThreshold` on an MLP and an LSTM, which `strip` turns into thin layers. Writes
    `results/structured.md`. "dense" is the same network without any wrapper, trained the same
    way; its times are those of the original network.
    """
    parser = described(structures)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--density", type=float, default=0.3)
    every = [*CHANNELS, *LOW_RANK]
    parser.add_argument("--networks", nargs="+", choices=every, default=every)
    quick = {"rows": 1024, "epochs": 1, "networks": [every[0], every[2]]}
    options = parsed(parser, quick)
    data = load("fashion_mnist")
    kinds = kso.parametrizations
    rows, live = [], []

    def run(*arguments) -> None:
        table, line = compare(*arguments[:4], data, options.rows, options.epochs, *arguments[4:])
        rows.extend(table)
        live.append(line)

    for name, make in CHANNELS.items():
        if name not in options.networks:
            continue
        steering = kso.callbacks.TargetDensity(options.density, frequency=20)
        after = {"strip": kso.strip, "remove_channels": kso.remove_channels}
        run(name, make, kinds.ChannelSoftThreshold(s_init=-4.0), after, steering)
    for name, (make, rank) in LOW_RANK.items():
        if name not in options.networks:
            continue
        steering = kso.callbacks.TargetDensity(options.density, frequency=20)
        run(
            name,
            make,
            kinds.LowRankSoftThreshold(rank, s_init=-4.0),
            {"strip": kso.strip},
            steering,
        )

    text = f"# Structured STR: before and after\n\n{machine()}, {keras.backend.backend()}, Keras "
    text += f"{keras.__version__}, no XLA. Fashion-MNIST, {options.rows} pictures, "
    text += f"{options.epochs} epochs of Adam, so accuracies are those of a short run. "
    text += "`ChannelSoftThreshold` (CNN, ResNet), and `LowRankSoftThreshold(rank)` with ranks 256 "
    text += f"(MLP) and 128 (LSTM), under `TargetDensity({options.density})`. "
    text += "Latency: medians of 101 interleaved `predict_on_batch`, on a machine with other work. "
    text += "The difference is the largest of the outputs from those of the wrapped model, on 512 "
    text += "pictures.\n\n"
    header = ["network", "model", "parameters", "million multiply-adds", "ms, batch 64"]
    header += ["ms, batch 1", "accuracy", "difference"]
    text += markdown(header, rows) + "\nLive channels, or ranks, of the kernels in order:\n\n"
    write("structured", text + "".join(f"- {line}\n" for line in live))


# --- very_deep ------------------------------------------------------------------------------------


SETTINGS = settings("deep")
NETWORKS = {
    "stack": ("thousand_mlp", stacked_mlp),
    "layers": ("thousand_mlp", deep_mlp),
    "convolutions": ("circular_cnn", stacked_cnn),
}


def xla(kind: str) -> bool:
    """Whether XLA compiles it, on TensorFlow."""
    return SETTINGS[NETWORKS[kind][0]].get("jit", True)


def network(kind: str, depth: int) -> keras.Model:
    """Sparse and compiled."""
    net, make = NETWORKS[kind]
    dense = make((28, 28, 1), 10, SETTINGS[net] | {"depth": depth})
    model = kso.sparsify(dense, 0.125, "uniform", "random_sparse", seed=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(1e-3, momentum=0.9)
    model.compile(optimizer, loss, jit_compile="auto" if xla(kind) else False)
    return model


def measure(
    kinds: list[str], depths: list[int], in_a_row: int, steps: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each network."""
    batch = SETTINGS["thousand_mlp"]["batch_size"]
    x = np.random.default_rng(0).normal(size=(steps * batch, 28, 28, 1)).astype("float32")
    y = np.zeros(len(x))
    first, cases = {}, {}
    for depth in depths:
        for kind in kinds:
            if kind == "layers" and depth > in_a_row:
                continue
            model = network(kind, depth)

            def train(model: keras.Model = model) -> None:
                model.fit(x, y, batch_size=batch, verbose=0)

            start = time.perf_counter()
            train()
            first[kind, depth] = time.perf_counter() - start
            cases[kind, depth] = train
            print(kind, depth, f"first {first[kind, depth]:.1f} s", flush=True)
    names = {f"{kind} {depth}": (kind, depth) for kind, depth in cases}
    medians = interleaved({name: cases[key] for name, key in names.items()}, rounds)
    found = []
    for name, (kind, depth) in names.items():
        compiling = first[kind, depth] - medians[name]
        row = {"kind": kind, "depth": depth, "compiling": compiling}
        found.append(row | {"step": medians[name] / steps})
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The last row of each kind."""
    last = {(row["backend"], row["depth"], row["kind"]): row for row in rows}
    header = ["backend", "depth", "kind", "compiling [s]", "step [ms]", "step / depth [ms]"]
    cells = [
        [
            backend,
            str(depth),
            kind,
            f"{row['compiling']:.1f}",
            f"{1e3 * row['step']:.1f}",
            f"{1e3 * row['step'] / depth:.2f}",
        ]
        for (backend, depth, kind), row in sorted(last.items())
    ]
    return markdown(header, cells)


def very_deep() -> None:
    """Compile time and step time over depth: in a `ScannedStack`, and layer by layer.

        KERAS_BACKEND=jax        python benchmarks/step.py very_deep
        KERAS_BACKEND=tensorflow python benchmarks/step.py very_deep --depths 10 100
        KERAS_BACKEND=torch      python benchmarks/step.py very_deep
        python benchmarks/step.py very_deep --kinds convolutions --depths 100 300

    The network of `thousand_mlp` in methods.toml: layers of 128 units, tanh, density 0.125, fixed
    masks, SGD with momentum, batch 128, by `fit`; or that of `circular_cnn`, a stack of
    convolutions, without XLA where its settings say so. Compile time is the difference between
    the first call of `fit` and the median one: tracing, lowering, XLA. Layer by layer goes up to
    `--in-a-row` layers. Each network is built and compiled alone; after that all train in turn. A
    line for each goes to `results/depth.jsonl`; `results/depth.md` shows the last of each kind.
    """
    parser = described(very_deep)
    parser.add_argument("--kinds", nargs="+", choices=NETWORKS, default=["stack", "layers"])
    parser.add_argument("--depths", nargs="+", type=int, default=[10, 100, 1000])
    parser.add_argument("--in-a-row", type=int, default=100)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    quick = {"depths": [4, 16], "in_a_row": 16, "steps": 2, "rounds": 1}
    given = parsed(parser, quick)
    lines = RESULTS / "depth.jsonl"
    backend = keras.backend.backend()
    for row in measure(given.kinds, given.depths, given.in_a_row, given.steps, given.rounds):
        compiled = backend == "tensorflow" and xla(row["kind"])
        append(lines, row | {"backend": backend + " XLA" * compiled})
    rows = finished(lines)
    text = "# Depth: compiling and a step of training\n\n"
    text += f"{machine()}, Keras {keras.__version__}. An MLP of so many layers of 128 units, tanh, "
    text += "density 0.125 in fixed masks, SGD with momentum, batch 128. `stack`: a ScannedStack, "
    text += "`layers`: the same layers in a row; `convolutions`: a stack of circular 3x3 ones, 16 "
    text += "channels on 4 x 4 pixels. Compiling is what the first call of `fit` takes longer than "
    text += "the median one; steps are medians of interleaved calls by the clock.\n\n"
    write("depth", text + table(rows))


if __name__ == "__main__":
    chosen(parametrizations, structures, very_deep)
