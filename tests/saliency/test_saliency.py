"""Saliencies against finite differences and formulas; counts, data, collapse, structures."""

import threading

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import saliency
from keras_sparse_ortho.analysis import jacobian_singular_values
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from keras_sparse_ortho.models import StatelessLoss
from tests.helpers import (
    array,
    assert_same,
    classifier_loss,
    jit_if_quicker,
    second_derivatives,
    slow_case_on_jax,
    slow_where_traced,
)
from tests.models.networks import HEAVY, MODELS

L = keras.layers
# Eager JAX is slow; XLA on TensorFlow compiles for long.
JIT = keras.backend.backend() == "jax"


def network():
    layers = [
        L.Dense(4, "tanh", name="a"),
        L.Dense(3, name="b", kernel_regularizer="l2"),
    ]
    model = keras.Sequential([keras.Input((3,)), *layers])
    model.compile(loss=classifier_loss(), jit_compile=JIT)
    return model


def data(count=12):
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 3)).astype("float32"), rng.integers(
        0, 3, count
    )


def loss_of(flat, x, y, temperature=1.0):
    """The loss of `network()` without biases (they are 0) and weight decay, in float64."""
    first, second = flat[:12].reshape(3, 4), flat[12:].reshape(4, 3)
    logits = np.tanh(x.astype("float64") @ first) @ second / temperature
    logits = logits - logits.max(axis=1, keepdims=True)
    return np.mean(
        np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(y)), y]
    )


def difference(f, w, step=1e-5):
    moves = step * np.eye(len(w))
    return np.array(
        [(f(w + move) - f(w - move)) / (2 * step) for move in moves]
    )


def flat(model):
    return np.concatenate(
        [layer.get_weights()[0].reshape(-1) for layer in model.layers]
    ).astype("float64")


def joined(scored):
    return np.concatenate(
        [score.reshape(-1) for score in scored.scores.values()]
    )


def close(found, expected):
    np.testing.assert_allclose(
        found, expected, atol=1e-4 * np.abs(expected).max()
    )


@pytest.mark.core
@pytest.mark.parametrize("batch_size", [12, 5])
def test_snip_against_differences(batch_size):
    model = network()
    x, y = data()
    found = saliency.snip(
        model, 0.5, (x, y), batch_size=batch_size, batches=None
    )
    w = flat(model)
    close(joined(found), np.abs(w * difference(lambda v: loss_of(v, x, y), w)))


@pytest.mark.core
@pytest.mark.parametrize("batch_size", [12, 5])
def test_grasp_against_differences(batch_size):
    model = network()
    x, y = data()
    w = flat(model)

    def gradient(v):
        return difference(
            lambda u: loss_of(u, x, y, temperature=200.0), v, 1e-4
        )

    # H g is the derivative of the gradient along g.
    g = gradient(w)
    step = 1e-3 / np.linalg.norm(g)
    expected = (
        w * (gradient(w + step * g) - gradient(w - step * g)) / (2 * step)
    )
    options = {"batch_size": batch_size, "batches": None}
    close(joined(saliency.grasp(model, 0.5, (x, y), **options)), expected)


@pytest.mark.core
def test_synflow_against_its_formula():
    first, last = L.Dense(6, "tanh", name="a"), L.Dense(3, "softmax", name="b")
    model = keras.Sequential(
        [keras.Input((5,)), first, L.BatchNormalization(name="n"), last]
    )
    rng = np.random.default_rng(0)
    for variable in model.variables:
        variable.assign(rng.normal(size=variable.shape))
    model.get_layer("n").moving_variance.assign(rng.random(6) + 0.5)
    before = [array(v) for v in model.variables]
    found = saliency.synflow(model, 0.3, rounds=7)
    a, bias = (np.abs(v) for v in model.get_layer("a").get_weights())
    gamma, beta, _, variance = (
        np.abs(v) for v in model.get_layer("n").get_weights()
    )
    b, _ = (np.abs(v) for v in model.get_layer("b").get_weights())
    scale = gamma / np.sqrt(variance + model.get_layer("n").epsilon)
    mask = [np.ones((5, 6), bool), np.ones((6, 3), bool)]
    for number in range(1, 8):
        first, second = a * mask[0], b * mask[1]
        hidden = (first.sum(axis=0) + bias) * scale + beta
        scores = [first * scale * second.sum(axis=1), second * hidden[:, None]]
        keep = round(0.3 ** (number / 7) * 48)
        both = np.concatenate([s.reshape(-1) for s in scores])
        chosen = np.isin(np.arange(48), np.argsort(-both)[:keep])
        last, mask = (
            scores,
            [chosen[:30].reshape(5, 6), chosen[30:].reshape(6, 3)],
        )
    for path, expected, live in zip(
        ("a/kernel", "b/kernel"), last, mask, strict=True
    ):
        np.testing.assert_array_equal(found.masks[path], live)
        score = found.scores[path]
        np.testing.assert_allclose(
            score[score >= 0], expected[score >= 0], rtol=1e-5
        )
    # The model is as it was.
    assert_same(before, model.variables)
    assert {layer.dtype_policy.name for layer in model.layers} == {"float32"}
    assert model.get_layer("b").activation is keras.activations.softmax


