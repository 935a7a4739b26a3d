"""SET and RigL: exact counts, zero slots, where entries grow, when updates happen, refusals."""

import contextlib

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import Block
from keras_sparse_ortho.callbacks import SET, RigL
from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError
from keras_sparse_ortho.parametrizations import MagnitudeMask
from tests.helpers import (
    array,
    classifier_loss,
    data,
    gradients,
    jit,
    on_two_devices,
    optimizer_slots,
    slow_on_tensorflow,
    slow_where_traced,
)

L = keras.layers


def mlp(density=0.3, seed=0):
    layers = [L.Dense(12, activation="tanh", name="a"), L.Dense(3, name="b")]
    return kso.sparsify(
        keras.Sequential([keras.Input((8,)), *layers]), density, seed=seed
    )


def every_kind():
    """An embedding, a recurrent layer, a convolution, a depthwise one and a shared layer."""
    tokens, image = keras.Input((5,), dtype="int32"), keras.Input((6, 6, 2))
    x = L.SimpleRNN(4, name="recurrent")(
        L.Embedding(30, 6, name="embedding")(tokens)
    )
    y = L.DepthwiseConv2D(3, name="depthwise")(
        L.Conv2D(8, 3, name="conv")(image)
    )
    y = L.Dense(4, name="fit")(L.Flatten()(y))
    shared = L.Dense(4, activation="tanh", name="shared")
    head = L.Dense(3, name="head")(L.Concatenate()([shared(x), shared(y)]))
    model = keras.Model([tokens, image], head)
    return kso.sparsify(
        model, 0.4, "uniform", initializer="random_sparse", seed=0
    )


def compiled(model, optimizer=None, **kwargs):
    # Without XLA on TensorFlow where it is not the point: compiling takes most of the time here.
    kwargs = {"jit_compile": keras.backend.backend() == "jax", **kwargs}
    model.compile(
        optimizer or keras.optimizers.Adam(1e-2), classifier_loss(), **kwargs
    )
    return model


def callback(kind, batches, **kwargs):
    return SET(**kwargs) if kind == "SET" else RigL(batches, 8, **kwargs)


def begin(callback, model):
    """Attaches a callback as `fit` does."""
    callback.set_model(model)
    callback.set_params({"epochs": 1, "steps": 10})
    callback.on_train_begin()
    return callback


def xy(model, count=16):
    return data(model, 3, count)


def fit(model, *callbacks, count=16, **options):
    options = {"batch_size": 4, "shuffle": False, "verbose": 0} | options
    return model.fit(
        *xy(model, count), callbacks=list(callbacks), **options
    ).history


def masks(model):
    return [weight.mask for weight in kso.prunable_weights(model)]


def check_masks(model, before):
    """As many live entries as before, some of them elsewhere, and zeros in their place."""
    for weight, old in zip(kso.prunable_weights(model), before, strict=True):
        mask = weight.mask
        assert mask.sum() == old.sum()
        assert (mask != old).any(), weight.path
        assert not weight.raw_value()[~mask].any()


@pytest.mark.core
@slow_on_tensorflow
@pytest.mark.parametrize("kind", ["SET", "RigL"])
def test_training_of_every_kind_of_layer(kind):
    model = compiled(every_kind(), jit_compile=jit())
    before = masks(model)
    moving = callback(kind, xy(model), frequency=2, end_step=40, fraction=0.5)
    history = fit(model, moving, epochs=3)
    check_masks(model, before)
    assert len(history["moved"]) == 3
    assert all(0 < moved < 1 for moved in history["moved"])
    assert np.isfinite(history["loss"]).all()


def of_blocks():
    inputs = keras.Input((4, 4, 16))
    x = L.Conv2D(
        32,
        3,
        padding="same",
        activation="tanh",
        name="conv",
        kernel_regularizer="l2",
    )(inputs)
    x = L.Reshape((4, 128))(x)
    x = L.EinsumDense(
        "abc,cde->abde",
        (4, 4, 8),
        bias_axes="de",
        activation="tanh",
        name="mix",
    )(x)
    x = L.Dense(32, activation="relu", name="hidden")(L.Flatten()(x))
    model = keras.Model(inputs, L.Dense(3, name="head")(x))
    return kso.sparsify(
        model,
        0.5,
        "uniform",
        structure=Block(4, 4, regular=True),
        exclude="head",
        seed=0,
    )


