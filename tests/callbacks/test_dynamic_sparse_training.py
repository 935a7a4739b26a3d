"""SET and RigL: exact counts, zero slots, where entries grow, when updates happen, refusals."""

import contextlib

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho._keras_internals import optimizer_slots
from keras_sparse_ortho.callbacks import SET, RigL
from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError
from keras_sparse_ortho.parametrizations import MagnitudeMask
from tests.helpers import (
    array,
    classifier_loss,
    gradients,
    jit,
    on_two_devices,
)

L = keras.layers


def mlp(density=0.3, seed=0):
    layers = [L.Dense(12, activation="tanh", name="a"), L.Dense(3, name="b")]
    return kso.sparsify(keras.Sequential([keras.Input((8,)), *layers]), density, seed=seed)


def every_kind():
    """An embedding, a recurrent layer, a convolution, a depthwise one and a shared layer."""
    tokens, image = keras.Input((5,), dtype="int32"), keras.Input((6, 6, 2))
    x = L.SimpleRNN(4, name="recurrent")(L.Embedding(30, 6, name="embedding")(tokens))
    y = L.DepthwiseConv2D(3, name="depthwise")(L.Conv2D(8, 3, name="conv")(image))
    y = L.Dense(4, name="fit")(L.Flatten()(y))
    shared = L.Dense(4, activation="tanh", name="shared")
    head = L.Dense(3, name="head")(L.Concatenate()([shared(x), shared(y)]))
    model = keras.Model([tokens, image], head)
    return kso.sparsify(model, 0.4, "uniform", initializer="random_sparse", seed=0)


def data(count=16):
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 8)).astype("float32"), rng.integers(0, 3, count)


def every_data(count=16):
    rng = np.random.default_rng(0)
    x = [rng.integers(0, 30, (count, 5)), rng.normal(size=(count, 6, 6, 2)).astype("float32")]
    return x, rng.integers(0, 3, count)


def compiled(model, optimizer=None, **kwargs):
    # Without XLA on TensorFlow where it is not the point: compiling takes most of the time here.
    kwargs = {"jit_compile": keras.backend.backend() == "jax", **kwargs}
    model.compile(optimizer or keras.optimizers.Adam(1e-2), classifier_loss(), **kwargs)
    return model


def callback(kind, batches, **kwargs):
    return SET(**kwargs) if kind == "SET" else RigL(batches, 8, **kwargs)


def begin(callback, model):
    """Attaches a callback as `fit` does."""
    callback.set_model(model)
    callback.set_params({"epochs": 1, "steps": 10})
    callback.on_train_begin()
    return callback


def live_counts(model):
    return {w.path: w.live for w in kso.prunable_weights(model)}


def check_masks(model):
    for weight in kso.prunable_weights(model):
        assert not weight.raw_value()[~weight.parametrization.mask_value()].any()


@pytest.mark.core
@pytest.mark.parametrize("kind", ["SET", "RigL"])
def test_training_of_every_kind_of_layer(kind):
    model = compiled(every_kind(), jit_compile=jit())
    x, y = every_data()
    before = live_counts(model)
    weights = kso.prunable_weights(model)
    start = [w.parametrization.mask_value() for w in weights]
    moving = callback(kind, (x, y), frequency=2, end_step=40, fraction=0.5)
    history = model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[moving]).history
    assert live_counts(model) == before
    check_masks(model)
    for weight, mask in zip(weights, start, strict=True):
        assert (weight.parametrization.mask_value() != mask).any(), weight.path
    assert len(history["moved"]) == 3
    assert all(0 < moved < 1 for moved in history["moved"])
    assert np.isfinite(history["loss"]).all()


