"""A run that is killed at any step and resumed from its checkpoint equals one that was not."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import SET, RigL, TargetDensity, UpdateMasks
from tests.callbacks.runs import same, state
from tests.helpers import array, classifier_loss, jit, part_of_a_run

L = keras.layers
STEPS, FREQUENCY, BATCH = 8, 3, 4


def network(storage):
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    layers = [
        L.Conv2D(4, 3),
        L.BatchNormalization(),
        L.ReLU(),
        L.Flatten(),
        L.Dense(3),
    ]
    dense = keras.Sequential([keras.Input((5, 5, 2)), *layers])
    if storage in LEARNT:
        model = kso.parametrize(dense, LEARNT[storage]())
    else:
        model = kso.sparsify(dense, 0.4, seed=0, storage=storage)
    optimizer = keras.optimizers.AdamW(
        1e-2, weight_decay=0.05, use_ema=True, ema_momentum=0.9
    )
    model.compile(optimizer, classifier_loss(), jit_compile=jit())
    return model


RAMP = kso.schedules.Cubic(0.2, begin_step=1, end_step=7, frequency=2)
LEARNT = {
    "magnitude": lambda: kso.MagnitudeMask(RAMP),
    "top k": lambda: kso.parametrizations.StraightThroughTopK(0.2, frequency=3),
    "soft": lambda: kso.SoftThreshold(s_init=-3.0, weight_decay=1e-3),
}


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH, 5, 5, 2)).astype("float32")
    return x, rng.integers(0, 3, len(x))


MOVES = {"frequency": FREQUENCY, "fraction": 0.8, "end_step": 100}
CALLBACKS = {
    "SET": lambda: SET(**MOVES),
    "RigL": lambda: RigL(data(), 8, **MOVES),
    "UpdateMasks": UpdateMasks,
    "TargetDensity": lambda: TargetDensity(0.2, RAMP),
}


def train(model, kind, after, callbacks=()):
    """The steps after the first `after` of the one epoch that there is."""
    x, y = (part[after * BATCH :] for part in data())
    # A new callback each time, as in a new process.
    callbacks = [CALLBACKS[kind](), *callbacks]
    with part_of_a_run():
        model.fit(
            x,
            y,
            batch_size=BATCH,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
        )


RUNS = [
    pytest.param(("SET", "masked"), id="SET-masked"),
    pytest.param(("RigL", "masked"), id="RigL-masked", marks=pytest.mark.slow),
    pytest.param(("RigL", "compact"), id="RigL-compact"),
    pytest.param(("TargetDensity", "soft"), id="soft"),
    pytest.param(
        ("UpdateMasks", "magnitude"), id="magnitude", marks=pytest.mark.slow
    ),
    pytest.param(("UpdateMasks", "top k"), id="top k", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=RUNS)
def whole(request, tmp_path_factory):
    """A run that was not interrupted, saved after each of its steps."""
    kind, storage = request.param
    folder = tmp_path_factory.mktemp(kind)
    model = network(storage)
    save = keras.callbacks.ModelCheckpoint(
        folder / "{batch}.keras", save_freq=1
    )
    train(model, kind, 0, [save])
    return (kind, storage), folder, state(model)


@pytest.mark.core
@pytest.mark.parametrize(
    "killed", [2, 3, 4]
)  # before, at and after the first update
def test_loaded_from_a_file(whole, killed):
    (kind, _), folder, expected = whole
    model = keras.models.load_model(folder / f"{killed}.keras")
    assert int(array(model.optimizer.iterations)) == killed
    train(model, kind, killed)
    assert same(state(model), expected)


@pytest.mark.core
def test_at_any_step(whole):
    (kind, storage), folder, expected = whole
    model = network(storage)
    train(model, kind, STEPS - 1)  # makes the variables of the optimizer
    # RigL compiles its gradient in each fit; the steps left out are those of the test above.
    for killed in range(1, STEPS) if kind == "SET" else (1, 5, 6, 7):
        model.load_weights(folder / f"{killed}.keras")
        assert int(array(model.optimizer.iterations)) == killed
        train(model, kind, killed)
        assert same(state(model), expected), killed
