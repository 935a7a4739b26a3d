"""`probe`: from a dense model to a pattern of live blocks, and to a model drawn on it."""

import json

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import probe
from keras_sparse_ortho.errors import BudgetError, LayoutError, NotPrunableError
from keras_sparse_ortho.orthogonal import GivenBlocks
from tests.helpers import array, jit, reloaded

L = keras.layers


def network(*, compiled=True):
    """A convolution and a layer of features, with a head that has no blocks."""
    conv = L.Conv1D(32, 3, activation="relu", name="conv")
    layers = [
        conv,
        L.Flatten(),
        L.Dense(64, "relu", name="wide"),
        L.Dense(3, name="head"),
    ]
    model = keras.Sequential([keras.Input((4, 32)), *layers])
    if compiled:
        model.compile(keras.optimizers.Adam(0.02), "mse", jit_compile=jit())
    return model


def data():
    """Half of the inputs are nothing but zeros."""
    x = np.random.default_rng(0).normal(size=(64, 4, 32)) * (np.arange(32) < 16)
    return x.astype("float32"), x[:, 0, :3].astype("float32")


@pytest.mark.core
def test_a_probe_finds_the_blocks_that_a_new_start_is_drawn_on(tmp_path):
    dense = network()
    before = [array(weight) for weight in dense.weights]
    pattern = probe(
        dense, 0.25, data(), steps=40, structure=(8, 8), batch_size=16
    )
    assert all(
        np.array_equal(a, array(b))
        for a, b in zip(before, dense.weights, strict=True)
    )
    assert int(dense.optimizer.iterations) == 0
    # Not the head.
    assert [*pattern.blocks] == [*pattern] == ["conv/kernel", "wide/kernel"]
    conv = pattern.blocks["conv/kernel"].array
    assert conv[:2].sum() > conv[2:].sum()  # inputs that are used
    pattern.save(tmp_path / "budget.json")
    again = kso.Budget.load(tmp_path / "budget.json")
    assert again == pattern != kso.Budget(dict(pattern))
    assert str(again.blocks["conv/kernel"]).count("#") == conv.sum()

    sparse = kso.sparsify(dense, budget=again, storage="blocks", seed=0)
    for weight, row in zip(
        kso.prunable_weights(sparse)[:2], kso.report(sparse).rows, strict=False
    ):
        assert weight.storage.in_blocks
        mask = weight.layout.to_canonical(weight.mask)
        assert (
            GivenBlocks.of_mask(mask, kso.Block(8, 8))
            == pattern.blocks[weight.path]
        )
        assert weight.density == pattern[weight.path]
        assert row.orthogonality_error is not None
    masked = kso.sparsify(dense, budget=again, seed=0)
    for model in (sparse, masked):
        loaded = reloaded(model, tmp_path)
        for one, other in zip(
            *map(kso.prunable_weights, (loaded, sparse)), strict=True
        ):
            np.testing.assert_array_equal(one.value, other.value)


def test_what_a_probe_refuses(tmp_path):
    refused = [
        (
            NotPrunableError,
            "compile it first",
            {"model": network(compiled=False)},
        ),
        (ValueError, "a size of blocks", {"structure": "2:4"}),
        (LayoutError, "no kernel that", {"structure": (7, 7)}),
        (TypeError, "no_such", {"no_such": 1}),
    ]
    for error, match, changed in refused:
        options = {
            "model": network(),
            "steps": 12,
            "structure": (8, 8),
            **changed,
        }
        with pytest.raises(error, match=match):
            probe(options.pop("model"), 0.25, data(), **options)
    x, y = data()
    for wrong, match in (
        ((x * np.nan, y), "must be finite"),
        ((x, y * np.nan), "must be finite"),
    ):
        with pytest.raises(ValueError, match=match):
            probe(network(), 0.25, wrong, steps=12, structure=(8, 8))
    other = kso.Budget(
        {"wide/kernel": 0.5}, blocks={"wide/kernel": GivenBlocks(8, 8, ("10",))}
    )
    with pytest.raises(
        LayoutError, match=r"'wide/kernel' does not fit.*has 8 x 8 blocks"
    ):
        kso.sparsify(network(), budget=other)
    row = {
        "weight": "wide/kernel",
        "density": 0.5,
        "blocks": {"rows": 8, "cols": 8, "live": [1]},
    }
    for live in (["12"], ["10", "1"]):
        row["blocks"]["live"] = live
        (tmp_path / "other.json").write_text(json.dumps({"budget": [row]}))
        with pytest.raises(BudgetError, match="equal strings of 0 and 1"):
            kso.Budget.load(tmp_path / "other.json")
