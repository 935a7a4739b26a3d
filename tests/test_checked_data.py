"""The door for data: what a model cannot take is refused by name, what is doubtful warned of."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import _data
from keras_sparse_ortho._checked_data import check_inputs, check_targets
from keras_sparse_ortho._data import all_rows, first_batches
from tests.helpers import assert_same

L = keras.layers
pytestmark = pytest.mark.core
X = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
Y = np.arange(64) % 3


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    layers = [
        L.Dense(6, "relu", name="a"),
        L.BatchNormalization(),
        L.Dense(3, name="b"),
    ]
    model = keras.Sequential([keras.Input((8,), name="x"), *layers])
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    return model


def not_finite(value=np.nan):
    rows = X.copy()
    rows[5, 1] = value
    return rows


USES = {
    "prune": lambda model, x: kso.prune(model, 0.5, score="obs", data=x),
    "refit": lambda model, x: kso.prune(model, 0.5, data=x),
    "apply_masks": lambda model, x: kso.apply_masks(
        model, {"a": np.arange(48).reshape(8, 6) % 2 == 0}, data=x
    ),
    "sensitivity": lambda model, x: kso.sensitivity(model, x),
    "restore_statistics": lambda model, x: kso.restore_statistics(model, x),
    "snip": lambda model, x: kso.saliency.snip(model, 0.5, (x, Y[: len(x)])),
    "grasp": lambda model, x: kso.saliency.grasp(model, 0.5, (x, Y[: len(x)])),
    "report": lambda model, x: kso.report(model, sample=x),
    "spectrum": lambda model, x: kso.analysis.jacobian_singular_values(
        model, x[:6]
    ),
    "rigl": lambda model, x: rigl(model, x),
}


def rigl(model, x):
    sparse = kso.sparsify(model, 0.5, seed=0, include="a")
    sparse.compile("sgd", model.loss)
    callback = kso.callbacks.RigL(
        (x, Y[: len(x)]), batch_size=64, frequency=1, end_step=9
    )
    sparse.fit(X, Y, verbose=0, callbacks=[callback])


WRONG = {
    "nan": (not_finite(), r"finite.*Received: NaN or infinity in row"),
    "infinity": (
        not_finite(np.inf),
        r"finite.*Received: NaN or infinity in row",
    ),
    "shape": (
        X[:, :7],
        r"for input `x` must have the shape \(rows, 8\)\. Received: shape=",
    ),
}
# A report takes the shape of the first row alone.
CASES = [
    (use, kind)
    for use in USES
    for kind in WRONG
    if use != "report" or kind == "shape"
]


@pytest.mark.core
@pytest.mark.parametrize("name", ["prune", "sensitivity", "report"])
def test_inputs_of_another_name_are_refused(name, model):
    with pytest.raises(
        ValueError, match=r"by name: \['x'\]\. Received: a dict.*\['other'\]"
    ):
        USES[name](model, {"other": X})


@pytest.mark.parametrize(("use", "kind"), CASES)
def test_every_use_refuses_rows_that_the_model_cannot_take(use, kind, model):
    rows, message = WRONG[kind]
    before = model.get_weights()
    with pytest.raises(ValueError, match=message) as refused:
        USES[use](model, rows)
    assert "\x1b" not in str(refused.value)
    assert "\n" not in str(refused.value)
    assert_same(before, model.get_weights())


def test_rows_are_named_by_their_number_in_all_batches(model):
    batches = [(X, Y), (not_finite(), Y)]
    with pytest.raises(ValueError, match=r"in row 69$"):
        kso.prune(model, 0.5, score="obs", data=batches)


def test_a_model_that_fills_gaps_takes_them():
    inputs = keras.Input((8,))
    filled = L.Lambda(lambda x: keras.ops.where(keras.ops.isnan(x), 0.0, x))(
        inputs
    )
    model = keras.Model(inputs, L.Dense(3)(filled))
    check_inputs(model, not_finite())
    kso.prune(model, 0.5, score="obs", data=not_finite())


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.a = L.Dense(3)

    def call(self, x):
        return self.a(x)


def test_a_subclassed_model_is_tried():
    model = Subclassed()
    model(X)
    check_inputs(model, X)
    with pytest.raises(
        ValueError, match=r"able to compute .*shapes \[\(64, 7\)\], on which"
    ) as e:
        kso.prune(model, 0.5, score="obs", data=X[:, :7])
    assert "\x1b" not in str(e.value)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("shape", [(64, 8, 1), (64, 8)])
def test_shapes_that_keras_adapts_pass(shape, model):
    check_inputs(model, X.reshape(shape))
    one = keras.Sequential([keras.Input((1,)), L.Dense(2)])
    check_inputs(one, X[:, 0])


def test_inputs_by_name_and_of_another_number():
    inputs = {name: keras.Input((8,), name=name) for name in ("a", "b")}
    model = keras.Model(inputs, L.Dense(2)(L.Concatenate()([*inputs.values()])))
    check_inputs(model, {"b": X, "a": X, "unused": Y})
    check_inputs(model, [X, X])
    for x, received in (
        ({"a": X}, r"a dict with the keys \['a'\]"),
        ([X], "1 arrays"),
    ):
        with pytest.raises(
            ValueError,
            match=rf"one array for each input .*Received: {received}",
        ):
            check_inputs(model, x)


def test_text_and_objects_are_no_numbers(model):
    with pytest.raises(
        ValueError, match=r"input `x` must be numbers.*inputs? of strings"
    ):
        check_inputs(model, np.full((20, 8), "a"))
    with pytest.raises(
        ValueError,
        match=r"arrays of numbers. Received: an input of dtype object",
    ):
        check_inputs(model, np.full((20, 8), None))
    for wrong, received in (
        (np.array(["cat", "dog"]), "dtype <U3"),
        (np.array([0.0, np.nan, 1.0]), "row 1"),
    ):
        with pytest.raises(ValueError, match=f"labels of `data`.*{received}"):
            check_targets(wrong)
    with pytest.raises(
        ValueError, match="sample weights of `data` must be finite"
    ):
        kso.saliency.snip(model, 0.5, (X, Y, np.full(64, np.inf)))


def test_sparse_arrays_are_refused(model):
    from scipy import sparse

    with pytest.raises(
        ValueError, match=r"dense arrays.*`\.toarray\(\)`.*type csr_matrix"
    ):
        kso.prune(model, 0.5, score="obs", data=sparse.csr_matrix(X))
    with pytest.raises(ValueError, match=r"dense arrays"):
        first_batches([(sparse.csr_matrix(X), Y)])


def test_equal_rows_and_sample_weights_are_warned_of(model):
    equal = np.ones((64, 8), "float32")
    with pytest.warns(
        UserWarning, match="All rows of `data` are equal.*64 equal rows"
    ) as told:
        kso.saliency.snip(model, 0.5, (equal, Y))
    assert told[0].filename == __file__
    with pytest.warns(UserWarning, match="Sample weights are not used here"):
        kso.prune(model, 0.5, score="obs", data=(X, Y, np.ones(64)))


def endless():
    while True:
        yield X, Y


def test_endless_data_are_read_with_a_bound(monkeypatch):
    monkeypatch.setattr(_data, "MOST_ROWS", 300)
    with pytest.warns(
        UserWarning, match=r"may be endless.*Received: 320 rows"
    ) as told:
        x, y, _ = all_rows(endless())
    assert told[0].filename == __file__
    assert x.shape == (320, 8)
    assert y.shape == (320,)
    with pytest.warns(UserWarning, match="may be endless"):
        assert len(first_batches(endless, batches=None)) == 5
    monkeypatch.setattr(_data, "_MOST_BYTES", 5000)
    with pytest.warns(UserWarning, match="Received: 128 rows"):
        all_rows(endless())
    with pytest.warns(UserWarning, match="Received: 64 rows"):
        all_rows(endless(), seconds=0.0)
    # Arrays are read whole, without a warning.
    assert len(all_rows((X, Y))[0]) == 64


def test_rows_of_several_lengths_are_refused():
    with pytest.raises(ValueError, match=r"rows of one shape: pad"):
        all_rows([(X[:, :3], Y), (X[:, :5], Y)])
