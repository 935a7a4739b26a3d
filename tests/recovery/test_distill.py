"""`distill`: a student that answers as its teacher, on rows without labels."""

import itertools
import types

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.recovery import LOGITS, distill, with_features
from tests.helpers import assert_same, slow_on_tensorflow


@pytest.fixture(scope="module")
def teacher():
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(32, "relu", name="hidden"),
        keras.layers.Dense(3, name="head"),
    ]
    return keras.Sequential(
        [keras.Input((8,)), *layers, keras.layers.Softmax()]
    )


ROWS = np.random.default_rng(0).normal(size=(512, 8)).astype("float32")
OTHERS = np.random.default_rng(1).normal(size=(256, 8)).astype("float32")


def agreement(one, other):
    outputs = [model.predict(OTHERS, verbose=0) for model in (one, other)]
    return float(np.mean(outputs[0].argmax(-1) == outputs[1].argmax(-1)))


@pytest.mark.core
def test_gradual_pruning_recovers_more_than_pruning_at_once(teacher):
    before = [np.array(value) for value in teacher.get_weights()]
    at_once = kso.prune(teacher, 0.2, budget="uniform")
    gradual = kso.parametrize(
        teacher, kso.MagnitudeMask(kso.schedules.Cubic(0.2))
    )
    distill(gradual, teacher, ROWS, epochs=8, verbose=0)
    assert kso.report(gradual).density == pytest.approx(0.2, abs=0.01)
    assert agreement(gradual, teacher) > agreement(at_once, teacher) + 0.05
    for value, kept in zip(teacher.get_weights(), before, strict=True):
        np.testing.assert_array_equal(value, kept)


def test_masks_that_stay_keep_their_zeros(teacher):
    student = kso.prune(teacher, 0.3, budget="uniform")
    masks = {w.path: w.mask for w in kso.prunable_weights(student)}
    first = distill(
        student, teacher, (ROWS, np.zeros(len(ROWS))), epochs=4, verbose=0
    )
    assert first.history["loss"][-1] < 0.9 * first.history["loss"][0]
    for weight in kso.prunable_weights(student):
        np.testing.assert_array_equal(weight.mask, masks[weight.path])


@slow_on_tensorflow
@pytest.mark.core
def test_a_seed_decides_the_order_of_the_rows(teacher):
    def trained(seed):
        student = kso.prune(teacher, 0.3, budget="uniform")
        distill(student, teacher, ROWS[:64], epochs=1, seed=seed, verbose=0)
        return kso.prunable_weights(student)[0].value

    np.testing.assert_array_equal(trained(1), trained(1))
    assert np.any(trained(1) != trained(2))


def test_features_are_the_inputs_of_the_last_layers():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(6, "relu", name="body")(inputs)
    one = keras.layers.Activation("softmax")(
        keras.layers.Dense(2, name="class")(x)
    )
    model = keras.Model(
        inputs, {"class": one, "box": keras.layers.Dense(4, name="box")(x)}
    )
    assert [tuple(t.shape) for t in with_features(model).outputs] == [
        (None, 4),
        (None, 2),
        (None, 6),
    ]


def test_masks_are_no_features():
    words = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(20, 4, mask_zero=True)(words)
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Dense(5)(x))
    features = with_features(keras.Model(words, x * 2.0)).outputs
    assert [(tuple(one.shape), one.dtype) for one in features] == [
        ((None, 5), "float32"),
        ((None, 6, 4), "float32"),
    ]


def test_probabilities_become_logits():
    logits = np.array([[2.0, -1.0, 0.5], [0.0, 3.0, -4.0]], "float32")
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    found = keras.ops.convert_to_numpy(LOGITS["softmax"](softmax))
    np.testing.assert_allclose(
        found, logits - logits.mean(-1, keepdims=True), atol=1e-5
    )
    sigmoid = 1 / (1 + np.exp(-logits[:, :1]))
    found = keras.ops.convert_to_numpy(LOGITS["sigmoid"](sigmoid))
    np.testing.assert_allclose(found, logits[:, :1], atol=1e-4)
    assert LOGITS["values"](logits) is logits