@pytest.mark.core
@pytest.mark.parametrize(
    ("storage", "kind"),
    [
        ("compact", "SET"),
        ("compact", "RigL"),
        pytest.param("blocks", "RigL", marks=slow_where_traced),
    ],
)
def test_the_same_entries_move_in_every_storage(storage, kind):
    dense = [
        L.Dense(12, kernel_regularizer="l2", name="a"),
        L.Dense(3, name="b"),
    ]
    if storage == "blocks":
        start = of_blocks()
    else:
        start = kso.sparsify(
            keras.Sequential([keras.Input((8,)), *dense]), 0.3, seed=0
        )
    before = masks(start)
    models, histories = [start, kso.convert(start, storage)], []
    for model in models:
        # A slot that does not start at 0.
        if (storage, kind) == (
            "compact",
            "RigL",
        ):
            optimizer = keras.optimizers.Adagrad(
                0.1, initial_accumulator_value=0.25
            )
        else:
            optimizer = keras.optimizers.Adam(
                1e-2, use_ema=True, ema_overwrite_frequency=5
            )
        compiled(model, optimizer)
        moving = callback(
            kind, xy(model, 32), frequency=2, end_step=40, fraction=0.5
        )
        histories.append(fit(model, moving, count=32, batch_size=8, epochs=3))
    for name in ("loss", "moved"):
        np.testing.assert_allclose(
            histories[0][name], histories[1][name], rtol=1e-5
        )
    own = [w for w in kso.prunable_weights(models[1]) if w.storage is not None]
    assert len(own) == (3 if storage == "blocks" else 2)
    for theirs, ours, old in zip(
        kso.prunable_weights(start), own, before, strict=False
    ):
        mask = ours.storage.mask_value()
        np.testing.assert_array_equal(mask, theirs.mask, ours.path)
        assert (mask != old).any()
        np.testing.assert_allclose(ours.value, theirs.value, atol=2e-5)
        if storage == "compact":
            np.testing.assert_allclose(ours.value, theirs.value, atol=1e-6)
            assert (np.diff(array(ours.parametrization.indices)) > 0).all()
            slots = optimizer_slots(models[1].optimizer, ours.variable)
            assert len(slots) == (3 if kind == "SET" else 1)
            dense = optimizer_slots(start.optimizer, theirs.variable)
            for (dense_slot, *_), (live_slot, *_) in zip(
                dense, slots, strict=True
            ):
                np.testing.assert_allclose(
                    array(live_slot), array(dense_slot)[mask], atol=1e-6
                )


def two_optimizers(pattern=".*a/.*"):
    """Adam for the first layer, SGD for the rest; plain Adam where Keras has no MultiOptimizer."""
    adam = keras.optimizers.Adam(0.01)
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        return adam
    others = keras.optimizers.SGD(0.1, momentum=0.9)
    chosen = keras.optimizers.OptimizerMap(others, {pattern: adam})
    return keras.optimizers.MultiOptimizer(chosen)