def test_synflow_keeps_the_order_in_which_entries_died():
    model = keras.Sequential(
        [keras.Input((5,)), L.Dense(6, name="a"), L.Dense(3, name="b")]
    )
    scored = joined(
        saliency.synflow(model, 0.2, rounds=4, on_collapse="ignore")
    )
    alive = np.ones(48, bool)
    for number in range(1, 4):
        # The first rounds of four are those of a run that ends with them.
        part = saliency.synflow(
            model, 0.2 ** (number / 4), rounds=number, on_collapse="ignore"
        )
        stay = np.concatenate(
            [mask.reshape(-1) for mask in part.masks.values()]
        )
        np.testing.assert_array_equal(scored >= number + 1 - 4, stay)
        died = np.flatnonzero(alive & ~stay)
        assert (scored[died] < 0).all()
        by_then = joined(part)[died]
        np.testing.assert_array_equal(
            np.argsort(scored[died]), np.argsort(by_then)
        )
        alive = stay
    assert np.count_nonzero(alive) == round(0.2**0.75 * 48)


@pytest.fixture
def quick_compilation():
    """What XLA spends on optimizing, a test that runs each function once does not get back."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    "structure",
    [
        pytest.param(k, marks=slow_where_traced) if k in HEAVY else k
        for k in MODELS
    ],
)
def test_every_structure(structure):
    model = MODELS[structure]()
    model.compile(loss=classifier_loss(), jit_compile=JIT)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 8, 8, 3)).astype("float32")
    y = rng.integers(0, 4, 4)
    size = sum(w.size for w in kso.prunable_weights(model))
    found = [saliency.snip(model, 0.3, (x, y), on_collapse="ignore")]
    found.append(saliency.grasp(model, 0.6, (x, y), on_collapse="ignore"))
    options = (
        {"exclude": ".*(query|key)/kernel"} if "attention" in structure else {}
    )
    if "recurrent" not in structure:
        found.append(saliency.synflow(model, 0.3, rounds=3, **options))
    for scored in found:
        assert sum(scored.counts.values()) == round(scored.density * size)


def test_counts_ties_and_seeds():
    model = network()
    for layer in model.layers:
        layer.kernel.assign(np.ones(layer.kernel.shape))
    # 14 of 24: the first 12, and two more.
    tied = saliency.magnitude(model, 0.6)
    assert tied.counts == {"a/kernel": 12, "b/kernel": 2}
    assert tied.masks["b/kernel"].reshape(-1)[:2].all()
    one, same, other = (
        saliency.random(model, 0.5, seed=seed) for seed in (1, 1, 2)
    )
    assert sum(one.counts.values()) == 12
    for path in one.masks:
        np.testing.assert_array_equal(one.masks[path], same.masks[path])
    assert any(
        (one.masks[path] != other.masks[path]).any() for path in one.masks
    )


@pytest.mark.parametrize("score", [saliency.snip, saliency.grasp])
def test_batches_and_sample_weights(score):
    model = network()
    x, y = data()

    def scores(*args, **options):
        return joined(score(model, 0.5, *args, **options))

    batches = [(x[k : k + 4], y[k : k + 4]) for k in (0, 4, 8)]
    whole = scores((x, y))  # all of it, in another order
    several = scores(iter(batches), batches=None)
    np.testing.assert_allclose(several, whole, atol=1e-4 * np.abs(whole).max())
    drawn = [scores((x, y), batch_size=4, seed=seed) for seed in (3, 3, 4)]
    np.testing.assert_array_equal(drawn[0], drawn[1])
    assert (drawn[0] != drawn[2]).any()
    first = scores(batches[0], shuffle=False)
    np.testing.assert_array_equal(
        scores((x, y), batch_size=4, shuffle=False), first
    )
    if score is saliency.snip:  # GraSP's are quadratic in the loss
        one = scores((x, y, np.array([1.0] * 4 + [0.0] * 8)))
        np.testing.assert_allclose(one, first / 3, rtol=1e-3, atol=1e-6)


def test_collapse_is_reported():
    model = network()
    model.layers[1].kernel.assign(model.layers[1].kernel * 1e-6)
    with pytest.raises(
        BudgetError, match=r"Layer collapse.*magnitude.*\['b/kernel'\]"
    ):
        saliency.magnitude(model, 0.2)
    found = saliency.magnitude(model, 0.2, on_collapse="ignore")
    assert found.collapsed == ["b/kernel"]
    with pytest.raises(BudgetError, match="Layer collapse"):
        _ = found.budget
    with pytest.raises(BudgetError, match=r"Layer collapse.*\['b/kernel'\]"):
        kso.prune(model, score=found)
    with pytest.raises(BudgetError, match="exactly orthogonal"):
        _ = found.orthogonal_budget
    found = saliency.magnitude(model, 0.5, on_collapse="ignore")
    assert found.orthogonal_budget.lifted == ("b/kernel",)
    assert found.orthogonal_budget.live == 12


def test_refusals():
    model = network()
    x, y = data()
    with pytest.raises(NotPrunableError, match="wrapped already"):
        saliency.magnitude(kso.sparsify(model, 0.5, seed=0), 0.5)
    with pytest.raises(ValueError, match="before the model is compiled"):
        saliency.snip(
            keras.Sequential([keras.Input((3,)), L.Dense(3)]), 0.5, (x, y)
        )
    with pytest.raises(ValueError, match=r"same number of samples.*\[3, 12\]"):
        saliency.snip(model, 0.5, (x, y[:3]))
    with pytest.raises(ValueError, match="has its own targets"):
        saliency.snip(model, 0.5, (iter([(x, y)]), y))
    for name in ("snip", "grasp"):
        for unlabelled in (x, [(x,)], lambda: iter([(x, None)])):
            with pytest.raises(
                ValueError, match=r"labels: give `data` as `\(x, y\)`.*y=None"
            ):
                kso.prune(model, 0.5, score=name, data=unlabelled)
    with pytest.raises(ValueError, match="rounds=0"):
        saliency.synflow(model, 0.5, rounds=0)
    with pytest.raises(ValueError, match="on_collapse='skip'"):
        saliency.random(model, 0.5, on_collapse="skip")


def test_losses_that_need_no_labels():
    class Reconstructs(keras.Model):
        def compute_loss(
            self, x=None, y=None, y_pred=None, sample_weight=None, training=True
        ):
            return keras.ops.mean((x - y_pred) ** 2)

    inputs, (x, _) = keras.Input((3,)), data()
    model = Reconstructs(inputs, L.Dense(3, name="a")(inputs))
    model.compile(loss="mse", jit_compile=JIT)
    found = joined(saliency.snip(model, 0.5, x))
    model.compile(loss=None, jit_compile=JIT)
    np.testing.assert_allclose(
        joined(saliency.snip(model, 0.5, x)), found, rtol=1e-5
    )
    plain = keras.Model(inputs, model.output)
    plain.compile(loss="mse", jit_compile=JIT)
    np.testing.assert_allclose(
        joined(saliency.snip(plain, 0.5, (x, x))), found, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("kind", "activation", "bias"),
    [
        (keras.losses.SparseCategoricalCrossentropy, "softmax", 0.0),
        (keras.losses.BinaryCrossentropy, "sigmoid", -0.3),
        (keras.losses.BinaryCrossentropy, "sigmoid", 1.2),
    ],
)
def test_one_probability_gives_the_scores_of_its_logit(kind, activation, bias):
    model, twin = network(), network()
    x, y = data()
    for one, last in ((model, None), (twin, activation)):
        one.layers[1].activation = keras.activations.get(last)
        one.set_weights([*model.get_weights()[:3], np.full(3, bias)])
        one.compile(loss=kind(from_logits=last is None), jit_compile=JIT)
    labels = y if activation == "softmax" else np.eye(3)[y]
    expected = joined(saliency.grasp(model, 0.5, (x, labels)))
    found = joined(saliency.grasp(twin, 0.5, (x, labels)))
    np.testing.assert_allclose(
        found, expected, atol=1e-3 * np.abs(expected).max()
    )


# --- second derivatives, through every kind of layer ----------------------------------------------

LAYERS = {
    "batch": L.BatchNormalization,
    "layer": L.LayerNormalization,
    "layer over two axes": lambda: L.LayerNormalization(axis=(-2, -1)),
    "group": lambda: L.GroupNormalization(2),
    "attention": lambda: L.MultiHeadAttention(2, 4),
}


def network_of(kind, outputs=3):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4, 5))
    x = L.Dense(8, "tanh", name="a")(inputs)
    x = LAYERS[kind]()(x, x) if kind == "attention" else LAYERS[kind]()(x)
    model = keras.Model(inputs, L.Dense(outputs, name="b")(L.Flatten()(x)))
    # GraSP softens no such loss.
    model.compile(loss="mse", jit_compile=jit_if_quicker())
    return model


def rows():
    # Not of mean zero: the mean of what a kernel gives has to depend on the kernel.
    x = np.random.default_rng(0).uniform(size=(12, 4, 5)).astype("float32")
    return x, np.eye(3)[np.arange(12) % 3]


ON_JAX = [
    slow_case_on_jax(kind) if kind == "attention" else kind for kind in LAYERS
]


@pytest.mark.core
@pytest.mark.parametrize("kind", ON_JAX)
def test_grasp_is_a_difference_of_gradients(kind):
    model, (x, y) = network_of(kind), rows()
    variables = [v for v in model.trainable_variables if "kernel" in v.path]
    loss = StatelessLoss(model, variables)
    values = [array(v) for v in variables]

    def slopes(values):
        return [array(g) for g in loss.gradients(values, x, y)]

    slope = slopes(values)
    step = 0.02 / np.sqrt(sum(np.sum(g * g) for g in slope))
    ahead, back = (
        slopes(
            [w + sign * step * g for w, g in zip(values, slope, strict=True)]
        )
        for sign in (1, -1)
    )
    expected = [
        w * (a - b) / (2 * step)
        for w, a, b in zip(values, ahead, back, strict=True)
    ]
    found = saliency.grasp(
        model, 0.5, (x, y), on_collapse="ignore"
    ).scores.values()
    largest = max(np.abs(score).max() for score in expected)
    for one, two in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, two, atol=0.01 * largest)


@pytest.mark.core
@pytest.mark.parametrize("kind", LAYERS)
def test_jacobians_of_more_outputs_than_inputs(kind):
    model, (x, _) = network_of(kind, outputs=24), rows()
    found = jacobian_singular_values(model, x[:1])
    moves = 0.01 * np.eye(20).reshape(20, 4, 5)
    slopes = (array(model(x[:1] + moves)) - array(model(x[:1] - moves))) / 0.02
    expected = np.linalg.svd(slopes, compute_uv=False)
    np.testing.assert_allclose(found[0], expected, atol=2e-3 * expected[0])


def replaced():
    """The function of the backend that has no whole second derivative."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.nn.moments
    if keras.backend.backend() == "jax":
        import jax

        return jax.nn.dot_product_attention
    import torch

    return torch.nn.functional.scaled_dot_product_attention


