"""The contemporary networks: their settings, sizes, and that every method trains each of them."""

import dataclasses

import keras
import numpy as np
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


@pytest.mark.slow
@pytest.mark.parametrize("net", ["resnet32", "vgg16", "mobilenet", "vit"])
def test_every_method_trains_each_network(methods, net, tmp_path):
    options = settings(methods)[net]
    data = methods.load("digits")
    x = np.repeat(np.repeat(data.x_train[:64], 4, axis=1), 4, axis=2)[:, :28, :28]
    cut = {"x_train": x, "y_train": data.y_train[:64], "x_test": x, "y_test": data.y_train[:64]}
    data = dataclasses.replace(data, **cut)
    narrow = {"filters": [8, 12, 16, 20, 24][: len(options.get("filters", []))], "blocks": 1}
    options |= narrow | {"width": 64, "depth": 1, "batch_size": 8, "epochs": 1, "tune": False}
    options |= {"budgets": tmp_path / "budgets.jsonl"}
    for name in options["methods"]:
        keras.utils.clear_session()
        model, callbacks, _ = methods.build(net, name, 0.5, 0, data, options, 1e-3)
        methods.fit(model, callbacks, data, options, seed=0)
        weights = kso.prunable_weights(model)
        if name == "dense":
            assert all(w.density == 1 for w in weights)
            continue
        parts = {"vit": "mlp_", "mobilenet": "_pointwise"}
        chosen = [w for w in weights if parts.get(net, "") in w.path]
        assert all(w.density == 1 for w in weights if w not in chosen)
        live = sum(w.live for w in chosen) / sum(w.size for w in chosen)
        assert live == pytest.approx(0.5, abs=0.03 if name == "str" else 1e-3), name