@pytest.mark.core
@pytest.mark.parametrize(
    "algorithm",
    ["adam", "sgd", "ema", "rmsprop", "adagrad", "scaled", "several"],
)
def test_slots_and_weights_of_changed_entries_are_those_of_new_ones(algorithm):
    optimizer = {
        "adam": lambda: keras.optimizers.Adam(1e-2, amsgrad=True),
        "sgd": lambda: keras.optimizers.SGD(1e-2, momentum=0.9, nesterov=True),
        "ema": lambda: keras.optimizers.SGD(1e-2, use_ema=True),
        "rmsprop": lambda: keras.optimizers.RMSprop(
            1e-2, momentum=0.9, centered=True
        ),
        "adagrad": lambda: keras.optimizers.Adagrad(
            0.1, initial_accumulator_value=0.25
        ),
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(1e-2)
        ),
        "several": two_optimizers,
    }[algorithm]()
    model = compiled(mlp(), optimizer)
    fit(model, epochs=1)
    weights, before = kso.prunable_weights(model), masks(model)
    raw = [w.raw_value() for w in weights]
    slots = [
        [array(s) for s, *_ in optimizer_slots(optimizer, w.variable)]
        for w in weights
    ]
    if algorithm == "several" and hasattr(keras.optimizers, "MultiOptimizer"):
        assert [len(values) for values in slots] == [2, 1]
    assert begin(SET(fraction=0.8, end_step=1000), model).move(1) > 5
    check_masks(model, before)
    for weight, mask, value, values in zip(
        weights, before, raw, slots, strict=True
    ):
        now = weight.mask
        np.testing.assert_array_equal(
            weight.raw_value()[now & mask], value[now & mask]
        )
        assert values
        start = 0.25 if algorithm == "adagrad" else 0
        # Something to forget.
        assert any((v[mask & ~now] != start).any() for v in values)
        found = optimizer_slots(optimizer, weight.variable)
        for (slot, *_), old in zip(found, values, strict=True):
            assert (array(slot)[now != mask] == start).all()
            np.testing.assert_array_equal(
                array(slot)[now == mask], old[now == mask]
            )


@pytest.mark.core
def test_a_model_is_converted_with_its_optimizers():
    model = compiled(mlp(), two_optimizers())
    fit(model)
    compact = kso.convert(model, "compact")
    fit(model), fit(compact)
    for a, b in zip(
        kso.prunable_weights(model), kso.prunable_weights(compact), strict=True
    ):
        np.testing.assert_allclose(a.value, b.value, atol=1e-6)
    if hasattr(keras.optimizers, "MultiOptimizer"):
        model = compiled(mlp(), two_optimizers(".*a/kernel"))
        fit(model)
        with pytest.raises(
            ValueError, match=r"must match the path.*a/kernel, then .*values"
        ):
            kso.convert(model, "compact")


@pytest.mark.core
def test_rigl_grows_where_the_dense_gradient_is_largest():
    model = compiled(mlp())
    x, y = xy(model)
    fit(model)
    # The dense gradient without any of our machinery: that of a plain model of the same weights.
    plain = keras.Sequential(
        [keras.Input((8,)), L.Dense(12, activation="tanh"), L.Dense(3)],
        name="plain",
    )
    plain.set_weights(kso.strip(model).get_weights())
    dense = [
        g for g in gradients(plain, x, y, classifier_loss()) if g.ndim == 2
    ]

    weights, before = kso.prunable_weights(model), masks(model)
    raw = [w.raw_value() for w in weights]
    rigl = begin(
        RigL(
            (x, y), batch_size=len(x), fraction=0.6, frequency=1, end_step=100
        ),
        model,
    )
    assert rigl.move(1) > 3
    for weight, mask, value, gradient in zip(
        weights, before, raw, dense, strict=True
    ):
        live = np.count_nonzero(mask)
        count = int(0.3 * (1 + np.cos(np.pi / 100)) * live)
        order = np.argsort(np.abs(value), axis=None)
        dropped = order[mask.reshape(-1)[order]][:count]
        kept = mask.copy()
        kept.reshape(-1)[dropped] = False
        candidates = np.flatnonzero(~kept)
        strongest = np.argsort(-np.abs(gradient).reshape(-1)[candidates])[
            :count
        ]
        kept.reshape(-1)[candidates[strongest]] = True
        np.testing.assert_array_equal(weight.mask, kept)


