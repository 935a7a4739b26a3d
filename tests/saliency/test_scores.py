"""Scores of users: by name and as objects, with any structure, budget, storage and refit."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.calibration import LayerScore
from keras_sparse_ortho.errors import DensityError, NotPrunableError
from keras_sparse_ortho.saliency import (
    SCORES,
    LossDerivatives,
    LossScore,
    ModelScore,
    Score,
)
from tests.helpers import array, classifier_loss, jit_if_quicker

L = keras.layers
pytestmark = pytest.mark.core
WIDTH = 16


class Fisher(LossScore):
    """The diagonal of the Fisher information, from batches, times the square of the weight."""

    name = "fisher"

    def scores(self, model, weights, density, batches):
        loss = LossDerivatives(model, weights, batches)
        pairs = zip(loss.gradient(np.square), weights, strict=True)
        return [squares * weight.raw_value() ** 2 for squares, weight in pairs]


class LastInputs(LayerScore):
    """The inputs of largest index are kept."""

    name = "last_inputs"

    def layer_scores(self, kernel, moments):
        assert moments.gram.shape[-1] == kernel.shape[-2]
        index = np.arange(kernel.shape[-2])[:, None]
        return np.broadcast_to(index, kernel.shape).astype("float64")


@pytest.fixture
def registered():
    for kind in (Fisher, LastInputs):
        assert kso.saliency.register_score(kind) is kind
    yield
    for kind in (Fisher, LastInputs):
        del SCORES[kind.name]


def network():
    keras.utils.set_random_seed(0)
    layers = [
        L.Dense(2 * WIDTH, "tanh", name="hidden"),
        L.Dense(WIDTH, name="head"),
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(
        loss=classifier_loss(), jit_compile=jit_if_quicker(), run_eagerly=False
    )
    return model


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(64, WIDTH)).astype("float32"), np.arange(64) % WIDTH


def masks_of(model):
    return {weight.path: weight.mask for weight in kso.prunable_weights(model)}


def test_a_score_of_the_loss_has_its_masks_and_refits(registered):
    model, (x, y) = network(), data()
    keras.utils.set_random_seed(1)
    saliency = Fisher(batch_size=16, batches=4).saliency(model, 0.3, (x, y))
    assert saliency.method == "fisher"
    masks_alone = kso.prune(model, score=saliency)
    refitted = kso.prune(model, score=saliency, data=x)
    keras.utils.set_random_seed(1)
    by_object = kso.prune(
        model, 0.3, score=Fisher(batch_size=16, batches=4), data=(x, y)
    )
    for path, mask in saliency.masks.items():
        for sparse in (masks_alone, refitted, by_object):
            np.testing.assert_array_equal(masks_of(sparse)[path], mask)
    outputs = array(model(x))
    errors = [
        np.square(array(sparse(x)) - outputs).sum()
        for sparse in (refitted, masks_alone)
    ]
    assert errors[0] < 0.9 * errors[1]
    for one, other in zip(refitted.weights, by_object.weights, strict=True):
        np.testing.assert_allclose(array(one), array(other), atol=1e-5)


def test_a_mean_of_squared_gradients_is_over_batches():
    model, (x, y) = network(), data()
    weights = kso.prunable_weights(model)
    batches = [
        (x[start : start + 16], y[start : start + 16], None)
        for start in (0, 16)
    ]
    squares = LossDerivatives(model, weights, batches).gradient(np.square)
    each = [
        LossDerivatives(model, weights, [batch]).gradient() for batch in batches
    ]
    for mean, first, second in zip(squares, *each, strict=True):
        np.testing.assert_allclose(
            mean, (first**2 + second**2) / 2, rtol=1e-4, atol=1e-10
        )


@pytest.mark.parametrize(
    "options",
    [
        {"structure": "2:4"},
        {"structure": kso.Block(8, 8)},
        {"storage": "blocks", "structure": kso.Block(8, 8, regular=True)},
        {"budget": "erk", "storage": "compact"},
        {"structure": kso.calibration.Channels(), "include": "head"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "score", ["fisher", "last_inputs", "synflow", "random"]
)
def test_any_score_with_any_structure_budget_and_storage(
    registered, score, options
):
    needs_data = score in ("fisher", "last_inputs")
    keras.utils.set_random_seed(0)
    pruned = kso.prune(
        network(),
        0.5,
        score=score,
        data=data() if needs_data else None,
        **options,
    )
    weights = [
        weight
        for weight in kso.prunable_weights(pruned)
        if weight.live < weight.size
    ]
    assert (
        sum(weight.live for weight in weights)
        == sum(weight.size for weight in weights) // 2
    )
    for weight in weights:
        mask = weight.mask
        if options.get("structure") == "2:4":
            assert mask.reshape(-1, 4, mask.shape[1]).sum(axis=1).max() == 2
        elif "structure" in options and "include" in options:
            assert set(mask.mean(axis=1)) == {0.0, 1.0}
        elif "structure" in options:
            by_block = mask.reshape(
                mask.shape[0] // 8, 8, mask.shape[1] // 8, 8
            ).mean(axis=(1, 3))
            assert set(by_block.ravel()) == {0.0, 1.0}
        elif score == "last_inputs" and options.get("budget") == "erk":
            assert mask.sum(axis=1)[-1] == mask.shape[1]


def test_layers_of_a_users_score_go_on_from_a_folder(
    registered, tmp_path, monkeypatch
):
    model, (x, _) = network(), data()
    calls = []
    ranked = LastInputs.layer_scores

    def counted(self, kernel, moments):
        calls.append(kernel.shape)
        return ranked(self, kernel, moments)

    monkeypatch.setattr(LastInputs, "layer_scores", counted)
    results = [
        kso.prune(model, 0.5, score="last_inputs", data=x, resume=tmp_path)
        for _ in range(2)
    ]
    assert len(calls) == 2
    for one, other in zip(results[0].weights, results[1].weights, strict=True):
        np.testing.assert_array_equal(array(one), array(other))


def test_refusals(registered):
    model, (x, y) = network(), data()
    with pytest.raises(
        ValueError, match=r'one of "fisher", .*"last_inputs".*score=\'fischer\''
    ):
        kso.prune(model, 0.5, score="fischer", data=(x, y))
    for score in ("fisher", Fisher()):
        with pytest.raises(
            ValueError,
            match=r"of fisher is a derivative.*Received: score=.*isher",
        ):
            kso.prune(model, 0.5, score=score)
    with pytest.raises(
        ValueError, match=r"pruned on its inputs: give `data`.*LastInputs\(\)"
    ):
        kso.prune(model, 0.5, score=LastInputs())

    class Bare(Score):
        name = "bare"

    with pytest.raises(
        ValueError, match=r"derived from saliency.ModelScore.*score=Bare\(\)"
    ):
        kso.prune(model, 0.5, score=Bare())
    with pytest.raises(NotImplementedError, match="`layer_scores` or `solve`"):
        kso.prune(model, 0.5, score=LayerScore(), data=x)

    class Flat(ModelScore):
        name = "flat"

        def scores(self, model, weights, density, batches):
            return [weight.raw_value().ravel() for weight in weights]

    with pytest.raises(
        NotPrunableError, match=r"'hidden/kernel' must have its shape.*\(512,\)"
    ):
        kso.prune(model, 0.5, score=Flat())
    saliency = kso.saliency.magnitude(model, 0.5)
    with pytest.raises(
        ValueError, match=r"leave `include` and `exclude` out.*include='head'"
    ):
        kso.prune(model, score=saliency, include="head")
    with pytest.raises(DensityError, match=r"made for the density 0.5"):
        kso.prune(model, 0.4, score=saliency)
