"""Networks after structured STR: parameters, multiply-adds, latency, outputs.

    KERAS_BACKEND=tensorflow python benchmarks/bench_structured.py

Trains briefly on a part of Fashion-MNIST: `ChannelSoftThreshold` under `TargetDensity` on the CNN
and the ResNet-20 of networks.py, which `remove_channels` then makes small, and
`LowRankSoftThreshold` on an MLP and an LSTM, which `strip` turns into thin layers. Writes
`results/structured.md`. "dense" is the same network without any wrapper, trained the same way; its
times are those of the original network.
"""

import argparse
import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from example_data import Dataset, load
from networks import cnn, resnet
from timing import interleaved, machine, markdown, parsed, write

import keras_sparse_ortho as kso

L = keras.layers
SHAPE = (28, 28, 1)


def mlp() -> keras.Model:
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
LOW_RANK = {"MLP 784-512-512-10": (mlp, 256), "LSTM 128-128": (lstm, 128)}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
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


if __name__ == "__main__":
    main()
