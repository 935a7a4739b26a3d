"""SET and RigL on layers that store live blocks: as with masks of regular blocks."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import Block
from keras_sparse_ortho._keras_internals import optimizer_slots
from keras_sparse_ortho.callbacks import SET, RigL
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.layers import BlockSparseDense, BlockSparseLayer
from tests.helpers import array, classifier_loss, data, jit_if_quicker, slow_on_jax

L = keras.layers


def masked():
    inputs = keras.Input((4, 4, 16))
    x = L.Conv2D(32, 3, padding="same", activation="tanh", name="conv", kernel_regularizer="l2")(
        inputs
    )
    x = L.Reshape((4, 128))(x)
    x = L.EinsumDense("abc,cde->abde", (4, 4, 8), bias_axes="de", activation="tanh", name="mix")(x)
    x = L.Dense(32, activation="relu", name="hidden")(L.Flatten()(x))
    model = keras.Model(inputs, L.Dense(3, name="head")(x))
    return kso.sparsify(
        model, 0.5, "uniform", structure=Block(4, 4, regular=True), exclude="head", seed=0
    )


def compiled(model, **kwargs):
    optimizer = keras.optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=4)
    model.compile(optimizer, classifier_loss(), jit_compile=jit_if_quicker(), **kwargs)
    return model


def blocks_of(model):
    return {w.path: (array(w.owner.inputs_of), w) for w in kso.prunable_weights(model) if w.storage}


@slow_on_jax
@pytest.mark.core
def test_rigl_moves_the_blocks_that_it_moves_in_a_mask():
    start = masked()
    models, losses = [start, kso.convert(start, "blocks")], []
    before = [w.parametrization.mask_value() for w in kso.prunable_weights(start)[:3]]
    for model in models:
        x, y = data(compiled(model), 3)
        moving = RigL((x, y), 8, frequency=3, end_step=40, fraction=0.6)
        options = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0}
        losses.append(model.fit(x, y, callbacks=[moving], **options).history)
    for name in ("loss", "moved"):
        np.testing.assert_allclose(losses[0][name], losses[1][name], rtol=1e-5)
    assert min(losses[0]["moved"]) > 0
    pairs = zip(*(kso.prunable_weights(model)[:3] for model in models), strict=True)
    for (theirs, ours), old in zip(pairs, before, strict=True):
        assert isinstance(ours.owner, BlockSparseLayer)
        mask = ours.storage.mask_value()
        np.testing.assert_array_equal(mask, theirs.parametrization.mask_value(), ours.path)
        assert (mask != old).any()
        np.testing.assert_allclose(ours.value, theirs.value, atol=2e-5)


@pytest.mark.core
def test_set_keeps_fans_and_values_and_starts_new_blocks_from_zero():
    model = compiled(kso.convert(masked(), "blocks"))
    x, y = data(model, 3)
    model.fit(x, y, batch_size=8, verbose=0)
    moving = SET(frequency=1, end_step=100, fraction=0.9)
    moving.set_model(model)
    moving.on_train_begin()
    old = {path: (places, w.value) for path, (places, w) in blocks_of(model).items()}
    slots = {
        path: [array(slot) for slot, *_ in optimizer_slots(model.optimizer, w.variable)]
        for path, (_, w) in blocks_of(model).items()
    }
    moved = moving.move(1)
    new = 0
    for path, (places, weight) in blocks_of(model).items():
        grid = weight.owner.grid
        np.testing.assert_array_equal(places, grid.check_pattern(places))
        assert (np.diff(places) > 0).all()
        was, value = old[path]
        live, entries = weight.storage.mask_value(), grid.live // places.size
        assert np.count_nonzero(live) == weight.live == grid.live
        blocks = array(weight.variable)
        found = optimizer_slots(model.optimizer, weight.variable)
        assert len(found) == len(slots[path]) == 3
        for j, line in enumerate(places):
            for place, block in enumerate(line):
                same = np.flatnonzero(was[j] == block)
                for (slot, *_), before in zip(found, slots[path], strict=True):
                    expected = before[j, same[0]] if same.size else np.zeros_like(blocks[0, 0])
                    np.testing.assert_array_equal(array(slot)[j, place], expected)
                if not same.size:
                    assert not blocks[j, place].any()
                    new += entries
        np.testing.assert_array_equal(weight.value, np.where(live, value, 0))
    assert moved == new > 0


def test_what_cannot_be_moved():
    layer = BlockSparseDense(16, density=0.5, block=4, seed=0, name="d")
    model = keras.Sequential([keras.Input((16,)), layer])
    model.compile("sgd", "mse", jit_compile=jit_if_quicker())
    x = np.ones((4, 16), "float32")
    layer.trainable = False
    with pytest.raises(NotPrunableError, match="no such trainable weight"):
        model.fit(x, x, verbose=0, callbacks=[SET(frequency=1, end_step=9)])
    layer.trainable = True
    places = array(layer.inputs_of)
    layer.blocks.assign(np.full(layer.blocks.shape, np.nan))
    moving = SET(frequency=1, end_step=9)
    moving.set_model(model)
    moving.on_train_begin()
    with pytest.raises(NotPrunableError, match=r"blocks of 'd' are not finite. Received: 8 blocks"):
        moving.move(1)
    np.testing.assert_array_equal(array(layer.inputs_of), places)