@pytest.mark.core
@pytest.mark.parametrize("kind", ["SET", "RigL"])
def test_compact_storage_moves_the_same_entries(kind):
    x, y = data()
    losses, models = [], []
    for storage in ("masked", "compact"):
        keras.utils.set_random_seed(1)
        layers = [L.Dense(12, kernel_regularizer="l2", name="a"), L.Dense(3, name="b")]
        dense = keras.Sequential([keras.Input((8,)), *layers])
        model = kso.sparsify(dense, 0.3, seed=0, storage=storage)
        start = [w.parametrization.mask_value() for w in kso.prunable_weights(model)]
        compiled(model, keras.optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=5))
        moving = callback(kind, (x, y), frequency=2, end_step=40, fraction=0.5)
        options = {"batch_size": 4, "epochs": 3, "shuffle": False, "verbose": 0}
        losses.append(model.fit(x, y, callbacks=[moving], **options).history["loss"])
        models.append(model)
    np.testing.assert_allclose(*losses, rtol=1e-5)
    masked, compact = models
    pairs = zip(kso.prunable_weights(masked), kso.prunable_weights(compact), strict=True)
    for (theirs, ours), before in zip(pairs, start, strict=True):
        mask = ours.parametrization.mask_value()
        np.testing.assert_array_equal(mask, theirs.parametrization.mask_value())
        assert (mask != before).any()
        assert (np.diff(array(ours.parametrization.indices)) > 0).all()
        np.testing.assert_allclose(ours.value, theirs.value, atol=1e-6)
        slots = [
            optimizer_slots(model.optimizer, weight.variable)
            for model, weight in ((masked, theirs), (compact, ours))
        ]
        assert len(slots[0]) == 3
        for (dense_slot, *_), (live_slot, *_) in zip(*slots, strict=True):
            np.testing.assert_allclose(array(live_slot), array(dense_slot)[mask], atol=1e-6)


@pytest.mark.core
@pytest.mark.parametrize("algorithm", ["adam", "sgd", "ema", "rmsprop", "scaled"])
def test_slots_and_weights_of_changed_entries_are_zero(algorithm):
    optimizer = {
        "adam": lambda: keras.optimizers.Adam(1e-2, amsgrad=True),
        "sgd": lambda: keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True),
        "ema": lambda: keras.optimizers.SGD(1e-2, use_ema=True),
        "rmsprop": lambda: keras.optimizers.RMSprop(1e-2, momentum=0.9, centered=True),
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2)),
    }[algorithm]()
    model = compiled(mlp(), optimizer)
    x, y = data()
    model.fit(x, y, epochs=3, verbose=0)
    weights = kso.prunable_weights(model)
    before = [w.parametrization.mask_value() for w in weights]
    raw = [w.raw_value() for w in weights]
    slots = [[array(s) for s, *_ in optimizer_slots(optimizer, w.variable)] for w in weights]
    moving = begin(SET(fraction=0.8, end_step=1000), model)
    assert moving.move(1) > 5
    for weight, mask, value, values in zip(weights, before, raw, slots, strict=True):
        now = weight.parametrization.mask_value()
        assert (now != mask).any()
        assert not weight.raw_value()[now != mask].any()
        np.testing.assert_array_equal(weight.raw_value()[now & mask], value[now & mask])
        assert values
        assert any(v[mask & ~now].any() for v in values)  # there was something to forget
        found = optimizer_slots(optimizer, weight.variable)
        for (slot, *_), old in zip(found, values, strict=True):
            assert not array(slot)[now != mask].any()
            np.testing.assert_array_equal(array(slot)[now == mask], old[now == mask])


@pytest.mark.core
def test_rigl_grows_where_the_dense_gradient_is_largest():
    model = compiled(mlp())
    x, y = data()
    model.fit(x, y, epochs=2, verbose=0)
    # The dense gradient without any of our machinery: that of a plain model of the same weights.
    plain = keras.Sequential(
        [keras.Input((8,)), L.Dense(12, activation="tanh"), L.Dense(3)], name="plain"
    )
    plain.set_weights(kso.strip(model).get_weights())
    dense = [g for g in gradients(plain, x, y, classifier_loss()) if g.ndim == 2]

    weights = kso.prunable_weights(model)
    before = [w.parametrization.mask_value() for w in weights]
    raw = [w.raw_value() for w in weights]
    rigl = begin(RigL((x, y), batch_size=len(x), fraction=0.6, frequency=1, end_step=100), model)
    assert rigl.move(1) > 3
    for weight, mask, value, gradient in zip(weights, before, raw, dense, strict=True):
        live = np.count_nonzero(mask)
        count = int(0.3 * (1 + np.cos(np.pi / 100)) * live)
        order = np.argsort(np.abs(value), axis=None)
        dropped = order[mask.reshape(-1)[order]][:count]
        kept = mask.copy()
        kept.reshape(-1)[dropped] = False
        candidates = np.flatnonzero(~kept)
        strongest = np.argsort(-np.abs(gradient).reshape(-1)[candidates])[:count]
        expected = kept.copy()
        expected.reshape(-1)[candidates[strongest]] = True
        np.testing.assert_array_equal(weight.parametrization.mask_value(), expected)


