"""`density_for`: the search alone, and with real files."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError, DensityError
from keras_sparse_ortho.export import _density_for, density_for, export_litert
from tests.export.models import layers


def searched(size, bound, start=0.2):
    """The search where the file of density d has `size(d)` bytes."""
    search = _density_for._Search({"max_bytes": bound})
    density = start
    while density is not None and len(search.tried) < 4:
        found = int(size(density))
        search.add(_density_for.DensityTrial(density, found, None, found <= bound))
        density = search.next()
    return search


@pytest.mark.core
@pytest.mark.parametrize("start", [0.02, 0.2, 0.7])
@pytest.mark.parametrize("fixed", [0, 3_000, 8_000])
@pytest.mark.parametrize("goal", [0.03, 0.15, 0.6])
def test_nearly_linear_bytes_need_four_exports_at_most(start, fixed, goal):
    def size(d):
        return fixed + 100_000 * d**0.95

    bound = size(goal)
    search = searched(size, bound, start)
    assert search.best is not None
    assert 0.9 * goal <= search.best.density <= goal
    assert len(search.tried) <= 4


@pytest.mark.core
def test_steps_bounds_above_dense_and_bounds_below_all():
    stairs = searched(lambda d: 1_000 * np.ceil(20 * d), 6_400)
    assert 0.2 < stairs.best.density <= 0.3
    assert searched(lambda d: 1_000 * d, 5_000).best.density == 1
    flat = searched(lambda _: 1_000, 5_000)  # the file of a dense route
    assert flat.best.density == 1
    flat = searched(lambda _: 9_000, 5_000)
    assert (flat.best, len(flat.tried)) == (None, 2)
    assert searched(lambda d: 50_000 + d, 5_000).best is None


def mlp():
    keras.utils.set_random_seed(0)
    names = ("a", "b")
    hidden = [layers.Dense(128, name=name) for name in names]
    # With a name: those of Keras count the models, and are in the bytes of the file.
    return keras.Sequential([keras.Input((64,), name="x"), *hidden], name="mlp")


def sparse(density):
    return kso.sparsify(mlp(), density, "uniform", seed=0)


@pytest.mark.tensorflow_only
def test_max_bytes(tmp_path):
    found = density_for(sparse, max_bytes=30_000, mode="float32+csr")
    assert found.tried[0].density == 0.2
    assert len(found.tried) <= 4
    report = export_litert(found.model, tmp_path / "m.tflite", mode="float32+csr")
    [chosen] = [one for one in found.tried if one.density == found.density]
    assert chosen.bytes == report.bytes
    assert 0.9 * 30_000 < report.bytes <= 30_000
    assert found.route == "float32+csr"
    assert all(w.density == pytest.approx(found.density, abs=1e-3) for w in weights(found))
    assert "chosen" in str(found)
    assert "max_bytes=30,000" in str(found)
    again = density_for(sparse, max_bytes=30_000, mode="float32+csr")
    assert (again.density, again.tried) == (found.density, found.tried)


def weights(found):
    return kso.prunable_weights(found.model)


@pytest.mark.tensorflow_only
def test_max_ms_on_an_ethos_u_and_masks_by_prune():
    data = np.random.default_rng(0).standard_normal((40, 64)).astype("float32")
    found = density_for(
        lambda d: kso.prune(mlp(), d, budget="uniform"),
        max_ms=0.02,
        accelerator="ethos-u55-128",
        representative_data=data,
    )
    [chosen] = [one for one in found.tried if one.density == found.density]
    assert chosen.ms <= 0.02
    assert found.route == "int8"
    assert "ms (estimate)" in str(found)


@pytest.mark.tensorflow_only
def test_a_bound_that_cannot_be_kept():
    def picky(density):
        if density < 0.15:
            raise DensityError("too few entries")
        return sparse(density)

    with pytest.raises(BudgetError, match="for which it raised DensityError: too few") as refused:
        density_for(picky, max_bytes=9_000, mode="float32+csr")
    assert "The least seen: " in str(refused.value)
    with pytest.raises(BudgetError, match=r"The least seen: [\d,]+ bytes, at densities") as refused:
        density_for(sparse, max_bytes=20_000, mode="float32")  # dense files are all of one size
    assert "max_bytes=20,000" in str(refused.value)


def test_arguments_are_checked_before_anything_is_exported():
    def make(density):
        raise AssertionError(density)

    for options, rule in (
        ({}, "Received: neither"),
        ({"max_ms": 1.0}, "`max_ms` needs an `accelerator`"),
        ({"max_bytes": 9, "mode": "fast"}, "measured times"),
        ({"max_bytes": 9, "mode": "auto"}, "measured times"),
        ({"max_bytes": -1}, "above 0"),
        ({"max_ms": float("nan"), "accelerator": "ethos-u55-128"}, "above 0"),
        ({"max_ms": 1, "accelerator": "u55"}, "ethos-u85-2048"),
        ({"max_ms": 1, "accelerator": "ethos-u55-128", "mode": "float32"}, "leave `mode`"),
        ({"max_ms": 1, "accelerator": "ethos-u55-128", "quantization": "float16"}, "float16"),
    ):
        with pytest.raises(ValueError, match=rule):
            density_for(make, **options)
    with pytest.raises(DensityError, match="start"):
        density_for(make, max_bytes=9, start=0)
