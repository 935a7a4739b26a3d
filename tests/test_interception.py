"""Calls are seen, and settings changed, in one thread, and nothing stays on layers or modules."""

import threading
import types
import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho._backend import float64_operations, second_derivatives
from keras_sparse_ortho._interception import (
    Enough,
    intercepted,
    observe,
    stand_in,
    with_settings,
)
from keras_sparse_ortho._keras_internals import (
    from_zero_states,
    without_warnings,
)
from tests.helpers import array

pytestmark = pytest.mark.core

L = keras.layers
X = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")


class Turns:
    """Lets two threads go on in the order of a list of letters."""

    def __init__(self, order):
        self._order = list(order)
        self._changed = threading.Condition()

    def wait(self, letter):
        with self._changed:
            assert self._changed.wait_for(
                lambda: self._order[:1] == [letter], timeout=60
            )

    def done(self):
        with self._changed:
            self._order.pop(0)
            self._changed.notify_all()


def overlapping(first, second, between=lambda: None):
    """Enters and leaves a context in this thread, then one in a second that begins before."""
    turns, errors = Turns("abab"), []

    def work():
        try:
            turns.wait("b")
            with second():
                turns.done()
                turns.wait("b")
                between()
            turns.done()
        except BaseException as error:
            errors.append(error)
            raise

    thread = threading.Thread(target=work)
    thread.start()
    turns.wait("a")
    with first():
        turns.done()
        turns.wait("a")
        between()
    turns.done()
    thread.join(60)
    assert not errors


def hooks(model):
    """The layers with a `call` or a setting of their own that their class does not give them."""
    names = ("call", "stateful", "activation", "_fixed", "use_cudnn", "unroll")
    own = {
        id(layer): {n: vars(layer).get(n) for n in names}
        for layer in model._flatten_layers()
    }
    return own


def test_each_thread_sees_its_own_calls_of_a_layer():
    layer, other = L.Dense(4), L.Dense(4)
    layer.build((None, 8))
    other.build((None, 8))
    seen = {"first": [], "second": []}

    def note(name):
        def observer(observed, call, inputs):
            seen[name].append((observed is layer, len(inputs)))
            return call(inputs)

        return lambda: observe([layer, layer, other], observer)

    def calls():
        count = (
            1 if threading.current_thread() is threading.main_thread() else 3
        )
        layer(X[:count])

    overlapping(note("first"), note("second"), calls)
    assert seen == {"first": [(True, 1)], "second": [(True, 3)]}
    assert "call" not in vars(layer)
    assert "call" not in vars(other)


def test_observers_in_one_thread_see_what_each_other_answers():
    layer = L.Dense(4, use_bias=False)
    layer.build((None, 8))
    order = []

    def outer(observed, call, inputs):
        order.append("outer")
        return call(inputs) + 1.0

    def inner(observed, call, inputs):
        order.append("inner")
        return 2.0 * call(inputs)

    plain = array(layer(X))
    with observe([layer], outer), observe([layer], inner):
        np.testing.assert_allclose(
            array(layer(X)), 2.0 * (plain + 1.0), rtol=1e-5
        )
    assert order == ["inner", "outer"]
    np.testing.assert_array_equal(array(layer(X)), plain)


def test_enough_ends_the_block_and_other_errors_pass():
    layer, seen = L.Dense(8), []
    model = keras.Sequential([keras.Input((8,)), layer, L.Dense(8)])

    def first(observed, call, inputs):
        seen.append(inputs)
        raise Enough

    with observe([layer], first):
        model(X)
        seen.append("never")
    assert len(seen) == 1

    def wrong(observed, call, inputs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), observe([layer], wrong):
        model(X)
    assert "call" not in vars(layer)


def test_a_call_that_a_user_has_set_comes_back():
    layer = L.Dense(4)
    layer.build((None, 8))

    def own(self, inputs):
        return keras.ops.zeros((len(inputs), 4))

    vars(layer)["call"] = mine = types.MethodType(own, layer)
    with observe([layer], lambda layer, call, inputs: call(inputs) + 1.0):
        assert float(array(layer(X)).max()) == 1.0
    assert vars(layer)["call"] is mine


def test_settings_add_up_and_observers_see_such_calls():
    layer, seen = L.LSTM(4), []
    sequences = np.ones((2, 5, 3), "float32")
    layer(sequences)

    def note(observed, call, *args, **kwargs):
        seen.append(observed)
        return call(*args, **kwargs)

    with (
        with_settings(layer, return_sequences=True),
        observe([layer], note),
        with_settings(layer, go_backwards=True),
    ):
        outputs = array(layer(sequences[:, ::-1] * np.arange(5)[:, None]))
    assert outputs.shape == (2, 5, 4)
    assert seen == [layer]
    assert (layer.return_sequences, layer.go_backwards) == (False, False)
    other = stand_in(layer, return_sequences=True)
    assert other.call(keras.ops.convert_to_tensor(sequences)).shape == (2, 5, 4)
    assert array(layer(sequences)).shape == (2, 4)