@pytest.mark.core
def test_set_draws_from_all_dead_entries():
    model = compiled(kso.sparsify(keras.Sequential([keras.Input((8,)), L.Dense(8)]), 0.25))
    [weight] = kso.prunable_weights(model)
    first = weight.parametrization.mask_value()
    grown = np.zeros(weight.shape, int)
    moving = begin(SET(fraction=1.0, end_step=10_000), model)
    for step in range(1, 61):
        weight.parametrization.assign_mask(first)
        weight.variable.assign(np.ones(weight.shape) * first)
        moving.move(step)
        grown += weight.parametrization.mask_value() & ~first
    assert not grown[first].any()
    # 15 of 48 + 15 candidates each time: 14.3 on average, and 3.3 standard deviations of it.
    assert grown[~first].min() > 2
    assert abs(grown[~first].mean() - 60 * 15 / 63) < 1.5
    # The same step, seed and weight make the same choice; another seed another.
    choices = []
    for seed in (0, 0, 1):
        weight.parametrization.assign_mask(first)
        weight.variable.assign(np.ones(weight.shape) * first)
        begin(SET(fraction=1.0, end_step=10_000, seed=seed), model).move(5)
        choices.append(weight.parametrization.mask_value())
    np.testing.assert_array_equal(choices[0], choices[1])
    assert (choices[0] != choices[2]).any()


@pytest.mark.core
@pytest.mark.parametrize("kind", ["SET", "RigL"])
def test_nothing_is_compiled_again(kind):
    traces = []

    class Counted(L.Layer):
        def call(self, inputs, training=None):
            if training:
                traces.append(training)
            return inputs

    dense = keras.Sequential([keras.Input((8,)), L.Dense(12), Counted(), L.Dense(3)])
    model = compiled(kso.sparsify(dense, 0.3, seed=0), jit_compile=jit())
    x, y = data()
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    before = len(traces)
    moving = callback(kind, (x, y), frequency=1, end_step=1000)
    model.fit(x, y, batch_size=8, epochs=10, verbose=0, callbacks=[moving])
    compiles = keras.backend.backend() != "torch"
    # RigL's gradient is traced once; torch runs 20 steps (and 20 gradients).
    added = {"SET": 0, "RigL": 1} if compiles else {"SET": 20, "RigL": 40}
    assert len(traces) - before == added[kind]
    # A second `fit` takes what the first one compiled.
    before = len(traces)
    model.fit(x, y, batch_size=8, epochs=10, verbose=0, callbacks=[moving])
    assert len(traces) - before == (0 if compiles else added[kind])


@pytest.mark.core
def test_rigl_follows_a_new_loss():
    model = compiled(mlp(), keras.optimizers.SGD(0.0))
    x, y = data()
    rigl = RigL((x, y), len(x), frequency=1000, end_step=10**6)
    weights = kso.prunable_weights(model)

    def scores():
        model.fit(x, y, batch_size=8, verbose=0, callbacks=[rigl])
        rigl.sync()
        return np.concatenate([np.ravel(s) for s in rigl.growth_scores(weights, 1000)])

    first = scores()
    np.testing.assert_array_equal(scores(), first)
    loss = classifier_loss()
    model.compile(keras.optimizers.SGD(0.0), lambda y, p: 2 * loss(y, p), jit_compile=jit())
    np.testing.assert_allclose(scores(), 2 * first, rtol=1e-4, atol=1e-7)


