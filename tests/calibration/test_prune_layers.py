"""Pruning layer by layer on calibration data: counts, models, runs that go on, refusals."""

import sys

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.calibration import (
    Entries,
    Moments,
    Recipe,
    RefitProblem,
    damped,
    obs,
)
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from tests.helpers import array, assert_same, classifier_loss
from tests.pruning.checks import assert_equal_kernels

L = keras.layers
SCORES = ["obs", "wanda", "magnitude"]


def network():
    """A convolution, batch normalization, a mixing layer, and a head: three kernels."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 4))
    x = L.Conv1D(8, 3, activation="relu", name="conv")(inputs)
    x = L.EinsumDense("abc,cd->abd", (6, 6), name="mixer")(
        L.BatchNormalization()(x)
    )
    return keras.Model(inputs, L.Dense(5, name="head")(L.Flatten()(x)))


def rows_of_network(count=96):
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 8, 4)).astype("float32") + rng.normal(
        size=(4,)
    )


def values(model):
    return {w.path: w.value for w in kso.prunable_weights(model)}


def masks(model):
    return {
        w.path: w.storage.mask_value()
        for w in kso.prunable_weights(model)
        if w.storage
    }


@pytest.mark.core
@pytest.mark.parametrize("score", SCORES)
def test_counts_are_exact_and_the_model_stays_as_it_was(score):
    dense, x = network(), rows_of_network()
    before = dense.get_weights()
    pruned = kso.prune(
        dense, 0.3, data=(x, np.zeros(len(x))), budget="erk", score=score
    )
    counts = kso.budgets.erk(dense, 0.3, orthogonal=False).counts
    assert {w.path: w.live for w in kso.prunable_weights(pruned)} == counts
    for path, mask in masks(pruned).items():
        assert not values(pruned)[path][~mask].any()
    assert_same(before, dense.get_weights())
    assert not any("call" in vars(layer) for layer in dense.layers)


def test_obs_keeps_more_of_a_trained_network_than_refits_and_these_than_magnitudes():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = (images / 16).astype("float32")
    keras.utils.set_random_seed(0)
    layers = [
        L.Dense(48, activation="relu", name="a"),
        L.Dense(48, activation="relu", name="b"),
    ]
    dense = keras.Sequential(
        [keras.Input((64,)), *layers, L.Dense(10, name="head")]
    )
    dense.compile(keras.optimizers.Adam(5e-3), classifier_loss())
    dense.fit(x[:1200], labels[:1200], batch_size=50, epochs=8, verbose=0)

    def accuracy(model):
        return float(
            np.mean(array(model(x[1200:])).argmax(-1) == labels[1200:])
        )

    found = [
        accuracy(
            kso.prune(dense, 0.12, budget="uniform", exclude="head", **options)
        )
        for options in (
            {},
            {"data": x[:256]},
            {"score": "obs", "data": x[:256]},
        )
    ]
    assert found[0] + 0.05 < found[1] < found[2]
    assert found[2] > accuracy(dense) - 0.06


@pytest.mark.parametrize("score", SCORES)
def test_small_batches_give_the_masks_and_weights_of_large_ones(score):
    dense, x = network(), rows_of_network()
    batches = [(x[k : k + 20],) for k in range(0, 96, 20)]
    one, several = (
        kso.prune(dense, 0.3, data=data, score=score) for data in (x, batches)
    )
    assert_equal_kernels(one, several, atol=1e-5)


@pytest.mark.core
def test_each_layer_is_solved_on_the_inputs_that_the_pruned_ones_give():
    keras.utils.set_random_seed(1)
    layers = [L.Dense(8, activation="relu", name="a"), L.Dense(3, name="b")]
    dense = keras.Sequential([keras.Input((6,)), *layers])
    x = np.random.default_rng(0).normal(size=(50, 6)).astype("float32")
    found = values(kso.prune(dense, 0.5, score="obs", data=x))
    first, bias, second, _ = (array(v).astype("float64") for v in dense.weights)
    wide = x.astype("float64")
    given, hidden = (
        np.maximum(wide @ w + bias, 0) for w in (first, found["a/kernel"])
    )
    held = np.arange(50) % 4 == 3

    def moments(rows, wanted):
        parts = [(rows[own], wanted[own]) for own in (~held, held)]
        return [
            Moments((x.T @ x)[None], (x.T @ (y - x))[None], len(x))
            for x, y in parts
        ]

    for path, kernel, sums in (
        ("a/kernel", first, moments(wide, wide)),
        ("b/kernel", second, moments(hidden, given)),
    ):
        count = kernel.size // 2
        expected, _ = obs(kernel[None], count, Entries(), *sums)
        np.testing.assert_allclose(found[path], expected[0], atol=1e-5)
    # The target is halfway to the outputs of the given model.
    both = sums[0] + sums[1]
    problem = RefitProblem(second[None], sums, Entries())
    h = damped(both.gram)
    target = second + 0.5 * np.linalg.solve(h, both.across @ second)
    np.testing.assert_allclose(problem.back(problem.full), target, atol=1e-9)


@keras.saving.register_keras_serializable(package="test_prune_layers")
class Block(keras.Model):
    """A model written as a class, with a route that depends on its data if it has a threshold."""

    def __init__(self, threshold=None, **kwargs):
        super().__init__(**kwargs)
        self.threshold = threshold
        self.first, self.second = (
            L.Dense(8, name="first"),
            L.Dense(8, name="second"),
        )
        self.unused = L.Dense(8, name="unused")
        self.unused.build((None, 8))

    def call(self, x):
        order = [self.first, self.second]
        if (
            self.threshold is not None
            and float(array(x).mean()) > self.threshold
        ):
            order = order[:1]
        for layer in order:
            x = layer(x)
        return x


def built(threshold=None):
    model = Block(threshold)
    model(np.full((1, 8), -9.0, "float32"))
    return model


def rows(count=128):
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(count, 8)).astype("float32")
        + 4.0 * (np.arange(count) > 100)[:, None]
    )


@pytest.mark.core
def test_models_written_as_classes_and_layers_that_no_batch_reaches():
    model = built()
    with pytest.warns(
        UserWarning, match=r"they stay dense.*Received: 'unused/kernel'$"
    ):
        pruned = kso.prune(model, 0.25, score="obs", data=rows())
    assert [w.live for w in kso.prunable_weights(pruned)] == [16, 16, 64]
    with pytest.warns(
        UserWarning,
        match=r"entries keep their values. Received: 'unused/kernel'$",
    ):
        pruned = kso.prune(model, 0.25, data=rows(), budget="uniform")
    assert [w.live for w in kso.prunable_weights(pruned)] == [16, 16, 16]


@pytest.mark.core
def test_a_layer_that_is_called_twice_is_solved_on_the_inputs_of_both_calls(
    monkeypatch,
):
    sums = []
    solved = Recipe.solved

    def noted(self, weight, *moments):
        sums.append(moments[0].gram + moments[1].gram)
        return solved(self, weight, *moments)

    monkeypatch.setattr(Recipe, "solved", noted)
    inputs, twice = keras.Input((6,)), L.Dense(6, name="twice")
    dense = keras.Model(inputs, twice(L.ReLU()(twice(inputs))))
    x = np.random.default_rng(0).normal(size=(80, 6)).astype("float32")
    kso.prune(dense, 0.5, score="obs", data=x)
    second = np.maximum(x @ array(twice.kernel), 0)
    np.testing.assert_allclose(
        sums[0][0], x.T @ x + second.T @ second, rtol=1e-4, atol=1e-3
    )


def test_batches_must_reach_what_the_first_one_reaches():
    model, x = built(-1.0), rows() - 2.0
    before = model.get_weights()
    with pytest.raises(
        NotPrunableError, match=r"must reach 'second/kernel'.*Received"
    ):
        kso.prune(model, 0.25, score="obs", data=x, exclude="unused")
    assert_same(before, model.get_weights())
    assert "call" not in vars(model.first)


@pytest.mark.core
@pytest.mark.parametrize("interrupt", [ValueError, KeyboardInterrupt])
def test_what_fails_half_way_leaves_the_model_as_it_was(interrupt, monkeypatch):
    dense = network()
    before = dense.get_weights()
    solved = Recipe.solved

    def failing(recipe, weight, *moments):
        if weight.path == "head/kernel":  # after all others
            assert_same(before, dense.get_weights())  # other threads may use it
            raise interrupt("half way")
        return solved(recipe, weight, *moments)

    monkeypatch.setattr(Recipe, "solved", failing)
    with pytest.raises(interrupt, match="half way"):
        kso.prune(dense, 0.3, score="obs", data=rows_of_network())
    assert_same(before, dense.get_weights())
    assert not any("call" in vars(layer) for layer in dense.layers)


def test_inputs_must_be_finite():
    dense, x = network(), rows_of_network()
    x[70, 2] = np.nan
    with pytest.raises(
        ValueError, match=r"`data` must be finite.*Received: NaN .* in row 70"
    ):
        kso.prune(dense, 0.3, score="wanda", data=x)


def test_inputs_of_layers_must_be_finite():
    inputs = keras.Input((4,))
    square = L.Lambda(lambda x: keras.ops.square(1e30 * x))(inputs)
    hidden = L.Dense(3, name="hidden")(square)
    model = keras.Model(inputs, keras.ops.tanh(hidden))
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    with pytest.raises(
        NotPrunableError,
        match=r"'hidden/kernel' must be finite.*Received: .*inf",
    ):
        kso.prune(model, 0.3, score="wanda", data=x)


@pytest.mark.core
def test_embeddings_and_recurrent_kernels_are_measured_and_others_stay_dense():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,), dtype="int32")
    x = L.GRU(6, name="gru")(L.Embedding(11, 8, name="words")(inputs))
    other = L.GRU(6, name="other", reset_after=False)(L.Reshape((1, 6))(x))
    dense = keras.Model(inputs, L.Dense(4, name="head")(other))
    tokens = np.random.default_rng(0).integers(0, 9, (64, 5))
    with pytest.warns(
        UserWarning, match=r"they stay dense.*'other/gru_cell"
    ) as told:
        pruned = kso.prune(dense, 0.25, score="obs", data=tokens)
    (text,) = {str(w.message) for w in told if "dense" in str(w.message)}
    assert text.endswith("Received: 'other/gru_cell/recurrent_kernel'")
    live = {w.path: (w.live, w.size) for w in kso.prunable_weights(pruned)}
    assert live.pop("other/gru_cell/recurrent_kernel") == (108, 108)
    assert all(n == round(0.25 * size) for n, size in live.values())
    words, own = (
        kso.prunable_weights(model)[0].value for model in (dense, pruned)
    )
    counts = np.bincount(tokens.ravel(), minlength=11)[:, None]
    kept = own != 0
    np.testing.assert_array_equal(own[kept], words[kept])
    scores = words**2 * (counts + 0.01 * counts.mean())
    # But for the damping.
    assert np.mean(scores[kept].min() >= scores[~kept]) > 0.9
    with pytest.raises(
        NotPrunableError, match=r"`exclude` them.*Received: 'other/gru_cell/rec"
    ):
        kso.prune(
            dense,
            {"gru": 0.5, "other": 0.5, "words": 0.5, "head": 0.5},
            score="obs",
            data=tokens,
        )


@pytest.mark.core
@pytest.mark.parametrize("score", SCORES)
def test_n_by_m(score):
    keras.utils.set_random_seed(0)
    layers = [
        L.Conv1D(8, 3, name="conv"),
        L.EinsumDense("abc,cde->abde", (None, 2, 4), name="e"),
    ]
    dense = keras.Sequential([keras.Input((7, 4)), *layers])
    x = np.random.default_rng(0).normal(size=(20, 7, 4)).astype("float32")
    data = {} if score == "magnitude" else {"data": x}
    pruned = kso.prune(
        dense, 0.5, score=score, structure=kso.NByM(2, 4), **data
    )
    for mask in masks(pruned).values():
        groups = mask.reshape(-1, 4, 8).sum(axis=1)
        assert set(groups.ravel()) == {2}
    # Where 4 does not divide the inputs, the last group of each tap is smaller.
    keras.utils.set_random_seed(0)
    odd = keras.Sequential(
        [keras.Input((7, 3)), L.Conv1D(8, 3, name="conv"), L.Dense(4)]
    )
    data_of_odd = {} if score == "magnitude" else {"data": x[..., :3]}
    conv, last = masks(
        kso.prune(odd, 0.5, score=score, structure="2:4", **data_of_odd)
    ).values()
    assert (conv.sum(), last.sum(), conv.sum(axis=1).max()) == (36, 16, 2)
    with pytest.raises(
        BudgetError, match=r"at most 48 live entries in 'conv/kernel'.*72"
    ):
        kso.prune(dense, 0.75, score=score, structure=kso.NByM(2, 4), **data)


def test_a_refit_takes_masks_of_any_origin():
    dense, x = network(), rows_of_network()
    score = kso.saliency.magnitude(dense, 0.3)
    given = {
        path: mask
        for path, mask in score.masks.items()
        if path.startswith("conv")
    }
    live = given["conv/kernel"]
    for some in (given, score.masks):
        pruned = kso.apply_masks(dense, some, data=x)
        for path, mask in some.items():
            np.testing.assert_array_equal(masks(pruned)[path], mask)
        before, after = (
            values(model)["conv/kernel"][live] for model in (dense, pruned)
        )
        assert not np.allclose(before, after)
    # Magnitudes of all kernels are compared, with data as without.
    for path, mask in masks(kso.prune(dense, 0.3, data=x)).items():
        np.testing.assert_array_equal(mask, score.masks[path])


@pytest.mark.core
def test_a_killed_run_goes_on(tmp_path, monkeypatch):
    dense, x = network(), rows_of_network()
    options = {
        "density": 0.3,
        "score": "obs",
        "data": x,
        "resume": tmp_path / "run",
    }
    expected = values(kso.prune(dense, 0.3, score="obs", data=x))
    solved, calls = Recipe.solved, []

    def run(limit=100, **change):
        def counted(self, weight, *moments):
            calls.append(weight.path)
            if len(calls) > limit:
                raise KeyboardInterrupt
            return solved(self, weight, *moments)

        calls.clear()
        monkeypatch.setattr(Recipe, "solved", counted)
        return kso.prune(dense, **options | change)

    with pytest.raises(KeyboardInterrupt):
        run(limit=1)
    assert len(list((tmp_path / "run").iterdir())) == 1
    (file,) = (tmp_path / "run").iterdir()
    good, (solved_one,) = file.read_bytes(), calls[:1]
    with np.load(file) as found:
        arrays = dict(found)
    np.savez(file, **arrays | {"values": arrays["values"] * np.nan})
    for content in (
        file.read_bytes(),
        good[:300],
        b"",
        bytes(range(7, 256)) * 4,
    ):
        file.write_bytes(content)
        with pytest.raises(
            ValueError, match=f"Delete this one: '{solved_one}'.*{file.name}"
        ):
            run()
    file.write_bytes(good)
    resumed = values(run())
    assert len(calls) == 2
    for path, value in expected.items():
        np.testing.assert_allclose(resumed[path], value, atol=1e-6)
    for change in (
        {"density": 0.4},
        {"data": x + 1e-3},
        {"exclude": "head"},
        {"score": "wanda"},
    ):
        run(**change)
        # Nothing of another run is taken.
        assert len(calls) == 3 - ("exclude" in change)


class Scaled(L.Layer):
    """A layer whose function is not in its configuration."""

    scale = 1.0

    def call(self, inputs):
        return inputs * self.scale


def of_configuration(first=(), activation="relu"):
    """A network with the same weights for every configuration."""
    keras.utils.set_random_seed(0)
    layers = [*first, L.Dense(16, activation, name="a"), L.Dense(3, name="b")]
    return keras.Sequential([keras.Input((8,)), *layers])


@pytest.mark.core
def test_kernels_of_another_configuration_are_not_taken(tmp_path, monkeypatch):
    """The weights are the same, and so were the files' names."""
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    solved, calls = Recipe.solved, []

    def counted(self, weight, *moments):
        calls.append(weight.path)
        return solved(self, weight, *moments)

    monkeypatch.setattr(Recipe, "solved", counted)

    def run(model, **options):
        calls.clear()
        kso.prune(model, 0.4, score="obs", data=x, resume=tmp_path, **options)
        return len(calls)

    assert run(of_configuration()) == 2
    assert run(of_configuration()) == 0  # whatever the automatic names are
    compiled = of_configuration()
    compiled.compile("adam", "mse")
    assert run(compiled) == 0
    assert run(of_configuration(activation="tanh")) == 2
    assert run(of_configuration([L.Rescaling(1 / 127.5)])) == 2
    # The outputs differ by less than those of one function may on a GPU.
    assert run(of_configuration([L.Rescaling(1 / 127.45)])) == 2
    custom = of_configuration([Scaled()])
    assert run(custom) == 2
    custom.layers[0].scale = 2.0
    assert run(custom) == 2