def test_each_term_of_the_loss_is_divided_by_the_variance_of_the_teacher():
    """Features and outputs of any scale weigh the same."""
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(4, name="hidden")(inputs)
    scaled = keras.layers.Rescaling(100.0, name="scaled")(hidden)
    dense = keras.Model(inputs, keras.layers.Dense(3, name="head")(scaled))
    student = keras.models.clone_model(dense)
    student.set_weights([0.5 * value for value in dense.get_weights()])
    terms = []
    for layer in ("head", "scaled"):
        ends = [
            keras.Model(m.inputs, m.get_layer(layer).output)
            for m in (dense, student)
        ]
        wanted, given = (end.predict(ROWS, verbose=0) for end in ends)
        terms.append(np.mean((wanted - given) ** 2) / np.var(wanted))
    options = {
        "epochs": 1,
        "batch_size": len(ROWS),
        "learning_rate": 1e-9,
        "verbose": 0,
    }
    (loss,) = distill(student, dense, ROWS, **options).history["loss"]
    assert loss == pytest.approx(sum(terms), rel=1e-3)


def test_outputs_of_other_shapes_are_refused(teacher):
    other = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(5, "softmax")]
    )
    with pytest.raises(ValueError, match="outputs of the shapes of `teacher`"):
        distill(other, teacher, ROWS, verbose=0)


def test_a_student_may_have_fewer_features(teacher):
    layers = [
        keras.layers.Dense(16, "relu"),
        keras.layers.Dense(3),
        keras.layers.Softmax(),
    ]
    student = keras.Sequential([keras.Input((8,)), *layers])
    before = agreement(student, teacher)
    distill(student, teacher, ROWS, epochs=20, learning_rate=1e-2, verbose=0)
    assert agreement(student, teacher) > max(before, 0.85)


class Pair(keras.Model):
    """A subclassed model with a dict of outputs."""

    def __init__(self):
        super().__init__()
        self.body, self.head = (
            keras.layers.Dense(8, "tanh"),
            keras.layers.Dense(2),
        )

    def call(self, x):
        x = self.body(x)
        return {"sum": self.head(x), "body": x}


def test_a_subclassed_model_with_several_outputs():
    dense = Pair()
    dense(ROWS[:2])
    student = kso.prune(dense, 0.5)
    loss = distill(student, dense, ROWS, epochs=4, verbose=0).history["loss"]
    assert loss[-1] < 0.9 * loss[0]


def test_a_loss_that_is_not_finite_is_refused_and_the_student_stays():
    dense = Pair()
    dense(ROWS[:2])
    student = kso.prune(dense, 0.5)
    before = student.get_weights()
    with pytest.raises(
        ValueError, match="The loss must stay finite: lower `learning_rate`"
    ):
        distill(student, dense, ROWS, learning_rate=1e30, verbose=0)
    assert_same(before, student.get_weights())


@pytest.mark.core
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("storage", ["scheduled", "compact"])
def test_an_interrupt_leaves_the_student_as_it_was(
    teacher, monkeypatch, storage, error
):
    """On JAX, where `fit` frees the arrays of its model, too."""
    if storage == "compact":
        student = kso.prune(teacher, 0.3, storage="compact")
    else:
        student = kso.parametrize(
            teacher, kso.MagnitudeMask(kso.schedules.Cubic(0.3))
        )
    before = [np.array(weight) for weight in student.get_weights()]
    outputs = student.predict(OTHERS, verbose=0)
    ended = keras.callbacks.History.on_train_batch_end

    def interrupted(history, batch, logs=None):
        if batch == 6:
            raise error("half way")
        ended(history, batch, logs)

    monkeypatch.setattr(
        keras.callbacks.History, "on_train_batch_end", interrupted
    )
    with pytest.raises(error, match="half way"):
        distill(student, teacher, ROWS, epochs=2, verbose=0)
    assert_same(before, student.get_weights())
    np.testing.assert_array_equal(student.predict(OTHERS, verbose=0), outputs)
    monkeypatch.undo()
    distill(student, teacher, ROWS[:64], epochs=1, verbose=0)