class Steps(SET):
    """Notes at which steps `fit` asks for an update."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps = []

    def move(self, step):
        self.steps.append(step)
        return super().move(step)


@pytest.mark.core
def test_when_updates_happen():
    model = compiled(mlp())
    x, y = data(20)
    options = {"batch_size": 4, "verbose": 0}  # five steps an epoch
    moving = Steps(frequency=3)
    model.fit(x, y, epochs=4, callbacks=[moving], **options)
    assert moving.steps == [3, 6, 9, 12]  # until 3/4 of 20 steps, 15
    assert moving.drop_fraction(0) == 0.3
    assert moving.drop_fraction(5) == pytest.approx(0.15 * (1 + np.cos(np.pi / 3)))
    assert moving.drop_fraction(15) == 0
    # Steps are those of the optimizer, whatever was before this fit.
    moving = Steps(frequency=10, end_step=100)
    model.fit(x, y, epochs=4, callbacks=[moving], **options)
    assert moving.steps == [20, 30]
    moving = Steps(frequency=7, end_step=50)
    model.fit(x, y, epochs=4, callbacks=[moving], **options)
    assert moving.steps == [42, 49]


@pytest.mark.core
@pytest.mark.parametrize(("end", "steps"), [(100, [2, 4, 6, 8]), (None, [2, 4, 6])])
def test_the_end_of_updates_counts_steps_of_accumulated_gradients(end, steps):
    model = compiled(mlp(), keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
    x, y = data(20)
    moving = Steps(frequency=2, end_step=end)
    model.fit(x, y, batch_size=4, epochs=6, verbose=0, callbacks=[moving])  # 30 batches, 10 steps
    assert moving.steps == steps  # until 3/4 of 10 steps, not of 30 batches


class Asked(keras.utils.PyDataset):
    """Batches that note which of them were asked for."""

    def __init__(self, batches):
        super().__init__()
        self.batches, self.numbers = batches, []

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, number):
        self.numbers.append(number)
        return self.batches[number]


def test_an_update_takes_the_next_batch():
    model = compiled(mlp())
    x, y = data(20)
    batches = Asked([(x[k : k + 4], y[k : k + 4]) for k in range(0, 20, 4)])
    rigl = begin(RigL(batches, frequency=3, end_step=100), model)
    batches.numbers.clear()
    for step in (3, 6, 9):
        rigl.move(step)
    assert batches.numbers == [0, 1, 2]


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_slots_of_new_entries_are_those_of_a_fresh_optimizer(storage):
    """Adagrad's accumulator does not start at zero."""
    model = kso.convert(mlp(), "compact") if storage == "compact" else mlp()
    compiled(model, keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.25))
    model.fit(*data(), epochs=4, verbose=0)
    weight = kso.prunable_weights(model)[0]
    before = weight.storage.mask_value()
    assert begin(SET(frequency=1, end_step=100, fraction=0.9), model).move(1) > 0
    mask = weight.storage.mask_value()
    ((slot, start),) = optimizer_slots(model.optimizer, weight.variable)
    found = array(slot)[mask] if storage == "masked" else array(slot)
    assert start == 0.25
    assert (found[~before[mask]] == 0.25).all()
    assert (found[before[mask]] > 0.25).any()


def test_steps_of_an_optimizer_that_skips_some():
    inner = keras.optimizers.SGD(1e-2)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=1e38)
    model = compiled(mlp(), optimizer)
    x, y = data(20)
    x = x * 100  # so that scaled gradients overflow until the scale has come down
    moving = Steps(frequency=2, end_step=100)
    model.fit(x, y, batch_size=4, epochs=4, verbose=0, callbacks=[moving])
    made = int(inner.iterations)
    assert 4 < made < 20
    # A step that is skipped is begun again, and so is its update.
    assert sorted(set(moving.steps)) == list(range(2, made, 2))
    assert moving.steps == sorted(moving.steps)


def test_the_same_update_again_changes_nothing():
    model = compiled(mlp())
    moving = begin(SET(fraction=0.7, end_step=1000), model)
    assert moving.move(100) > 5
    masks = [w.parametrization.mask_value() for w in kso.prunable_weights(model)]
    assert moving.move(100) == 0
    for weight, mask in zip(kso.prunable_weights(model), masks, strict=True):
        np.testing.assert_array_equal(weight.parametrization.mask_value(), mask)


@pytest.mark.parametrize("per_call", [2, 4, 5])
def test_steps_per_execution(per_call):
    model = compiled(mlp(), steps_per_execution=per_call)
    x, y = data(40)
    moving = Steps(frequency=4, end_step=100)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[moving])
    expected = {2: [4, 8, 12, 16], 4: [4, 8, 10, 14, 18], 5: [5, 10, 15]}
    if per_call == 4:  # 10 steps an epoch: executions begin at 0, 4, 8, 10, 14, 18
        assert moving.steps == expected[4]
    else:
        assert moving.steps == expected[per_call]


