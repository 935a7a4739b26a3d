"""What cannot be wrapped is refused, with the rule, the layer and the value."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho import PrunableLayer
from keras_sparse_ortho.errors import (
    DensityError,
    NotPrunableError,
    UnknownWeightError,
)
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.parametrizations import (
    FixedMask,
    LowRankSoftThreshold,
    SoftThreshold,
)
from tests.helpers import array

L = keras.layers
pytestmark = pytest.mark.core


def eoi(density=0.5):
    return ExactOrthogonal(density, seed=0)


def built(layer, *shape):
    layer.build((None, *shape))
    return layer


def test_spectral_normalization():
    with pytest.raises(
        NotPrunableError,
        match=r"'spectral_normalization.*assigns its kernel.*Rece",
    ):
        PrunableLayer(L.SpectralNormalization(L.Dense(4)), FixedMask(0.5))


@pytest.mark.parametrize("then", ["LoRA is enabled", "it is quantized"])
def test_lora_and_quantization_before_and_after_wrapping(then):
    dense = built(L.Dense(4, kernel_initializer=eoi()), 8)
    wrapper = built(PrunableLayer(dense), 8)
    mask = wrapper.parametrizations["kernel"].mask_value()
    for layer in (dense, wrapper):
        with pytest.raises(
            NotPrunableError, match=r"LoRA cannot be enabled on 'dense'.*Strip"
        ):
            layer.enable_lora(2)
    with pytest.raises(
        NotImplementedError, match=r"'dense' cannot be quantized while it is wr"
    ):
        dense.quantize("int8")
    wrapper.release()
    if "LoRA" in then:
        dense.enable_lora(2)
    else:
        dense.quantize("int8")
        assert not array(dense._kernel)[~mask].any()  # int8 keeps the zeros
    with pytest.raises(
        NotPrunableError, match=rf"'dense' cannot be wrapped: {then}"
    ):
        PrunableLayer(dense)


def test_wrapping_twice():
    wrapper = PrunableLayer(L.Dense(4, kernel_initializer=eoi()))
    with pytest.raises(
        NotPrunableError,
        match=r"'dense' cannot be wrapped: it is wrapped already",
    ):
        PrunableLayer(wrapper)
    with pytest.raises(NotPrunableError, match=r"wrapped already"):
        PrunableLayer(keras.Sequential([keras.Input((3,)), wrapper]))


@pytest.mark.parametrize(
    "layer", [L.ReLU(), L.BatchNormalization(), L.LayerNormalization()]
)
def test_a_layer_without_kernel(layer):
    with pytest.raises(
        NotPrunableError,
        match=rf"'{layer.name}' has no kernel.*Received: layer=",
    ):
        PrunableLayer(layer, FixedMask(0.5)).build((None, 8))


def test_no_layer_at_all():
    with pytest.raises(
        NotPrunableError, match=r"wraps a Keras 3 layer. Received"
    ):
        PrunableLayer(lambda x: x, FixedMask(0.5))


def test_no_source_for_a_mask():
    with pytest.raises(
        NotPrunableError, match=r"no mask for 'dense/kernel'.*GlorotUniform"
    ):
        PrunableLayer(L.Dense(4)).build((None, 8))


def test_a_density_that_contradicts_the_initializer():
    layer = PrunableLayer(
        L.Dense(4, kernel_initializer=eoi(0.5)), FixedMask(0.25)
    )
    with pytest.raises(
        DensityError, match=r"'dense/kernel' has a mask of density 0.5.*0.25"
    ):
        layer.build((None, 8))


@pytest.mark.parametrize(
    "density", [0, 0.0, -0.1, 1.5, float("nan"), "0.1", True]
)
def test_a_density_outside_its_range(density):
    with pytest.raises(
        DensityError, match=r"must be.* in \(0, 1\]\..* Received: density="
    ):
        FixedMask(density)


def test_bad_masks():
    with pytest.raises(
        ValueError, match=r"bool array with at least one live entry. Received"
    ):
        FixedMask(mask=np.ones((8, 4)))
    with pytest.raises(ValueError, match=r"at least one live entry"):
        FixedMask(mask=np.zeros((8, 4), dtype=bool))
    with pytest.raises(
        ValueError, match=r"'dense/kernel' must have its shape \(8, 4\)"
    ):
        PrunableLayer(
            L.Dense(4, name="dense"), FixedMask(mask=np.ones((4, 8), bool))
        ).build((None, 8))
    with pytest.raises(DensityError, match=r"`mask` has the density 1"):
        FixedMask(0.5, np.ones((8, 4), dtype=bool))


def test_unknown_weights_and_parametrizations():
    with pytest.raises(
        UnknownWeightError, match=r"There are: kernel. Received: .*'kernal'"
    ):
        PrunableLayer(L.Dense(4), FixedMask(0.5), weights="kernal").build(
            (None, 8)
        )
    with pytest.raises(UnknownWeightError, match=r"parametrization"):
        PrunableLayer(L.Dense(4), {"bias": FixedMask(0.5)}).build((None, 8))
    with pytest.raises(
        ValueError, match=r"must be a Parametrization, or a dict.*Received"
    ):
        PrunableLayer(L.Dense(4), 0.5)
    with pytest.raises(
        ValueError, match=r"names them itself. Received: weights='kernel'"
    ):
        PrunableLayer(L.Dense(4), {"kernel": FixedMask(0.5)}, weights="kernel")


def test_a_layer_that_assigns_its_kernel_in_the_call():
    class Renormalized(L.Dense):
        def call(self, inputs):
            self.kernel.assign(self.kernel / 2.0)
            return super().call(inputs)

    layer = built(PrunableLayer(Renormalized(4), FixedMask(0.5)), 8)
    with pytest.raises(
        RuntimeError,
        match=r"kernel is parametrized, and its layer assigned to it",
    ):
        layer(np.ones((2, 8), dtype="float32"))


@pytest.mark.jax_only
@pytest.mark.parametrize(
    "parametrization", [SoftThreshold(), LowRankSoftThreshold()]
)
def test_thresholds_of_a_model_that_fit_builds_under_jit(parametrization):
    model = keras.Sequential(
        [PrunableLayer(L.Dense(4), parametrization), L.Dense(1)]
    )
    model.compile("adam", "mse")
    with pytest.raises(
        ValueError, match=r"build the model first, with a keras.Input.*Received"
    ):
        model.fit(np.zeros((8, 8)), np.zeros((8, 1)), verbose=0)