@pytest.mark.core
def test_set_draws_from_all_dead_entries():
    model = compiled(
        kso.sparsify(keras.Sequential([keras.Input((8,)), L.Dense(8)]), 0.25)
    )
    [weight] = kso.prunable_weights(model)
    first = weight.mask

    def moved(moving, step):
        weight.parametrization.assign_mask(first)
        weight.variable.assign(np.ones(weight.shape) * first)
        moving.move(step)
        return weight.mask

    moving = begin(SET(fraction=1.0, end_step=10_000), model)
    grown = sum(
        (moved(moving, step) & ~first).astype(int) for step in range(1, 61)
    )
    assert not grown[first].any()
    # 15 of 48 + 15 candidates each time: 14.3 on average, and 3.3 standard deviations of it.
    assert grown[~first].min() > 2
    assert abs(grown[~first].mean() - 60 * 15 / 63) < 1.5
    # The same step, seed and weight make the same choice; another seed another.
    sets = (SET(fraction=1.0, end_step=10_000, seed=seed) for seed in (0, 0, 1))
    choices = [moved(begin(one, model), 5) for one in sets]
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

    dense = keras.Sequential(
        [keras.Input((8,)), L.Dense(12), Counted(), L.Dense(3)]
    )
    model = compiled(kso.sparsify(dense, 0.3, seed=0), jit_compile=jit())
    fit(model, batch_size=8)
    before = len(traces)
    moving = callback(kind, xy(model), frequency=1, end_step=1000)
    fit(model, moving, batch_size=8, epochs=10)
    compiles = keras.backend.backend() != "torch"
    # RigL's gradient is traced once; torch runs 20 steps (and 20 gradients).
    added = {"SET": 0, "RigL": 1} if compiles else {"SET": 20, "RigL": 40}
    assert len(traces) - before == added[kind]
    # A second `fit` takes what the first one compiled.
    before = len(traces)
    fit(model, moving, batch_size=8, epochs=10)
    assert len(traces) - before == (0 if compiles else added[kind])


@pytest.mark.core
def test_rigl_follows_a_new_loss():
    model = compiled(mlp(), keras.optimizers.SGD(0.0))
    rigl = RigL(xy(model), 16, frequency=1000, end_step=10**6)
    weights = kso.prunable_weights(model)

    def scores():
        fit(model, rigl, batch_size=8)
        rigl.sync()
        return np.concatenate(
            [np.ravel(s) for s in rigl.growth_scores(weights, 1000)]
        )

    first = scores()
    np.testing.assert_array_equal(scores(), first)
    loss = classifier_loss()
    model.compile(
        keras.optimizers.SGD(0.0),
        lambda y, p: 2 * loss(y, p),
        jit_compile=jit(),
    )
    np.testing.assert_allclose(scores(), 2 * first, rtol=1e-4, atol=1e-7)


