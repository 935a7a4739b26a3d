"""The loss as a pure function: its gradients, and that nothing moves.

Second derivatives: tests/saliency/test_saliency.py.
"""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import StatelessLoss
from tests.helpers import array, assert_same, classifier_loss, jit

L = keras.layers
pytestmark = pytest.mark.core


def network(dropout=0.0):
    """Smooth, with normalization, an activity loss, a weight loss and a wrapped convolution."""
    inputs = keras.Input((6, 6, 2))
    activity = keras.regularizers.L2(0.1)
    x = L.Conv2D(
        4, 3, activation="tanh", activity_regularizer=activity, name="conv"
    )(inputs)
    x = L.BatchNormalization()(x)
    x = L.Dropout(dropout, seed=4, name="dropout")(x)
    x = L.Dense(3, name="head", kernel_regularizer="l2")(L.Flatten()(x))
    # With this seed no output has a small norm: after batch statistics it would be too steep for
    # finite differences.
    return kso.sparsify(keras.Model(inputs, x), 0.5, seed=3)


def batch():
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, 6, 6, 2)), rng.integers(0, 3, 8), rng.random(8)


def compiled(model, **kwargs):
    model.compile("sgd", classifier_loss(), jit_compile=jit(), **kwargs)
    return model


def gradients_of(loss, *arguments):
    return [array(gradient) for gradient in loss.gradients(*arguments)]


def value_of(loss):
    """The loss as a number, compiled."""
    run = loss.compiled(lambda own, values: own(values))
    return lambda *arguments: float(array(run(*arguments)))


def check_gradients(loss, values, *data):
    """Against differences of fourth order along a random direction for each variable."""
    value = value_of(loss)
    rng = np.random.default_rng(1)
    for index, gradient in enumerate(gradients_of(loss, values, *data)):
        direction = rng.normal(size=gradient.shape)
        direction /= np.linalg.norm(direction)

        def at(step, index=index, direction=direction):
            moved = list(values)
            moved[index] = values[index] + step * direction
            return value(moved, *data)

        h = 0.04
        slope = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
        np.testing.assert_allclose(
            np.vdot(gradient, direction), slope, rtol=2e-3, atol=1e-4
        )
        assert gradient.any()


def test_gradients_agree_with_finite_differences():
    model = compiled(network())
    values = [array(v).astype("float64") for v in model.trainable_variables]
    check_gradients(
        StatelessLoss(model, model.trainable_variables), values, *batch()
    )


def test_no_variable_changes():
    model = compiled(network(dropout=0.3), metrics=["accuracy"])
    x, y, weight = batch()
    model.fit(x, y, sample_weight=weight, verbose=0)
    variables = [
        *model.variables,
        *model.optimizer.variables,
        *model.metrics_variables,
    ]
    before = [array(v) for v in variables]
    loss = StatelessLoss(model, model.trainable_variables)
    first, second = (gradients_of(loss, None, x, y, weight) for _ in range(2))
    for a, b in zip(first, second, strict=True):  # the same dropout
        np.testing.assert_array_equal(a, b)
    assert_same(before, variables)
    model.get_layer("dropout").rate = 0.0
    without = gradients_of(
        StatelessLoss(model, loss.variables), None, x, y, weight
    )
    assert not np.array_equal(first[-1], without[-1])


def test_the_other_variables_are_read_anew():
    model = compiled(network())
    x, y, _ = batch()
    head = model.get_layer("head").layer
    value = value_of(StatelessLoss(model, [head.kernel]))
    before = value(None, x, y)
    head.bias.assign([5.0, 0.0, 0.0])
    assert value(None, x, y) > before + 0.1
    head.bias.assign(np.zeros(3))
    assert value(None, x, y) == before


def test_it_is_the_loss_of_evaluate_with_dicts_and_several_losses():
    a, b = (
        keras.Input((3,), name="a"),
        keras.Input((4,), dtype="int32", name="b"),
    )
    embedded = L.Flatten()(L.Embedding(9, 2)(b))
    hidden = L.Dense(4, activation="tanh", activity_regularizer="l2")(a)
    joined = L.Concatenate()([hidden, embedded])
    outputs = {
        "p": L.Dense(2, name="p", kernel_regularizer="l2")(joined),
        "q": L.Dense(1, name="q")(joined),
    }
    model = keras.Model({"a": a, "b": b}, outputs)
    model.compile(
        "sgd",
        {"p": classifier_loss(), "q": "mse"},
        loss_weights={"p": 1.0, "q": 0.3},
    )
    rng = np.random.default_rng(0)
    x = {"a": rng.normal(size=(6, 3)), "b": rng.integers(0, 9, (6, 4))}
    y = {"p": rng.integers(0, 2, 6), "q": rng.normal(size=(6, 1))}
    weight = {"p": rng.random(6), "q": rng.random(6)}
    loss = StatelessLoss(model, model.trainable_variables)
    values = [array(v).astype("float64") for v in model.trainable_variables]
    check_gradients(loss, values, x, y, weight)
    expected = model.evaluate(
        x, y, sample_weight=weight, verbose=0, return_dict=True
    )["loss"]
    assert value_of(loss)(None, x, y, weight) == pytest.approx(
        expected, rel=1e-5
    )


def test_scaled_losses_do_not_underflow():
    inputs = keras.Input((4,))
    x = L.Dense(4, dtype="mixed_float16")(inputs)
    model = keras.Model(inputs, keras.ops.cast(x, "float32") * 1e-8)
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(), 2.0**15
    )
    model.compile(optimizer, "mae", jit_compile=jit())
    loss = StatelessLoss(model, model.trainable_variables)
    kernel, bias = gradients_of(loss, None, np.ones((1, 4)), np.ones((1, 4)))
    np.testing.assert_allclose(bias, -0.25e-8, rtol=1e-2)
    np.testing.assert_allclose(kernel, -0.25e-8, rtol=1e-2)


def test_refusals():
    model = network()
    with pytest.raises(
        ValueError, match=r"compiled: call `compile.*Received: .*not compiled"
    ):
        StatelessLoss(model, model.trainable_variables)
    with pytest.raises(NotPrunableError, match="must be built"):
        StatelessLoss(keras.Sequential([L.Dense(1)]), [])