def test_custom_training_steps_are_counted_by_the_optimizer():
    class Twice(keras.Model):
        def train_step(self, *args):
            result = super().train_step(*args)
            if keras.backend.backend() == "jax":
                return super().train_step(result[1], args[1])
            return super().train_step(*args)

    sparse = mlp()
    model = compiled(Twice(sparse.inputs, sparse.outputs))
    x, y = data(20)
    moving = Steps(frequency=4, end_step=100)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[moving])
    assert moving.steps == [4, 8, 12, 16]


def test_a_gradient_that_is_not_finite_moves_nothing():
    model = compiled(mlp())
    x, y = data()
    before = [w.parametrization.mask_value() for w in kso.prunable_weights(model)]
    rigl = begin(RigL((x * np.nan, y), frequency=1, end_step=200), model)
    with pytest.warns(UserWarning, match=r"RigL skipped its update at step 100: .*a/kernel"):
        assert rigl.move(100) == 0
    for weight, mask in zip(kso.prunable_weights(model), before, strict=True):
        np.testing.assert_array_equal(weight.parametrization.mask_value(), mask)


def test_selection_and_frozen_layers():
    model = compiled(mlp())
    before = [w.parametrization.mask_value() for w in kso.prunable_weights(model)]
    begin(RigL(data(), include="a", fraction=0.5, frequency=1, end_step=100), model).move(1)
    moved = [
        bool((w.parametrization.mask_value() != mask).any())
        for w, mask in zip(kso.prunable_weights(model), before, strict=True)
    ]
    assert moved == [True, False]
    with pytest.raises(UnknownWeightError, match="nowhere"):
        begin(SET(exclude="nowhere", end_step=1000), model)
    model.layers[0].trainable = False
    assert [w.path for w in begin(SET(end_step=1000), model)._weights] == ["b/kernel"]


def test_refusals():
    plain = compiled(keras.Sequential([keras.Input((8,)), L.Dense(3)]))
    with pytest.raises(NotPrunableError, match="or live blocks: make the model sparse first"):
        begin(SET(end_step=1000), plain)
    dense = keras.Sequential([keras.Input((8,)), L.Dense(3, name="d")])
    other = compiled(kso.parametrize(dense, MagnitudeMask(0.5)))
    with pytest.raises(NotPrunableError, match=r"Received: 'd/kernel' with MagnitudeMask"):
        begin(RigL(data(), end_step=1000), other)
    model = compiled(mlp())
    x, y = data()
    batches = ((x, y) for _ in range(3))
    with pytest.raises(ValueError, match=r"`end_step` must be given.*steps=None"):
        model.fit(batches, shuffle=False, verbose=0, callbacks=[SET()])
    with pytest.warns(UserWarning, match="SET will make no update: the first would be at step 100"):
        model.fit(x, y, verbose=0, callbacks=[SET(frequency=100)])
    for arguments in ({"frequency": 0}, {"fraction": 1.5}, {"end_step": 0}, {"seed": None}):
        [(name, value)] = arguments.items()
        with pytest.raises(ValueError, match=f"`{name}` must.*Received: {name}={value}"):
            SET(**arguments)
    groups = kso.sparsify(dense, 0.5, structure=kso.NByM(2, 4), seed=0)
    with pytest.raises(NotPrunableError, match=r"structure of 'd/kernel'.*Received: .*NByM"):
        begin(SET(end_step=1000), compiled(groups))


@pytest.mark.core
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    model = compiled(mlp())
    before = live_counts(model)
    x, y = data()
    rigl = RigL((x, y), frequency=1, end_step=100)
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[rigl]).history
    assert np.isfinite(history["loss"]).all()
    assert min(history["moved"]) > 0
    assert live_counts(model) == before
    check_masks(model)


def test_on_two_devices():
    results = []
    for scope in (contextlib.nullcontext, on_two_devices):
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        with scope():
            model = compiled(mlp(), keras.optimizers.SGD(0.1, momentum=0.9))
            x, y = data(32)
            rigl = RigL((x, y), 8, frequency=2, end_step=100)
            model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=[rigl])
        check_masks(model)
        results.append(model.get_weights())
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