class Steps(SET):
    """Notes at which steps `fit` asks for an update."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.steps = []

    def move(self, step):
        self.steps.append(step)
        return super().move(step)


def steps_of(model, count=20, epochs=4, batch_size=4, **options):
    """Before which steps the entries move."""
    moving = Steps(**options)
    fit(model, moving, count=count, epochs=epochs, batch_size=batch_size)
    return moving.steps


@pytest.mark.core
def test_when_updates_happen():
    model = compiled(mlp())  # five steps an epoch
    assert steps_of(model, frequency=3) == [
        3,
        6,
        9,
        12,
    ]  # until 3/4 of 20 steps, 15
    # Steps are those of the optimizer, whatever was before this fit.
    assert steps_of(model, frequency=10, end_step=100) == [20, 30]
    assert steps_of(model, frequency=7, end_step=50) == [42, 49]
    moving = begin(SET(end_step=15), model)
    assert moving.drop_fraction(0) == 0.3
    assert moving.drop_fraction(5) == pytest.approx(
        0.15 * (1 + np.cos(np.pi / 3))
    )
    assert moving.drop_fraction(15) == 0


@pytest.mark.core
@pytest.mark.parametrize(
    ("end", "steps"), [(100, [2, 4, 6, 8]), (None, [2, 4, 6])]
)
def test_the_end_of_updates_counts_steps_of_accumulated_gradients(end, steps):
    model = compiled(
        mlp(), keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    )
    # 30 batches, 10 steps; until 3/4 of 10 steps, not of 30 batches
    assert steps_of(model, epochs=6, frequency=2, end_step=end) == steps


def test_an_update_takes_the_next_batch():
    asked = []

    class Asked(keras.utils.PyDataset):
        """Batches that note which of them were asked for."""

        def __len__(self):
            return 5

        def __getitem__(self, number):
            asked.append(number)
            return xy(model, 4)

    model = compiled(mlp())
    rigl = begin(RigL(Asked(), frequency=3, end_step=100), model)
    asked.clear()
    for step in (3, 6, 9):
        rigl.move(step)
    assert asked == [0, 1, 2]


def test_steps_of_an_optimizer_that_skips_some():
    inner = keras.optimizers.SGD(1e-2)
    model = compiled(
        mlp(), keras.optimizers.LossScaleOptimizer(inner, initial_scale=1e38)
    )
    x, y = xy(model, 20)
    moving = Steps(frequency=2, end_step=100)
    # So large that scaled gradients overflow until the scale has come down.
    model.fit(100 * x, y, batch_size=4, epochs=4, verbose=0, callbacks=[moving])
    made = int(inner.iterations)
    assert 4 < made < 20
    # A step that is skipped is begun again, and so is its update.
    assert sorted(set(moving.steps)) == list(range(2, made, 2))
    assert moving.steps == sorted(moving.steps)


def test_the_same_update_again_changes_nothing():
    model = compiled(mlp())
    moving = begin(SET(fraction=0.7, end_step=1000), model)
    assert moving.move(100) > 5
    before = masks(model)
    assert moving.move(100) == 0
    assert all(map(np.array_equal, masks(model), before))


@pytest.mark.parametrize(
    ("per_call", "steps"),
    # Of 10 steps an epoch: executions of 4 begin at 0, 4, 8, 10, 14, 18.
    [(2, [4, 8, 12, 16]), (4, [4, 8, 10, 14, 18]), (5, [5, 10, 15])],
)
def test_steps_per_execution(per_call, steps):
    model = compiled(mlp(), steps_per_execution=per_call)
    assert steps_of(model, 40, 2, frequency=4, end_step=100) == steps


def test_custom_training_steps_are_counted_by_the_optimizer():
    class Twice(keras.Model):
        def train_step(self, *args):
            result = super().train_step(*args)
            if keras.backend.backend() == "jax":
                return super().train_step(result[1], args[1])
            return super().train_step(*args)

    sparse = mlp()
    model = compiled(Twice(sparse.inputs, sparse.outputs))
    assert steps_of(model, epochs=2, frequency=4, end_step=100) == [
        4,
        8,
        12,
        16,
    ]


def test_a_gradient_that_is_not_finite_moves_nothing():
    model = compiled(mlp())
    x, y = xy(model)
    before = masks(model)
    rigl = RigL(
        (x, y),
        frequency=1,
        end_step=200,
        loss=lambda y_true, y_pred: y_pred * np.nan,
    )
    rigl = begin(rigl, model)
    with pytest.warns(
        UserWarning, match=r"RigL skipped its update at step 100: .*a/kernel"
    ):
        assert rigl.move(100) == 0
    assert all(map(np.array_equal, masks(model), before))


@pytest.mark.core
def test_set_keeps_fans_and_values_and_starts_new_blocks_from_zero():
    model = kso.convert(of_blocks(), "blocks")
    compiled(
        model,
        keras.optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=4),
    )
    fit(model, batch_size=8)
    blocks = [w for w in kso.prunable_weights(model) if w.storage is not None]

    def slots_of(weight):
        return [
            array(slot)
            for slot, *_ in optimizer_slots(model.optimizer, weight.variable)
        ]

    before = [
        (array(w.owner.inputs_of), w.mask, w.value, slots_of(w)) for w in blocks
    ]
    moved = begin(SET(frequency=1, end_step=100, fraction=0.9), model).move(1)
    assert (
        moved
        == sum(
            (w.mask & ~old[1]).sum()
            for w, old in zip(blocks, before, strict=True)
        )
        > 0
    )
    for weight, (was, _, value, slots) in zip(blocks, before, strict=True):
        places, grid = array(weight.owner.inputs_of), weight.owner.grid
        np.testing.assert_array_equal(places, grid.check_pattern(places))
        assert (np.diff(places) > 0).all()
        assert np.count_nonzero(weight.mask) == weight.live == grid.live
        np.testing.assert_array_equal(
            weight.value, np.where(weight.mask, value, 0)
        )
        assert len(slots) == 3
        for now, old in zip(slots_of(weight), slots, strict=True):
            for j, place in np.ndindex(places.shape):
                same = np.flatnonzero(was[j] == places[j, place])
                expected = (
                    old[j, same[0]] if same.size else np.zeros_like(old[0, 0])
                )
                np.testing.assert_array_equal(now[j, place], expected)


def test_blocks_that_cannot_be_moved():
    layer = kso.layers.BlockSparseDense(
        16, density=0.5, block=4, seed=0, name="d"
    )
    model = compiled(keras.Sequential([keras.Input((16,)), layer]))
    layer.trainable = False
    with pytest.raises(NotPrunableError, match="no such trainable weight"):
        begin(SET(frequency=1, end_step=9), model)
    layer.trainable = True
    places = array(layer.inputs_of)
    layer.blocks.assign(np.full(layer.blocks.shape, np.nan))
    moving = begin(SET(frequency=1, end_step=9), model)
    with pytest.raises(
        NotPrunableError,
        match=r"blocks of 'd' are not finite. Received: 8 blocks",
    ):
        moving.move(1)
    np.testing.assert_array_equal(array(layer.inputs_of), places)


def test_selection_and_frozen_layers():
    model = compiled(mlp())

    def moved(callback):
        before = masks(model)
        begin(callback, model).move(1)
        return [
            bool((a != b).any())
            for a, b in zip(masks(model), before, strict=True)
        ]

    assert moved(RigL(xy(model), include="a", fraction=0.5, end_step=1000)) == [
        True,
        False,
    ]
    with pytest.raises(UnknownWeightError, match="nowhere"):
        moved(SET(exclude="nowhere", end_step=1000))
    model.layers[0].trainable = False
    assert moved(SET(fraction=0.9, end_step=1000)) == [False, True]


def test_refusals():
    plain = compiled(keras.Sequential([keras.Input((8,)), L.Dense(3)]))
    with pytest.raises(
        NotPrunableError, match="or live blocks: make the model sparse first"
    ):
        begin(SET(end_step=1000), plain)
    dense = keras.Sequential([keras.Input((8,)), L.Dense(3, name="d")])
    other = compiled(kso.parametrize(dense, MagnitudeMask(0.5)))
    with pytest.raises(
        NotPrunableError, match=r"Received: 'd/kernel' with MagnitudeMask"
    ):
        begin(RigL(xy(other), end_step=1000), other)
    model = compiled(mlp())
    batches = (xy(model) for _ in range(3))
    with pytest.raises(
        ValueError, match=r"`end_step` must be given.*steps=None"
    ):
        model.fit(batches, shuffle=False, verbose=0, callbacks=[SET()])
    with pytest.warns(
        UserWarning,
        match="SET will make no update: the first would be at step 100",
    ):
        fit(model, SET(frequency=100))
    for name, value in {
        "frequency": 0,
        "fraction": 1.5,
        "end_step": 0,
        "seed": None,
    }.items():
        with pytest.raises(
            ValueError, match=f"`{name}` must.*Received: {name}={value}"
        ):
            SET(**{name: value})
    groups = kso.sparsify(dense, 0.5, structure=kso.NByM(2, 4), seed=0)
    with pytest.raises(
        NotPrunableError, match=r"structure of 'd/kernel'.*Received: .*NByM"
    ):
        begin(SET(end_step=1000), compiled(groups))


@pytest.mark.core
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    model = compiled(mlp())
    before = masks(model)
    history = fit(model, RigL(xy(model), frequency=1, end_step=100), epochs=2)
    assert np.isfinite(history["loss"]).all()
    assert min(history["moved"]) > 0
    check_masks(model, before)


def test_on_two_devices():
    results = []
    for scope in (contextlib.nullcontext, on_two_devices):
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        with scope():
            model = compiled(mlp(), keras.optimizers.SGD(0.1, momentum=0.9))
            before = masks(model)
            rigl = RigL(xy(model, 32), 8, frequency=2, end_step=100)
            fit(model, rigl, count=32, batch_size=8, epochs=2)
        check_masks(model, before)
        results.append(model.get_weights())
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