@pytest.mark.core
def test_replacements_end_with_the_last_scope_on_errors_too():
    before = replaced()
    inside, leave = threading.Event(), threading.Event()

    def other_thread():
        with second_derivatives():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other_thread)

    def fails():
        with second_derivatives():
            with second_derivatives():
                assert replaced() is not before
            assert replaced() is not before
            thread.start()
            inside.wait(10)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fails()
    assert replaced() is not before  # the other thread still takes derivatives
    leave.set()
    thread.join()
    assert replaced() is before


@pytest.mark.core
@pytest.mark.tensorflow_only
@pytest.mark.parametrize("keepdims", [False, True])
def test_moments_have_the_values_and_gradients_of_tensorflow(keepdims):
    import tensorflow as tf

    x = tf.constant(
        np.random.default_rng(0).normal(size=(5, 4, 3)) + 2, tf.float16
    )
    found = []
    for scope in (False, True):
        with tf.GradientTape() as tape:
            tape.watch(x)
            if scope:
                with second_derivatives():
                    moments = tf.nn.moments(x, [0, 1], keepdims=keepdims)
            else:
                moments = tf.nn.moments(x, [0, 1], keepdims=keepdims)
        found.append([*moments, tape.gradient(moments, x)])
    for one, two in zip(*found, strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        np.testing.assert_allclose(one, two, rtol=2e-3)