def test_a_terminal_shows_progress(monkeypatch, capsys):
    dense, x = network(), rows_of_network()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    kso.prune(dense, 0.3, score="wanda", data=x)
    assert "3/3" in capsys.readouterr().out
    keras.config.disable_interactive_logging()
    try:
        kso.prune(dense, 0.3, score="wanda", data=x)
    finally:
        keras.config.enable_interactive_logging()
    assert not capsys.readouterr().out


def test_refusals():
    dense, x = network(), rows_of_network()
    with pytest.raises(
        ValueError,
        match=r"`structure` must be Block, NByM or Channels.*structure=3",
    ):
        kso.prune(dense, 0.3, score="obs", data=x, structure=3)
    with pytest.raises(
        ValueError, match=r"goes on from a folder. Received: resume='here'"
    ):
        kso.prune(dense, 0.3, resume="here")


@pytest.mark.core
@pytest.mark.parametrize("score", ["snip", "grasp", "synflow"])
def test_scores_for_untrained_networks_warn_on_trained_ones(score):
    layers = [
        L.Dense(16, activation="relu", name="hidden"),
        L.Dense(3, name="head"),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("sgd", classifier_loss())
    x, y = np.random.default_rng(0).normal(size=(32, 8)), np.arange(32) % 3
    data = {} if score == "synflow" else {"data": (x, y)}
    kso.prune(model, 0.5, score=score, **data)  # fresh: not a word
    model.fit(x, y, verbose=0)
    function = getattr(kso.saliency, score)
    for given in (
        {"score": score, **data},
        {"score": function(model, 0.5, *data.values())},
    ):
        density = 0.5 if given["score"] == score else None
        with pytest.warns(
            UserWarning,
            match=r"untrained networks.*score=\"obs\".*made 1 steps",
        ):
            kso.prune(model, density, **given)
