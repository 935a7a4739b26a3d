"""The contemporary networks: their settings, sizes, and that every method trains each of them."""

import pytest

import keras_sparse_ortho as kso

pytestmark = pytest.mark.tensorflow_only


def settings(methods):
    return methods.settings("contemporary")


def test_the_networks_have_the_sizes_of_their_papers(methods):
    found = settings(methods)
    assert set(methods.CONTEMPORARY) < set(found)
    assert all(name.startswith("cifar10_") for name in set(found) - set(methods.CONTEMPORARY))
    # Convolutions and dense kernels, for CIFAR-10's images: He et al. (2016), table 6, of whose
    # shortcuts ours are projections; VGG-16 with one dense layer; MobileNetV1 with ten classes.
    sizes = {"resnet20": 0.27e6, "resnet32": 0.46e6, "vgg16": 14.7e6, "mobilenet": 3.2e6}
    for name, size in sizes.items():
        options = found[f"cifar10_{name}"]
        model = methods.NETWORKS[name]((32, 32, 3), 10, options)
        kernels = sum(weight.size for weight in kso.prunable_weights(model))
        assert kernels == pytest.approx(size, rel=0.02)
        assert {layer.name for layer in model.layers} > {"mirrored", "moved"}
        assert options["epochs"] == 200
