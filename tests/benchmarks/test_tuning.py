"""Rates chosen on a validation split, live channels, the sizes of networks, orders of rows."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso

pytestmark = pytest.mark.tensorflow_only


SMALL = ["--dataset", "digits", "--epochs", "1", "--densities"]


def run(net, method, density, seed, options, rate, accuracy, **more):
    """What training gives, without any."""
    return {
        **{
            "net": net,
            "method": method,
            "density": density,
            "seed": seed,
            "accuracy": accuracy,
        },
        **{
            "epochs": 1,
            "learning_rate": rate,
            "jit": False,
            "live": 1,
            "size": 2,
            "flops": 3,
        },
        **{"backend": "none", "settings": options["settings"], **more},
    }


def test_rates_are_chosen_without_the_test_set(methods, monkeypatch, tmp_path):
    lines = tmp_path / "runs.jsonl"
    settings = methods.settings("methods")
    low, best, high = settings["cnn"]["learning_rates"]
    seen, final = [], []

    def train(net, method, density, seed, data, options, rate=None):
        # Only these keep the budget of STR.
        final.append(options.get("final", True))
        seen.append((data.name, len(data.x_train), len(data.x_test), rate))
        accuracy = {low: 0.2, best: 0.9, high: 1.0}[rate]
        # The best one with one seed, of no use with another.
        accuracy *= 1 - (rate == high) * seed
        return run(net, method, density, seed, options, rate, accuracy)

    monkeypatch.setattr(methods, "train", train)
    small = [
        *SMALL,
        "0.1",
        "--tune",
        "--out",
        str(lines),
        "--methods",
        "base_erk",
    ]
    methods.Methods.command([*small, "--seeds", "0"])
    twice = [low, low, best, best, high, high]
    assert [rate for *_, rate in seen] == [*twice, best]
    assert final == [False] * 6 + [True]
    samples = len(methods.load("digits").x_train)
    kept = samples * 9 // 10
    assert [(train, test) for _, train, test, _ in seen[:6]] == [
        (kept, samples - kept)
    ] * 6
    assert seen[6][1] == samples
    # What is there is not repeated.
    methods.Methods.command([*small, "--seeds", "0", "1"])
    assert [rate for *_, rate in seen[7:]] == [best]
    table = lines.with_suffix(".md").read_text()
    assert "| 0.1 | base_erk | 90.00 +- 0.00 | 2 |" in table
    assert f"| {best} | 3 x 2 | - |" in table
    # A rate that further validation makes the best: runs at another one are repeated, and replaced.
    old = lines.read_text()
    lines.write_text(old.replace('"validation": 0.9', '"validation": 0.1'))
    monkeypatch.setattr(methods, "WIDENED", 0)
    methods.Methods.command([*small, "--seeds", "0", "1"])
    assert [rate for *_, rate in seen[8:]] == [high, high]
    assert (
        "| 0.1 | base_erk | 50.00 +- 70.71 | 2 |"
        in lines.with_suffix(".md").read_text()
    )


@pytest.mark.parametrize(
    ("peak", "expected"),
    [
        (0.128, "0.128 | 5 x 2 | -"),
        (0.002, "0.002 | 7 x 2 | -"),
        (64.0, "1.024 | 7 x 2 | high"),
    ],
)
def test_a_grid_goes_on_where_the_best_is_at_its_edge(
    methods, monkeypatch, tmp_path, peak, expected
):
    lines, seen = tmp_path / "runs.jsonl", []

    def train(net, method, density, seed, data, options, rate=None):
        seen.append(rate)
        if peak == 0.128 and rate < 0.01:  # counts as tried
            raise methods.BudgetError(
                "The layer 'a' has no live entry. Received: 0 entries"
            )
        accuracy = 1 / (1 + 0.1 * abs(np.log2(rate / peak)))
        return run(net, method, density, seed, options, rate, accuracy)

    monkeypatch.setattr(methods, "train", train)
    small = [
        *SMALL,
        "0.1",
        "--seeds",
        "0",
        "--out",
        str(lines),
        "--methods",
        "base_erk",
    ]
    methods.Methods.command(small)
    count = len(seen)
    methods.Methods.command(small)  # what is there is not repeated
    assert len(seen) == count
    assert f"| {expected} |" in lines.with_suffix(".md").read_text()


def test_a_grid_at_chance_does_not_go_on(
    methods, record, monkeypatch, tmp_path, capsys
):
    lines = tmp_path / "runs.jsonl"
    settings = methods.settings("methods")
    rates = settings["cnn"]["learning_rates"]

    def train(net, method, density, seed, data, options, rate=None):
        return run(net, method, density, seed, options, rate, 0.1, seconds=90.0)

    monkeypatch.setattr(methods, "train", train)
    small = [*SMALL, "0.1", "0.2", "--seeds", "0"]
    methods.Methods.command(
        [*small, "--out", str(lines), "--methods", "base_erk", "dense"]
    )
    found = [
        one["learning_rate"]
        for one in record.finished(lines)
        if "validation" in one
    ]
    assert sorted(found) == sorted(6 * rates)  # three rows, two seeds
    table = lines.with_suffix(".md").read_text()
    assert table.count(f"| {len(rates)} x 2 | chance |") == 3
    # Before each row: what is left, and from the second row on how long that takes.
    said = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("left")
    ]
    # The dense row is that of both densities.
    counts = [k * (2 * len(rates) + 1) for k in (3, 2, 1, 1)]
    assert said[0] == f"left at least: cnn, {counts[0]} runs"
    assert said[1:] == [
        f"left at least: cnn, {n} runs, about {round(n * 1.5)} min"
        for n in counts[1:]
    ]


def test_where_a_method_wins_ties_or_loses(methods_summary):
    mine, ahead, noisy = (
        [0.80, 0.81, 0.82],
        [0.85, 0.86, 0.87],
        [0.5, 0.9, 0.99],
    )
    assert methods_summary.beside(ahead, mine) == ["+5.00", "0.004", "wins"]
    assert methods_summary.beside(mine, ahead) == ["-5.00", "0.004", "loses"]
    assert methods_summary.beside(mine, noisy)[2] == "ties"
    assert methods_summary.beside(mine[:1], ahead) == ["-6.00", "-", "-"]
    assert methods_summary.beside([0.1] * 3, [0.1] * 3) == [
        "+0.00",
        "1.000",
        "ties",
    ]
    assert methods_summary.beside([0.2] * 3, [0.1] * 3) == [
        "+10.00",
        "<.001",
        "wins",
    ]


def test_live_channels(methods):
    inputs = keras.Input((4, 4, 2))
    x = keras.layers.Conv2D(3, 1, name="a")(inputs)
    x = keras.layers.ReLU()(x)
    x = keras.layers.ReLU()(
        keras.layers.Dense(5, name="b")(keras.layers.Flatten()(x))
    )
    model = keras.Model(inputs, x)
    kernel, bias = model.get_layer("a").get_weights()
    kernel[..., 1], bias[:] = 0, 1  # constant, though not 0
    model.get_layer("a").set_weights([kernel, bias])
    kernel, bias = model.get_layer("b").get_weights()
    bias[[0, 3]] = -1e6
    model.get_layer("b").set_weights([kernel, bias])
    images = (
        np.random.default_rng(0).normal(size=(50, 4, 4, 2)).astype("float32")
    )
    assert methods.live_channels(model, images) == [[2, 3], [3, 5]]
    assert (
        methods.live_channels(keras.Sequential([keras.Input((2,))]), images)
        == []
    )


def test_what_is_tried_stands_beside_its_rival(methods_summary):
    runs = [
        {
            "net": "cnn",
            "method": method,
            "density": 0.1,
            "seed": seed,
            "epochs": 1,
            "accuracy": one,
        }
        for method, found in {
            "gmp": [0.8, 0.81],
            "feather": [0.9, 0.91],
            "dnw": [0.5],
        }.items()
        for seed, one in enumerate(found)
    ]
    text = methods_summary.candidates(runs)
    assert "| 0.1 | feather | gmp | +10.00 | wins | 2 and 2 |" in text
    assert "dnw" not in text
    assert methods_summary.candidates(runs[:2]) == ""


def test_budgets_stand_beside_starts(methods_summary):
    found = {
        "base_erk": [0.8, 0.81],
        "base_uniform": [0.7, 0.71],
        "eoi_snip": [0.9, 0.91],
    }
    runs = [
        {
            "net": "cnn",
            "method": method,
            "density": 0.1,
            "seed": seed,
            "accuracy": one,
        }
        for method, accuracies in found.items()
        for seed, one in enumerate(accuracies)
    ]
    text = methods_summary.combinations(runs)
    assert "| uniform | - | 70.50 +- 0.71 (0.005) | - | - |" in text
    assert "| erk | - | 80.50 +- 0.71 | - | - |" in text
    assert "| snip | - | - | - | **90.50 +- 0.71** (0.005) |" in text
    assert methods_summary.combinations(runs[:2]) == ""


def test_mirrored_starts_stand_beside_their_rivals(methods_summary):
    options = {"settings": {}}
    runs = []
    for method, density, accuracies in (
        ("dense_orthogonal", 0.1, (0.5, 0.52)),
        ("dense_mirrored", 0.1, (0.9, 0.91)),
        ("eoi_mirrored", 0.05, (0.8, 0.82)),
        ("eoi_erk", 0.05, (0.6, 0.62)),
        ("eoi_erk", 0.1, (0.1, 0.2)),
    ):
        for seed, accuracy in enumerate(accuracies):
            line = run("net", method, density, seed, options, 0.01, accuracy)
            runs.append(line)
    text = methods_summary.mirrored(runs)
    assert "| 1 | dense_mirrored | dense_orthogonal | +39.50 | <.001 |" in text
    assert "| 0.05 | eoi_mirrored | eoi_erk | +20.00 | 0.005 | wins |" in text
    assert "| 0.05 | eoi_mirrored | dense_mirrored | -9.50 |" in text
    assert text.count("\n| 0.05 |") == 3  # none at another density
    assert methods_summary.mirrored(runs[:2]) == ""


def test_seeds_of_the_untuned_rate_are_no_tries(methods_summary):
    options = {"settings": {}}
    lines = []
    seeds_by_rate = {0.01: range(5), 0.03: range(2), 0.09: range(2), 0.2: [0]}
    for rate, seeds in seeds_by_rate.items():
        for seed in seeds:
            line = run("net", "dense", 0.1, seed, options, rate, 0.0)
            del line["accuracy"]
            lines.append(line | {"validation": 0.5})
    final = run("net", "dense", 0.1, 0, options, 0.09, 0.5)
    answer = methods_summary.tries_and_edge(lines, [final])
    assert answer == ["3 x 2", "high"]


def test_all_seeds_at_the_rate_that_nobody_tuned(
    methods, monkeypatch, tmp_path
):
    settings = methods.settings("methods")["cnn"]
    untuned = []

    def train(net, method, density, seed, data, options, rate=None):
        if len(data.x_train) < 1257 and rate == settings["learning_rate"]:
            untuned.append(seed)
        return run(net, method, density, seed, options, rate, 0.5)

    monkeypatch.setattr(methods, "train", train)
    small = [*SMALL, "0.1", "--methods", "base_erk", "--untuned"]
    seeds = ["--seeds", "0", "1", "2", "3"]
    out = ["--out", str(tmp_path / "runs.jsonl")]
    methods.Methods.command([*small, *seeds, *out])
    assert sorted(untuned) == [0, 1, 2, 3]


def test_untuned_accuracies_are_those_of_the_split_at_one_rate(methods_summary):
    options = {"settings": {}}
    tests = [
        run("net", "dense", 0.1, 0, options, 0.03, 0.5),
        run("net", "eoi_erk", 0.1, 0, options, 0.01, 0.6),
    ]
    splits = []
    for method, rate, accuracies in (
        ("dense", 0.01, (0.2,)),
        ("dense", 0.03, (0.4,)),
        ("eoi_erk", 0.01, (0.7, 0.72)),
    ):
        for seed, accuracy in enumerate(accuracies):
            line = run("net", method, 0.1, seed, options, rate, 0.0)
            line["validation"] = accuracy
            del line["accuracy"]
            splits.append(line)
    used = {"learning_rate": 0.01}
    text = methods_summary.untuned(tests, splits, used)
    assert "| dense | 20.00 | - | 1 |" in text
    assert "| eoi_erk | - | 71.00 +- 1.41 | 2 |" in text
    assert methods_summary.untuned(tests, [], used) == ""


def test_parameters_are_those_that_are_trained(methods, methods_summary):
    used = methods.settings("methods")["cnn"]
    # Normalizations of 120 channels, ten biases of the head.
    old = {
        "net": "cnn",
        "live": 100,
    }
    assert methods_summary.parameters([old], used) == "350"
    assert methods_summary.parameters([old | {"others": 7}], used) == "107"
    made = methods.functools.partial(methods.NETWORKS["cnn"], (28, 28, 1), 10)
    size = sum(w.size for w in methods.kso.prunable_weights(made(used)))
    narrow = methods.narrowed(made, used, 0.1, False)
    kernels = sum(w.size for w in methods.kso.prunable_weights(narrow))
    assert 0.07 * size < kernels <= 0.1 * size
    with pytest.raises(methods.BudgetError, match="shallower"):
        methods.narrowed(made, used, 0.1, True)
    # Kernels that stay dense count with all of their entries.
    used = {"width": 64, "depth": 2, "include": ["h0", "h1"]}
    made = methods.functools.partial(
        methods.NETWORKS["wide_mlp"], (28, 28, 1), 10
    )
    narrow = methods.narrowed(made, used, 0.1, False)
    kernels = sum(w.size for w in methods.kso.prunable_weights(narrow))
    most = (784 + 10) * 64 + 819
    assert 0.95 * most < kernels <= most


def test_the_networks_have_the_sizes_of_their_papers(methods):
    found = methods.settings("contemporary")
    assert set(methods.CONTEMPORARY) < set(found)
    assert all(
        name.startswith("cifar10_")
        for name in set(found) - set(methods.CONTEMPORARY)
    )
    # Convolutions and dense kernels, for CIFAR-10's images: He et al. (2016), table 6, of whose
    # shortcuts ours are projections; VGG-16 with one dense layer; MobileNetV1 with ten classes.
    sizes = {
        "resnet20": 0.27e6,
        "resnet32": 0.46e6,
        "vgg16": 14.7e6,
        "mobilenet": 3.2e6,
    }
    for name, size in sizes.items():
        options = found[f"cifar10_{name}"]
        model = methods.NETWORKS[name]((32, 32, 3), 10, options)
        kernels = sum(weight.size for weight in kso.prunable_weights(model))
        assert kernels == pytest.approx(size, rel=0.02)
        assert {layer.name for layer in model.layers} > {"mirrored", "moved"}
        assert options["epochs"] == 200


def epochs(rows, count=3):
    return [
        np.concatenate([x for x, _ in rows["x"].as_numpy_iterator()])
        for _ in range(count)
    ]


def test_every_epoch_has_its_own_order_of_all_rows(training):
    keras.utils.set_random_seed(0)  # what makes Keras repeat an order
    x = np.arange(50)
    found = epochs(training.shuffled(x, -x, 8, seed=3))
    for order in found:
        # Whole batches only.
        np.testing.assert_array_equal(np.sort(order), x[:48])
    assert len({tuple(order) for order in found}) == 3
    again, other = (
        epochs(training.shuffled(x, -x, 8, seed)) for seed in (3, 4)
    )
    np.testing.assert_array_equal(again, found)
    assert not np.array_equal(other, found)


def test_labels_stay_with_their_rows_and_steps_are_known(training):
    rows = training.shuffled(np.arange(20), -np.arange(20), 5, seed=0)["x"]
    assert rows.cardinality() == 4
    assert all(
        (x == -y).all() and x.shape == (5,) for x, y in rows.as_numpy_iterator()
    )