def regressor(activation, loss):
    """A model with outputs between 0 and 1, which are values whatever they look like."""
    keras.utils.set_random_seed(0)
    head = keras.layers.Dense(
        1, activation, bias_initializer=keras.initializers.Constant(0.5)
    )
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), head])
    model.layers[-1].kernel.assign(0.01 * np.ones((4, 1)))
    model.compile("sgd", loss)
    return model


@pytest.mark.core
@pytest.mark.parametrize(
    ("activation", "loss", "outputs", "name"),
    [
        (None, "mse", None, "values"),
        ("sigmoid", "mse", None, "values"),
        ("sigmoid", "binary_crossentropy", None, "sigmoid"),
        ("sigmoid", None, None, "sigmoid"),
        ("sigmoid", "binary_crossentropy", "values", "values"),
        ("sigmoid", "mse", ["sigmoid"], "sigmoid"),
    ],
)
def test_outputs_between_0_and_1_are_probabilities_if_graph_and_loss_say_so(
    activation, loss, outputs, name, monkeypatch
):
    model = regressor(activation, loss)
    used = []
    for key, function in dict(LOGITS).items():

        def noting(values, key=key, function=function):
            used.append(key)
            return function(values)

        monkeypatch.setitem(LOGITS, key, noting)
    student = kso.prune(model, 0.5, budget="uniform")
    distill(student, model, ROWS[:64], epochs=1, outputs=outputs, verbose=0)
    assert set(used) == {name}


def test_outputs_of_no_kind_are_refused(teacher):
    for outputs in ("logits", ["softmax", "softmax"]):
        with pytest.raises(
            ValueError, match=r"`outputs` must be one of .*Received: outputs="
        ):
            distill(
                kso.strip(teacher), teacher, ROWS, outputs=outputs, verbose=0
            )


def test_rows_that_the_models_cannot_take_are_refused_before_training(teacher):
    student = kso.prune(teacher, 0.5)
    before = student.get_weights()
    wrong = ROWS.copy()
    wrong[7, 3] = np.nan
    for rows, message in (
        (wrong, "must be finite.*NaN or infinity in row 7"),
        (ROWS[:, :5], r"must have the shape \(rows, 8\)"),
        (np.full((20, 8), "a"), "inputs that are strings"),
    ):
        with pytest.raises(ValueError, match=message):
            distill(student, teacher, rows, verbose=0)
    assert_same(before, student.get_weights())
    ones = np.ones((40, 8), "float32")
    for few, received in ((ones, "1 different among 40"), (ROWS[:3], "3 diff")):
        with pytest.warns(UserWarning, match=f"Training needs .*{received}"):
            distill(student, teacher, few, epochs=1, verbose=0)
    weighted = ROWS[:64], np.zeros(64), np.ones(64)
    with pytest.warns(UserWarning, match="Sample weights are not used here"):
        distill(student, teacher, weighted, epochs=1, verbose=0)


@keras.saving.register_keras_serializable(package="tests_of_distill")
class DropPath(keras.layers.Layer):
    """Stochastic depth: drops a branch in half of the training steps."""

    def __init__(self, **config):
        super().__init__(**config)
        self.seeds = keras.random.SeedGenerator(0)

    def call(self, inputs, training=False):
        if not training:
            return inputs
        draw = keras.random.uniform(
            (keras.ops.shape(inputs)[0], 1), seed=self.seeds
        )
        return inputs * keras.ops.cast(draw < 0.5, inputs.dtype)


