"""One start for every model: a network written as a class, and its functional twin."""

import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import ExactOrthogonal

pytestmark = pytest.mark.core
L = keras.layers
ops = keras.ops
SHAPE = (8, 8, 4)


class Unit(L.Layer):
    """Convolution, normalization, ReLU, and a sum with the input."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.conv = L.Conv2D(4, 3, padding="same", name="conv")
        self.norm = L.BatchNormalization(name="norm")

    def build(self, input_shape):
        self.conv.build(input_shape)
        self.norm.build(input_shape)

    def call(self, x, training=False):
        self.last = ops.relu(self.norm(self.conv(x), training=training))
        return x + self.last


class Net(keras.Model):
    """Units in a list, a Sequential model, and layers without normalization behind them."""

    def __init__(self, unit=Unit, **kwargs):
        super().__init__(**kwargs)
        self.units = [unit(name="one"), unit(name="two")]
        self.neck = keras.Sequential(
            [L.Dense(8, name="a"), L.LayerNormalization()], name="neck"
        )
        self.hidden = L.Dense(8, name="hidden")
        self.head = L.Dense(3, name="head")

    def call(self, x, training=False):
        for unit in self.units:
            x = unit(x, training=training)
        x = self.neck(ops.mean(x, axis=(1, 2)))
        return self.head(ops.tanh(self.hidden(x)))


def written(unit=Unit):
    model = Net(unit)
    model(np.zeros((1, *SHAPE), "float32"))
    return model


def functional():
    def block(name):
        inputs = keras.Input(SHAPE)
        x = L.Conv2D(4, 3, padding="same", name="conv")(inputs)
        x = L.ReLU()(L.BatchNormalization(name="norm")(x))
        return keras.Model(inputs, inputs + x, name=name)

    inputs = keras.Input(SHAPE)
    x = block("two")(block("one")(inputs))
    neck = [keras.Input((4,)), L.Dense(8, name="a"), L.LayerNormalization()]
    x = keras.Sequential(neck, name="neck")(ops.mean(x, axis=(1, 2)))
    x = L.Dense(8, name="hidden")(x)
    return keras.Model(inputs, L.Dense(3, name="head")(ops.tanh(x)))


def kernels(model, **kwargs):
    sparse = kso.sparsify(model, 0.3, "uniform", seed=0, **kwargs)
    return {w.path: w.value for w in kso.prunable_weights(sparse)}


@pytest.mark.parametrize(
    "pattern", ["exact_orthogonal", ExactOrthogonal(gain="auto")]
)
def test_a_network_written_as_a_class_draws_the_kernels_of_its_twin(pattern):
    model = written()
    twins = [kernels(m, initializer=pattern) for m in (model, functional())]
    assert len(twins[0]) == 5
    for path, kernel in twins[0].items():
        np.testing.assert_array_equal(kernel, twins[1][path])
    # All taps of the convolutions, as normalization follows.
    assert np.count_nonzero(twins[0]["one/conv/kernel"][0]) > 0


def test_watching_leaves_the_model_as_it_was():
    model = written()
    watched = [*model._flatten_layers()]
    before = [dict(vars(layer)) for layer in watched]
    nodes = [len(layer._inbound_nodes) for layer in watched]
    kso.pruning.watch_calls(model)
    for layer, attributes in zip(watched, before, strict=True):
        assert vars(layer).keys() == attributes.keys()
        for name, value in attributes.items():
            assert vars(layer)[name] is value
    assert nodes == [len(layer._inbound_nodes) for layer in watched]


class Gate(keras.Model):
    """Two inputs, whose second shape Keras does not keep."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.a = L.Dense(16, name="a")
        self.b = L.Dense(16, name="b")
        self.norm = L.LayerNormalization(name="norm")
        self.head = L.Dense(2, name="head")

    def call(self, first, second=None):
        if self.how == "list":
            first, second = first
        elif self.how == "dict":
            first, second = first["p"], first["q"]
        return self.head(ops.relu(self.norm(self.a(first) + self.b(second))))


class Positional(Gate):
    def call(self, first, second):
        return super().call(first, second)


