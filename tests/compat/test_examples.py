"""Models as keras.io's examples write them: sparse by one line, trained, kept as they keep them."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.compat.examples import EXAMPLES, Sampling, autoencoder
from tests.helpers import array
from tests.models.test_whole_way import outputs, whole_way

pytestmark = [
    pytest.mark.core,
    # Of matrices of layers that are not registered; Keras' own, of augmentation that is not jitted.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_one_line(name, tmp_path):
    make, data = EXAMPLES[name]
    x = data()
    sparse, plain = whole_way(make(), x)
    # Other masks, until the file's come; and a dense model.
    for kept, other in ((sparse, kso.sparsify(make(), 0.4)), (plain, make())):
        kept.save_weights(tmp_path / "kept.weights.h5")
        other.load_weights(tmp_path / "kept.weights.h5")
        np.testing.assert_array_equal(outputs(other, x), outputs(sparse, x))


@pytest.mark.tensorflow_only
def test_a_training_step_around_two_models(tmp_path):
    images = np.random.default_rng(0).uniform(size=(4, 8, 8, 1)).astype("float32")
    codes = np.ones((2, 2), "float32")

    def answers(encoder, decoder):
        *moments, _ = encoder(images)  # but for the code, which is drawn
        return [array(value) for value in (*moments, decoder(codes))]

    model = kso.sparsify(autoencoder(), 0.2)
    model.compile("adam", jit_compile=False)
    assert np.isfinite(model.fit(images, batch_size=2, verbose=0).history["loss"]).all()
    for weight in kso.prunable_weights(model):
        assert not weight.raw_value()[~weight.parametrization.mask_value()].any(), weight.path
    assert kso.report(model).density == pytest.approx(0.2, abs=1e-3)
    expected = answers(model.encoder, model.decoder)
    plain = kso.strip(model)
    for kept in (plain, kso.sparsify(autoencoder(), 0.2)):
        loaded = []
        for part in (kept.encoder, kept.decoder):
            part.save(tmp_path / "part.keras")
            custom = {"Sampling": Sampling}
            loaded.append(keras.saving.load_model(tmp_path / "part.keras", custom))
        for one, other in zip(answers(*loaded), answers(kept.encoder, kept.decoder), strict=True):
            np.testing.assert_array_equal(one, other)
    for one, other in zip(answers(plain.encoder, plain.decoder), expected, strict=True):
        np.testing.assert_array_equal(one, other)