def noisy_network():
    """Noise of all kinds: in layers, in recurrent cells, in attention and in a user's layer."""
    inputs = keras.Input((6, 8))
    x = keras.layers.GaussianNoise(0.5)(inputs)
    x = keras.layers.SpatialDropout1D(0.5)(x)
    x = keras.layers.GRU(8, return_sequences=True, dropout=0.5)(x)
    x = keras.layers.Reshape((6, 8, 1))(x)
    x = keras.layers.ConvLSTM1D(
        2, 3, return_sequences=True, recurrent_dropout=0.25
    )(x)
    x = keras.layers.Reshape((6, 12))(x)
    x = keras.layers.MultiHeadAttention(2, 4, dropout=0.5)(x, x)
    x = keras.layers.LSTM(8, recurrent_dropout=0.5)(x)
    x = DropPath()(x)
    x = keras.layers.Dropout(0.5)(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


def copied(model):
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    return copy


@pytest.mark.parametrize(
    "student_of",
    [
        copied,
        lambda model: kso.prune(model, 1.0),  # every kernel in a wrapper
    ],
    ids=["plain", "wrapped"],
)
def test_students_are_trained_without_noise(student_of):
    """birdnet-stm32, with dropout in front of its head, lost 46 points of closeness by training."""
    keras.utils.set_random_seed(0)
    noisy = noisy_network()
    student = student_of(noisy)
    rows = np.random.default_rng(0).normal(size=(64, 6, 8)).astype("float32")
    history = distill(
        student, noisy, rows, epochs=1, learning_rate=1e-9, verbose=0
    )
    assert history.history["loss"][0] < 1e-6
    # Afterwards it is noisy again.
    first = np.array(student(rows[:8], training=True))
    second = np.array(student(rows[:8], training=True))
    assert np.abs(first - second).max() > 1e-3
    cells = [
        layer.cell
        for layer, _ in walk(student, "")
        if isinstance(layer, keras.layers.RNN)
    ]
    assert [(cell.dropout, cell.recurrent_dropout) for cell in cells] == [
        (0.5, 0.0),
        (0.0, 0.25),
        (0.0, 0.5),
    ]


def narrow_student(dense):
    return kso.narrow(dense, 0.5, data=ROWS)


def mean_loss(student, dense):
    answers = [model.predict(OTHERS, verbose=0) for model in (student, dense)]
    logits = [np.log(answer) for answer in answers]
    centered = [logit - logit.mean(-1, keepdims=True) for logit in logits]
    return float(np.mean((centered[0] - centered[1]) ** 2))


def beside_held_rows(teacher, **options):
    """A narrow student's loss before training and after it, and the history."""
    student = narrow_student(teacher)
    before = mean_loss(student, teacher)
    history = distill(
        student, teacher, ROWS, validation_split=0.1, verbose=0, **options
    )
    return before, mean_loss(student, teacher), history


@pytest.mark.core
def test_held_out_rows_protect_from_a_rate_that_is_too_high(teacher):
    """Training made MobileNet, O-Net and birdnet-stm32 worse than they were."""
    before, after, history = beside_held_rows(
        teacher, epochs=4, learning_rate=0.5
    )
    assert after < 0.9 * before
    losses = history.history["val_loss"]
    assert losses[0] > 2.0 * min(losses)
    # The rate falls to less than a quarter after a stage that did harm.
    rates = history.history["learning_rate"]
    assert rates[2] < 0.3 * rates[1]
    best = losses.index(min(losses))
    improved = history.history["improved"]
    assert improved[best] == 1.0
    assert not any(improved[best + 1 :])


@pytest.mark.parametrize("rate", [1e4, 1e30])
def test_training_that_helps_at_no_rate_leaves_the_student_and_warns(
    teacher, rate
):
    student = narrow_student(teacher)
    before = student.get_weights()
    with pytest.warns(
        UserWarning, match="No rate lowered the loss on held-out rows"
    ):
        history = distill(
            student,
            teacher,
            ROWS,
            epochs=2,
            learning_rate=rate,
            validation_split=0.1,
            verbose=0,
        )
    assert_same(before, student.get_weights())
    assert len(history.epoch) == 5  # it ended early
    assert history.history["improved"] == [0.0] * 5


@pytest.mark.filterwarnings("ignore:No rate lowered")
@pytest.mark.filterwarnings("ignore:Training needs at least 16")
def test_one_row_may_train_and_another_one_judge(teacher):
    student = narrow_student(teacher)
    history = distill(
        student,
        teacher,
        ROWS[:2],
        epochs=6,
        validation_split=0.5,
        learning_rate=1e-3,
        verbose=0,
    )
    assert len(history.epoch) == 6  # as many as there are steps
    with pytest.raises(ValueError, match=r"at least two rows.*1 rows"):
        distill(student, teacher, ROWS[:1], validation_split=0.5, verbose=0)


def test_training_ends_in_time_with_a_rate_that_falls(teacher, monkeypatch):
    """Training of magika took 285 seconds where 110 were planned."""
    seconds = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: float(next(seconds)))
    for module in ("_distill", "_backtracking"):
        monkeypatch.setattr(f"keras_sparse_ortho.recovery.{module}.time", clock)
    before, after, history = beside_held_rows(
        teacher, epochs=24, minutes=12.5 / 60.0
    )
    assert next(seconds) <= 13
    assert len(history.epoch) == 5  # two calls of the clock for each
    assert after < 0.9 * before
    rates = history.history["learning_rate"]
    assert rates[-1] < 0.2 * max(rates)