@pytest.mark.parametrize("how", ["list", "dict", "optional", "positional"])
def test_several_inputs(how):
    p, q = np.ones((2, 12), "float32"), np.ones((2, 20), "float32")
    model = (Positional if how == "positional" else Gate)(how)
    inputs = {"list": [[p, q]], "dict": [{"p": p, "q": q}]}
    model(*inputs.get(how, [p, q]))
    if how == "optional":  # its call without the second input fails
        with pytest.warns(UserWarning, match="'gate.*' cannot be watched"):
            found = kernels(model)
    else:
        found = kernels(model)
    assert np.square(found["a/kernel"]).sum() == pytest.approx(
        # The norm of Glorot's kernel under the mask.
        0.3 * 12 * 16 * 2 / 28,
        rel=0.05,
    )


def of_backend(x):
    """A function of the backend, which takes no symbolic tensor of Keras."""
    if isinstance(x, keras.KerasTensor):
        raise TypeError("no tensor of the backend")
    return ops.relu(x)


def of_values(x):
    """A function that needs values, so that no trace passes it."""
    ops.convert_to_numpy(x)
    return ops.relu(x)


class UnitOfBackend(Unit):
    def call(self, x, training=False):
        return x + of_backend(self.norm(self.conv(x), training=training))


class UnitOfValues(Unit):
    def call(self, x, training=False):
        return x + of_values(self.norm(self.conv(x), training=training))


def test_functions_of_the_backend_behind_normalization():
    model = written(UnitOfBackend)
    with warnings.catch_warnings(action="error", category=UserWarning):
        drawn = kernels(model)
    for path, kernel in kernels(functional()).items():
        np.testing.assert_array_equal(kernel, drawn[path])


def guesses(caught):
    [message] = [str(w.message) for w in caught if w.category is UserWarning]
    return message


def test_where_calls_cannot_be_watched_the_norm_is_the_usual_one():
    model = written(UnitOfValues)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        drawn = kernels(model)
    if keras.backend.backend() == "torch":  # a trace there has values
        assert not [w for w in caught if w.category is UserWarning]
    else:
        message = guesses(caught)
        assert "not known what follows" in message
        assert "'one/conv/kernel' (the call of 'one' cannot be" in message
        assert "'two/conv/kernel'" in message
        assert "neck" not in message  # watched on its own
    for path in ("one/conv/kernel", "two/conv/kernel", "neck/a/kernel"):
        np.testing.assert_array_equal(kernels(functional())[path], drawn[path])


class NetOfBackend(Net):
    def call(self, x, training=False):
        return of_backend(super().call(x, training=training))


class NetOfValues(Net):
    def call(self, x, training=False):
        return of_values(super().call(x, training=training))


@pytest.mark.parametrize("kind", [NetOfBackend, NetOfValues])
def test_layers_inside_a_call_that_cannot_be_watched_are_looked_into(kind):
    model = kind()
    model(np.zeros((1, *SHAPE), "float32"))
    with pytest.warns(UserWarning, match="not known what follows") as caught:
        drawn = kernels(model)
    message = guesses(caught)
    assert "'head/kernel'" in message
    assert "neck" not in message
    if kind is NetOfBackend:
        assert "conv" not in message
    twin = kernels(functional())
    for path in ("one/conv/kernel", "neck/a/kernel"):
        np.testing.assert_array_equal(twin[path], drawn[path])


def test_without_any_normalization_the_gain_is_1():
    class Plain(keras.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = L.Dense(16, name="a"), L.Dense(8, name="b")

        def call(self, x):
            return self.b(of_values(self.a(x)))

    model = Plain()
    model(np.zeros((1, 16), "float32"))
    rows = kso.report(kso.sparsify(model, 0.3, "uniform", seed=0)).rows
    assert [row.gain for row in rows] == [1.0, 1.0]


def test_normalization_behind_an_unknown_operation():
    layers = [L.Dense(16, name="a"), L.Rescaling(0.5), L.LayerNormalization()]
    model = keras.Sequential([keras.Input((16,)), *layers, L.Dense(2)])
    rows = kso.report(kso.sparsify(model, 0.3, "uniform", seed=0)).rows
    assert rows[0].gain == pytest.approx(np.sqrt(0.3), rel=0.02)
