"""Final density with early stopping, for every method.

    python benchmarks/early_stopping.py [--density 0.05] [--epochs 20]

An MLP 784-300-100-10 on 20,000 images of Fashion-MNIST and 5,000 more for validation, with each
method, for at most `epochs` epochs: once with
`EarlyStopping(patience=2, restore_best_weights=True)` alone, once inside `BestAtDensity`. Writes
`results/early_stopping.md`; fails unless every run with `BestAtDensity` ends at the target density,
and every other run does or warns.
"""

import argparse
import os
import pathlib
import sys
import warnings

from record import parsed, write

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
ROOT = pathlib.Path(__file__).parents[1]
METHODS = ("FixedMask", "SET", "RigL", "STR", "channel STR", "GMP", "DNW")


def network(method: str, density: float, x, y) -> tuple:
    """The model, not compiled, and the callbacks of the method."""
    import keras

    import keras_sparse_ortho as kso

    layers = keras.layers
    dense = keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(300, activation="relu", name="hidden_1"),
            layers.Dense(100, activation="relu", name="hidden_2"),
            layers.Dense(10, name="head"),
        ]
    )
    ramp = kso.schedules.Cubic(density)
    if method in ("FixedMask", "SET", "RigL"):
        model = kso.sparsify(dense, density, seed=0)
        moving = {"SET": kso.callbacks.SET, "RigL": lambda: kso.callbacks.RigL((x, y), 128)}
        return model, [moving[method]()] if method in moving else []
    if method in ("GMP", "DNW"):
        kind = {"GMP": kso.MagnitudeMask, "DNW": kso.StraightThroughTopK}[method]
        return kso.parametrize(dense, kind(ramp)), [kso.callbacks.UpdateMasks()]
    if method == "STR":
        return kso.parametrize(dense, kso.SoftThreshold), [kso.callbacks.TargetDensity(density)]
    model = kso.parametrize(dense, kso.ChannelSoftThreshold, exclude="head")
    # Fewer whole channels can be removed: half of them.
    return model, [kso.callbacks.TargetDensity(0.5)]


def run(method: str, density: float, epochs: int, samples: int, careful: bool) -> dict:
    """One run."""
    import keras

    import keras_sparse_ortho as kso

    sys.path.insert(0, str(ROOT / "examples"))
    from data import load

    data = load("fashion_mnist")
    some = slice(samples + samples // 4)
    x, y = data.x_train[some].reshape(-1, 784), data.y_train[some]
    keras.utils.set_random_seed(0)
    model, callbacks = network(method, density, x[:samples], y[:samples])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
    stop = keras.callbacks.EarlyStopping(
        "val_accuracy", mode="max", patience=2, restore_best_weights=True
    )
    around = kso.callbacks.BestAtDensity(stop) if careful else stop
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        history = model.fit(
            *(x[:samples], y[:samples], 128, epochs),
            verbose=0,
            validation_data=(x[samples:], y[samples:]),
            callbacks=[*callbacks, around],
        )
    weights = [w for w in kso.prunable_weights(model) if w.parametrization is not None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kso.errors.DensityWarning)
        _, accuracy = model.evaluate(data.x_test.reshape(-1, 784), data.y_test, verbose=0)
    return {
        "epochs": len(history.history["loss"]),
        "best": stop.best_epoch + 1,
        "size": sum(w.size for w in weights),
        "live": sum(w.live for w in weights),
        "warned": any(w.category is kso.errors.DensityWarning for w in told),
        "accuracy": accuracy,
    }


def main() -> None:
    """All runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=20000)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    arguments = parsed(parser, {"epochs": 4, "samples": 2000, "methods": ["STR", "GMP"]})
    lines = [
        "# EarlyStopping, and the density asked for",
        "",
        f"`python benchmarks/early_stopping.py`: 784-300-100-10 on {arguments.samples:,} pictures",
        f"of Fashion-MNIST, at most {arguments.epochs} epochs, one seed, "
        "`EarlyStopping(patience=2, restore_best_weights=True)` alone and",
        "inside `BestAtDensity`. The best epoch is the one that was restored; accuracy is that of",
        "the test set. Channels of the last layer stay, the others end at half.",
        "",
        "| method | asked | alone: of epochs, the best | density | warned | accuracy "
        "| `BestAtDensity`: of epochs, the best | density | warned | accuracy |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    wrong = []
    for method in arguments.methods:
        asked = 0.5 if method == "channel STR" else arguments.density
        cells = []
        for careful in (False, True):
            told = run(method, arguments.density, arguments.epochs, arguments.samples, careful)
            # To within one entry of each weight, or one channel.
            slack = 784 if method == "channel STR" else 3
            there = abs(told["live"] - asked * told["size"]) <= slack
            if not there and (careful or not told["warned"]):
                wrong.append((method, careful, told))
            cells.append(
                f"{told['epochs']}, {told['best']} | {told['live'] / told['size']:.4f} "
                f"| {'yes' if told['warned'] else 'no'} | {told['accuracy']:.4f}"
            )
            print(method, "BestAtDensity" if careful else "alone", told, flush=True)
        lines.append(f"| {method} | {asked} | {cells[0]} | {cells[1]} |")
    if wrong:
        sys.exit(f"not at the density asked for, and no warning: {wrong}")
    write("early_stopping", "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