def test_copies_that_another_thread_makes_have_no_hook():
    model = keras.Sequential(
        [keras.Input((8,)), L.Dense(8, name="d"), L.LayerNormalization()]
    )
    with observe(model.layers, lambda layer, call, *args: call(*args)):
        copy = kso.prune(model, 0.5)
        changed = kso.prune.in_place(keras.models.clone_model(model), 0.5)
    assert not any("call" in vars(layer) for layer in copy._flatten_layers())
    assert not any("call" in vars(layer) for layer in changed._flatten_layers())
    assert not any("call" in vars(layer) for layer in model._flatten_layers())


def test_a_function_of_a_module_is_another_one_in_one_thread():
    module = types.SimpleNamespace(double=lambda x: 2 * x)
    double, found = module.double, []

    def replace():
        return intercepted(
            module, "double", lambda original, x: original(x) + 1
        )

    overlapping(replace, replace, lambda: found.append(module.double(3)))
    assert found == [7, 7]
    assert module.double is double
    with replace():
        thread = threading.Thread(target=lambda: found.append(module.double(3)))
        thread.start()
        thread.join()
    assert found[-1] == 6


def test_states_of_recurrent_layers_stay_stateful():
    layer = L.LSTM(4, stateful=True)
    model = keras.Sequential([keras.Input((5, 3), batch_size=2), layer])
    sequences = np.ones((2, 5, 3), "float32")
    first = array(model(sequences))
    inside = []

    def call():
        inside.append(array(model(sequences)))

    overlapping(
        lambda: from_zero_states(model), lambda: from_zero_states(model), call
    )
    assert layer.stateful
    np.testing.assert_allclose(inside[0], first, atol=1e-6)
    np.testing.assert_allclose(inside[1], first, atol=1e-6)
    # It goes on from the state.
    assert not np.allclose(array(model(sequences)), first, atol=1e-4)


def test_float64_and_second_derivatives_are_those_of_one_thread():
    def kind():
        return keras.backend.result_type("float64", "float32")

    plain = kind()
    inside, outside = [], []
    overlapping(
        float64_operations, float64_operations, lambda: inside.append(kind())
    )
    assert set(inside) == {"float64"}
    with float64_operations(), second_derivatives():
        thread = threading.Thread(target=lambda: outside.append(kind()))
        thread.start()
        thread.join()
    assert outside == [plain]
    assert kind() == plain
    overlapping(second_derivatives, second_derivatives)
    assert not any(
        type(value).__name__ == "_Dispatcher"
        for value in (
            *vars(keras.src.backend.common.dtypes).values(),
            *functions_of_backend(),
        )
    )


def functions_of_backend():
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return [tf.nn.moments]
    if keras.backend.backend() == "jax":
        import jax

        return [jax.nn.dot_product_attention]
    import torch

    return [torch.nn.functional.scaled_dot_product_attention]


def test_our_warnings_are_held_back_in_one_thread():
    dense = keras.Sequential([keras.Input((8,)), L.Dense(4, name="d")])
    filters, shown = list(warnings.filters), []

    def warn():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kso.prune(dense, 0.5, score="obs", data=X)  # few rows
        shown.append(
            any("different rows" in str(warning.message) for warning in caught)
        )

    with without_warnings():
        warn()
        thread = threading.Thread(target=warn)
        thread.start()
        thread.join()
    warn()
    assert shown == [False, True, True]
    assert list(warnings.filters) == filters


WORK = {
    "report": lambda model, rows: kso.report(model).flops,
    "obs": lambda model, rows: kso.prune(
        model, 0.5, score="obs", data=rows
    ).get_weights(),
    "synflow": lambda model, rows: kso.prune(
        model, 0.5, score="synflow"
    ).get_weights(),
    "grasp": lambda model, rows: (
        kso.saliency.grasp(model, 0.5, (rows, rows)).masks
    ),
    "predict": lambda model, rows: array(model(rows)),
}


@pytest.mark.parametrize("name", ["report", "obs", "synflow", "grasp"])
def test_threads_that_share_a_model(name):
    """Each gets what it gets alone, one that only calls the model as well; nothing stays."""
    layers = [
        L.Dense(8, "relu", name="a"),
        L.LayerNormalization(),
        L.Dense(8, name="b"),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile(loss="mse", jit_compile=False)
    rows = np.random.default_rng(1).normal(size=(64, 8)).astype("float32")
    jobs = [name, name, "report", "predict"]
    alone = [WORK[job](model, rows) for job in jobs]
    before = hooks(model)
    found = [None] * len(jobs)

    def work(number):
        for _ in range(3):
            found[number] = WORK[jobs[number]](model, rows)

    threads = [
        threading.Thread(target=work, args=(number,))
        for number in range(len(jobs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, found, strict=True):
        for x, y in zip(
            keras.tree.flatten(one), keras.tree.flatten(other), strict=True
        ):
            np.testing.assert_array_equal(x, y)
    assert hooks(model) == before
    assert all(layer.dtype_policy.name == "float32" for layer in model.layers)


def test_threads_that_call_a_quantized_model():
    dense = keras.Sequential([keras.Input((8,)), L.Dense(8, "gelu", name="a")])
    model = kso.quantize_aware(dense)
    model(X, training=True)
    alone = array(model(X))
    inner = model.layers[0].layer
    found = []
    threads = [
        threading.Thread(
            target=lambda: found.extend(array(model(X)) for _ in range(20))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    for outputs in found:
        np.testing.assert_array_equal(outputs, alone)
    assert inner.activation is keras.activations.gelu
