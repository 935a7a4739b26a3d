"""Models as keras.io's examples write them: sparse by one line, trained, kept as they keep them."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.compat.examples import CLASSES, EXAMPLES, ROWS, Sampling, autoencoder
from tests.helpers import array, jit_if_quicker

pytestmark = [
    pytest.mark.core,
    # Of matrices of layers that are not registered; Keras' own, of augmentation that is not jitted.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
DENSITY = 0.2


def assert_masked(model):
    for weight in kso.prunable_weights(model):
        assert not weight.raw_value()[~weight.parametrization.mask_value()].any(), weight.path
    live, sizes = zip(*((w.live, w.size) for w in kso.prunable_weights(model)), strict=True)
    assert sum(live) == round(DENSITY * sum(sizes))


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_one_line(name, tmp_path):
    make, data = EXAMPLES[name]
    x, labels = data(), np.arange(ROWS) % CLASSES
    checkpoint = str(tmp_path / "checkpoint.weights.h5")

    model = kso.sparsify(make(), DENSITY)
    assert kso.report(model).density == pytest.approx(DENSITY, abs=1e-3)
    before = [weight.raw_value().copy() for weight in kso.prunable_weights(model)]
    loss = "sparse_categorical_crossentropy"
    model.compile("adamw", loss, metrics=["accuracy"], jit_compile=jit_if_quicker())
    saving = keras.callbacks.ModelCheckpoint(checkpoint, save_weights_only=True)
    model.fit(x, labels, batch_size=2, verbose=0, callbacks=[saving])
    assert_masked(model)
    after = [weight.raw_value() for weight in kso.prunable_weights(model)]
    assert not any(map(np.array_equal, before, after))
    expected = array(model(x, training=False))

    again = kso.sparsify(make(), DENSITY)  # other masks, until the file's come
    again.load_weights(checkpoint)
    np.testing.assert_array_equal(array(again(x, training=False)), expected)
    assert_masked(again)

    plain = kso.strip(model)
    np.testing.assert_array_equal(array(plain(x, training=False)), expected)
    plain.save_weights(tmp_path / "plain.weights.h5")
    dense = make()
    dense.load_weights(tmp_path / "plain.weights.h5")
    np.testing.assert_array_equal(array(dense(x, training=False)), expected)


@pytest.mark.tensorflow_only
def test_a_training_step_around_two_models(tmp_path):
    images = np.random.default_rng(0).uniform(size=(4, 8, 8, 1)).astype("float32")
    codes = np.ones((2, 2), "float32")

    def outputs(encoder, decoder):
        *moments, _ = encoder(images)  # but for the code, which is drawn
        return [array(value) for value in (*moments, decoder(codes))]

    model = kso.sparsify(autoencoder(), DENSITY)
    model.compile("adam", jit_compile=False)
    assert np.isfinite(model.fit(images, batch_size=2, verbose=0).history["loss"]).all()
    assert_masked(model)
    expected = outputs(model.encoder, model.decoder)
    plain = kso.strip(model)
    for kept in (plain, kso.sparsify(autoencoder(), DENSITY)):
        loaded = []
        for part in (kept.encoder, kept.decoder):
            part.save(tmp_path / "part.keras")
            custom = {"Sampling": Sampling}
            loaded.append(keras.saving.load_model(tmp_path / "part.keras", custom))
        for one, other in zip(outputs(*loaded), outputs(kept.encoder, kept.decoder), strict=True):
            np.testing.assert_array_equal(one, other)
    for one, other in zip(outputs(plain.encoder, plain.decoder), expected, strict=True):
        np.testing.assert_array_equal(one, other)
