"""What holds for every kind of layer in a wrapper, on every backend, under XLA."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import PrunableLayer
from keras_sparse_ortho.parametrizations import FixedMask
from tests.helpers import (
    array,
    classifier_loss,
    data,
    gradients,
    jit,
    jit_if_quicker,
    moments,
    reloaded,
    slow_on_tensorflow,
    slow_where_traced,
)
from tests.layers.kinds import CASES, DENSITY, STORAGES, network

pytestmark = pytest.mark.core

OPTIMIZERS = {
    "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1),
    "sgd_momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
}


def weights_of(model):
    return [
        weight
        for weight in kso.prunable_weights(model)
        if weight.storage is not None
    ]


@slow_on_tensorflow
@pytest.mark.parametrize(  # JAX compiles the many kinds together for 20 seconds under each
    "optimizer", ["adamw", pytest.param("sgd_momentum", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kinds", CASES)
def test_masked_weights_gradients_and_moments_are_exactly_zero(
    kinds, optimizer
):
    model = network(kinds, PrunableLayer)
    weights = weights_of(model)
    before = [weight.raw_value() for weight in weights]
    x, y = data(model, 3)
    loss = classifier_loss()
    # One of the two under XLA, whose compiling is most of the time.
    model.compile(
        OPTIMIZERS[optimizer](),
        loss,
        jit_compile=jit() and optimizer == "adamw",
    )
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)

    table = {
        id(v): g
        for v, g in zip(
            model.trainable_variables, gradients(model, x, y, loss), strict=True
        )
    }
    for weight, start in zip(weights, before, strict=True):
        mask = weight.parametrization.mask_value()
        assert mask.sum() == round(DENSITY * mask.size), weight
        assert not weight.raw_value()[~mask].any(), weight
        assert not weight.value[~mask].any(), weight
        assert not table[id(weight.variable)][~mask].any(), weight
        slots = moments(model.optimizer, weight.variable)
        assert slots
        for slot in slots:
            assert not slot[~mask].any(), weight
            assert slot[mask].any(), weight
        # and it did train
        assert (weight.raw_value() != start)[mask].any(), weight


@pytest.mark.slow  # tests/pruning/test_storage.py has fewer kinds of layers
@pytest.mark.parametrize("kinds", CASES)
def test_compact_storage_trains_as_masks_do(kinds):
    losses, models = [], {}
    for storage, wrap in STORAGES.items():
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        model = models[storage] = network(kinds, wrap)
        x, y = data(model, 3)
        model.compile(
            OPTIMIZERS["adamw"](),
            classifier_loss(),
            jit_compile=jit_if_quicker(),
        )
        history = model.fit(
            x, y, batch_size=8, epochs=2, shuffle=False, verbose=0
        )
        losses.append(history.history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)

    masked, compact = models["masked"], models["compact"]
    for theirs, ours in zip(
        weights_of(masked), weights_of(compact), strict=True
    ):
        mask = theirs.parametrization.mask_value()
        np.testing.assert_array_equal(ours.parametrization.mask_value(), mask)
        np.testing.assert_allclose(ours.value, theirs.value, atol=2e-5)
        assert (ours.path, ours.shape, ours.live) == (
            theirs.path,
            theirs.shape,
            theirs.live,
        )
        # Nothing dense is kept: neither a variable of the model nor a slot of the optimizer.
        assert all(
            ours.parametrization.layer_variable is not v
            for v in compact.variables
        )
        pairs = zip(
            moments(masked.optimizer, theirs.variable),
            moments(compact.optimizer, ours.variable),
            strict=True,
        )
        for dense, live in pairs:
            np.testing.assert_allclose(live, dense[mask], atol=1e-5)


@pytest.mark.parametrize("kinds", CASES)
@slow_where_traced
def test_a_full_mask_trains_exactly_as_the_plain_layer(kinds):
    def train(wrap):
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        model = network(kinds, wrap)
        for weight in weights_of(model):
            weight.parametrization.assign_mask(
                np.ones(weight.shape, dtype=bool)
            )
        # What was dead is zero by now.
        for variable in model.trainable_variables:
            rng = np.random.default_rng(variable.shape[-1])
            variable.assign(0.3 * rng.normal(size=variable.shape))
        x, y = data(model, 3)
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(
            optimizer, classifier_loss(), jit_compile=jit_if_quicker()
        )
        history = model.fit(
            x, y, batch_size=8, epochs=2, shuffle=False, verbose=0
        )
        kept = [
            v
            for v in model.weights
            if "mask" not in v.name and "seed" not in v.name
        ]
        return history.history["loss"], [array(v) for v in kept]

    (plain_loss, plain), (loss, weights) = (
        train(lambda layer: layer),
        train(PrunableLayer),
    )
    np.testing.assert_allclose(loss, plain_loss, rtol=1e-5)
    assert len(weights) == len(plain)
    for ours, theirs in zip(weights, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


@pytest.mark.parametrize(
    "storage", ["masked", pytest.param("compact", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kinds", CASES)
@slow_where_traced
def test_saving_cloning_and_weights_files_keep_masks_and_outputs(
    kinds, storage, tmp_path
):
    wrap = STORAGES[storage]
    model = network(kinds, wrap)
    x, y = data(model, 3)
    model.compile("adam", classifier_loss(), jit_compile=jit_if_quicker())
    model.fit(x, y, verbose=0)
    expected = model.predict(x, verbose=0)
    masks = [w.parametrization.mask_value() for w in weights_of(model)]

    loaded = reloaded(model, tmp_path)
    clone = keras.models.clone_model(model)
    clone_masks = [w.parametrization.mask_value() for w in weights_of(clone)]
    clone.set_weights(model.get_weights())
    model.save_weights(tmp_path / "model.weights.h5")
    other = network(kinds, wrap)
    other.load_weights(tmp_path / "model.weights.h5")
    for copy in (loaded, clone, other):
        np.testing.assert_array_equal(copy.predict(x, verbose=0), expected)
        for weight, mask in zip(weights_of(copy), masks, strict=True):
            np.testing.assert_array_equal(
                weight.parametrization.mask_value(), mask
            )
    # A clone without the weights is as sparse, never dense.
    assert [m.sum() for m in clone_masks] == [m.sum() for m in masks]


def test_what_is_no_configuration_of_a_wrapper_is_refused():
    layer = PrunableLayer(keras.layers.Dense(3), FixedMask())
    config = layer.get_config()
    del config["weights"]
    assert PrunableLayer.from_config(config).layer.units == 3
    for change in (
        {"parametrization": []},
        {"parametrization": None},
        {"layer_names": "d"},
        {"layer_names": [["d"]]},
        {"layer": None},
        *({"weights": weights} for weights in (7, [7], [["kernel"]])),
    ):
        changed = {**config, **change}
        with pytest.raises(ValueError, match="Received"):
            PrunableLayer.from_config(
                {k: v for k, v in changed.items() if v is not None}
            )