@pytest.mark.filterwarnings("ignore:No rate lowered")
def test_a_time_that_is_over_allows_one_stage(teacher):
    _, _, history = beside_held_rows(teacher, epochs=12, minutes=1e-6)
    assert len(history.epoch) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 0, "validation_split": 0.1}, "above 0.*minutes=0"),
        ({"minutes": "a", "validation_split": 0.1}, "finite number"),
        ({"minutes": 2.0}, "needs a `validation_split`.*minutes=2.0 and"),
    ],
)
def test_minutes_are_a_number_beside_held_out_rows(teacher, options, message):
    student = narrow_student(teacher)
    with pytest.raises(ValueError, match=message):
        distill(student, teacher, ROWS, verbose=0, **options)


def test_held_out_rows_need_masks_that_stay(teacher):
    student = kso.parametrize(
        teacher, kso.MagnitudeMask(kso.schedules.Cubic(0.2))
    )
    with pytest.raises(ValueError, match="needs masks that stay"):
        distill(student, teacher, ROWS, validation_split=0.1, verbose=0)
    for share in (-0.1, 1.0, "a"):
        with pytest.raises(ValueError, match="number from 0 to less than 1"):
            distill(student, teacher, ROWS, validation_split=share, verbose=0)


def test_a_rate_that_is_none_and_one_model_in_two_roles_are_refused(teacher):
    student = kso.prune(teacher, 0.5)
    for rate in (0, -3e-3):
        with pytest.raises(ValueError, match="must be above 0"):
            distill(student, teacher, ROWS, learning_rate=rate, verbose=0)
    with pytest.raises(ValueError, match="must be two models"):
        distill(teacher, teacher, ROWS, verbose=0)
    unbuilt = keras.Sequential([keras.layers.Dense(3, "softmax")])
    with pytest.raises(kso.errors.NotPrunableError, match="must be built"):
        distill(unbuilt, teacher, ROWS, verbose=0)
    assert not unbuilt.built


def test_statistics_stay_beside_held_out_rows():
    """Moving statistics lag behind: good stages looked harmful, and were undone."""
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(32),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Dense(3),
    ]
    dense = keras.Sequential([keras.Input((8,)), *layers])
    dense.layers[1].moving_mean.assign(np.linspace(-1.0, 1.0, 32))
    student = narrow_student(dense)
    norm = student.layers[1]
    statistics = [np.array(norm.moving_mean), np.array(norm.moving_variance)]
    scale = np.array(norm.gamma)
    history = distill(
        student, dense, ROWS, epochs=6, validation_split=0.1, verbose=0
    )
    after = [np.array(norm.moving_mean), np.array(norm.moving_variance)]
    assert_same(statistics, after)
    assert np.any(np.array(norm.gamma) != scale)
    assert norm.trainable
    losses = history.history["val_loss"]
    assert losses[-1] < losses[0]
