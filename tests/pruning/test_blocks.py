"""`storage="blocks"`: speed by one word."""

import types
import warnings

import keras
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

import keras_sparse_ortho as kso
from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.errors import BudgetError, LayoutError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.pruning import BlockPlan, block_for
from tests.helpers import (
    array,
    classifier_loss,
    data,
    jit_if_quicker,
    reloaded,
    slow_case_on_jax,
    slow_on_tensorflow,
)
from tests.pruning.checks import fit

L = keras.layers
pytestmark = pytest.mark.core


def mlp(width=256, depth=3, inputs=64, outputs=3):
    keras.utils.set_random_seed(1)
    hidden = [
        L.Dense(width, activation="relu", name=f"hidden_{k}")
        for k in range(depth)
    ]
    return keras.Sequential(
        [keras.Input((inputs,)), *hidden, L.Dense(outputs, name="head")]
    )


def blocks_of(model):
    """By path the size of a kernel's blocks, `None` where it has none."""
    return {
        row.path: row.block
        for row in kso.report(model, orthogonality=False).rows
    }


def kernel(*shape, owner=None):
    """A kernel of a shape that is never allocated."""
    return PrunableWeight(
        "layer/kernel", types.SimpleNamespace(shape=shape), owner or L.Dense(1)
    )


@pytest.mark.parametrize(
    ("shape", "density", "expected"),
    [
        ((4096, 4096), 0.1, (128, 128)),
        ((1024, 1024), 0.1, (32, 32)),
        ((1024, 1024), 0.05, (16, 16)),
        ((768, 3072), 0.1, (32, 128)),  # long along the longer side
        ((2048, 512), 0.1, (64, 16)),
        ((512, 1536), 0.1, (16, 48)),  # three times as long
        ((512, 512), 0.1, (16, 16)),
        ((256, 256), 0.05, None),
        ((784, 1024), 0.15, (49, 64)),
        ((3, 3, 256, 256), 0.15, (16, 16)),
        ((784, 1024), 0.1, (25, 32)),  # padded
        ((512, 1365), 0.1, (15, 39)),
        ((1024, 10), 0.3, None),
        ((997, 1009), 0.3, None),
    ],
)
def test_the_largest_blocks_that_shape_and_density_allow(
    shape, density, expected
):
    block = block_for(kernel(*shape), density)
    assert (block and (block.rows, block.cols)) == expected
    assert block is None or block.regular


def test_densities_that_were_rounded_up_get_the_blocks_that_they_allow():
    dense = L.Dense(1)
    shapes = {"query": (512, 512), "key": (512, 128), "wide": (512, 1536)}
    weights = [
        PrunableWeight(k, types.SimpleNamespace(shape=v), dense)
        for k, v in shapes.items()
    ]
    asked = Budget(
        {"query": 0.123, "key": 0.25, "wide": 0.0955},
        {w.path: w.size for w in weights},
    )
    assert block_for(weights[0], asked["query"]) == kso.Block(
        16, 16, regular=True
    )
    plan = BlockPlan.of(weights, asked, None, orthogonal=True, budget="uniform")
    assert plan.budget["query"] == 0.125
    assert plan.blocks["query"] == kso.Block(32, 32, regular=True)


@slow_on_tensorflow
def test_one_word_draws_exactly_orthogonal_blocks():
    sparse = kso.sparsify(mlp(), 0.3, storage="blocks", seed=0)
    report = kso.report(sparse)
    assert blocks_of(sparse) == {
        **dict.fromkeys(["hidden_1/kernel", "hidden_2/kernel"], (32, 32)),
        "hidden_0/kernel": (16, 64),
        "head/kernel": None,
    }
    for row in report.rows[:3]:
        assert row.orthogonality_error < 1e-6
        assert row.dead_outputs == 0
        assert row.least_density == (
            0.25 if row.path == "hidden_0/kernel" else 0.125
        )
    head = report.rows[3]
    assert head.density == 1.0  # small: it stays dense, and is counted
    assert (
        head.not_on_blocks
        == "256 x 3 cannot be divided into blocks of about 16"
    )
    assert "head/kernel: 256 x 3 cannot" in str(report)
    assert 0.25 < report.density <= 0.3


def test_pruning_keeps_the_blocks_of_largest_magnitude():
    model = keras.Sequential([keras.Input((256,)), L.Dense(256, name="a")])
    before = array(model.layers[0].kernel)
    sparse = kso.prune(model, 0.0625, storage="blocks")
    (weight,) = kso.prunable_weights(sparse)
    assert weight.storage.block_size == (16, 16)
    mask = weight.storage.mask_value()
    assert weight.density == 0.0625
    np.testing.assert_array_equal(weight.value, np.where(mask, before, 0))
    sums = np.abs(before).reshape(16, 16, 16, 16).sum(axis=(1, 3))
    best = sums[linear_sum_assignment(sums, maximize=True)].sum()
    assert np.abs(weight.value).sum() == pytest.approx(best, rel=1e-5)
    assert not weight.storage.is_as_drawn()


def test_one_warning_names_what_is_not_on_blocks():
    inputs = keras.Input((5,), dtype="int32")
    x = L.Embedding(300, 64, name="embedding")(inputs)
    x = L.SimpleRNN(64, name="rnn")(x)
    x = L.Dense(128, name="wide")(L.Dense(128, name="hidden")(x))
    model = keras.Model(inputs, L.Dense(100, name="head")(x))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sparse = kso.sparsify(model, 0.3, "uniform", storage="blocks", seed=0)
    (message,) = [
        str(w.message) for w in caught if issubclass(w.category, UserWarning)
    ]
    for path in (
        "embedding/embeddings",
        "rnn/simple_rnn_cell/kernel",
        "rnn/simple_rnn_cell/recurrent_kernel",
    ):
        assert f"'{path}' is not on live blocks (only Dense," in message
    assert "'wide/kernel'" not in message
    report = kso.report(sparse)
    assert report.density <= 0.3
    stored = {w.path: w.storage for w in kso.prunable_weights(sparse)}
    assert all(storage.compact for storage in stored.values())


def test_given_densities_keep_their_meaning():
    budget = {
        "hidden_0/kernel": 0.5,
        "hidden_1/kernel": 0.3,
        "hidden_2/kernel": 1.0,
        "head": 0.5,
    }
    with pytest.warns(
        UserWarning,
        match="'hidden_1/kernel' has the density 0.25 instead of 0.3",
    ):
        sparse = kso.sparsify(mlp(), budget=budget, storage="blocks", seed=0)
    found = {weight.path: weight for weight in kso.prunable_weights(sparse)}
    assert found["hidden_0/kernel"].density == 0.5
    assert found["hidden_2/kernel"].density == 1.0
    assert found["head/kernel"].density == 0.5  # asked for by name: compact
    assert found["head/kernel"].storage.compact


def test_too_small_models_are_refused():
    with pytest.raises(BudgetError, match="No kernel would be sparse"):
        kso.sparsify(mlp(), 1.0, storage="blocks")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("orthogonal", [True, False])
def test_densities_of_random_models(seed, orthogonal):
    rng = np.random.default_rng(seed)
    sizes = [
        int(n)
        for n in rng.choice(
            [10, 32, 48, 64, 100, 128, 256, 300, 768, 784, 1024], 6
        )
    ]
    dense = L.Dense(1)
    weights = [
        PrunableWeight(
            f"d{k}/kernel", types.SimpleNamespace(shape=sizes[k : k + 2]), dense
        )
        for k in range(5)
    ]
    density = float(rng.uniform(0.1, 0.5))
    asked = kso.budgets.uniform(weights, density, orthogonal=orthogonal)
    try:
        plan = BlockPlan.of(
            weights, asked, None, orthogonal=orthogonal, budget="uniform"
        )
    except BudgetError as error:
        assert "No kernel would be sparse" in str(error)  # noqa: PT017
        return
    held = {weight.path for weight in plan.weights}
    dense_entries = sum(w.size for w in weights if w.path not in held)
    assert plan.budget.live + dense_entries <= asked.live
    left = asked.live - plan.budget.live - dense_entries
    for weight in plan.weights:
        if weight.path in plan.blocks:
            unit = plan.blocks[weight.path].unit((1, 1, *weight.shape))
            count = plan.budget.counts[weight.path]
            assert count % unit == 0
            assert count < 1.5 * density * weight.size + unit
            # Nothing that was rounded down could be rounded up.
            assert (
                count > (density - 0.02) * weight.size
                or unit > left
                or dense_entries
            )


def train(model, epochs=3):
    model.compile("adam", classifier_loss(), jit_compile=jit_if_quicker())
    return fit(model, epochs)


def regular(rows, cols):
    return kso.Block(rows, cols, regular=True)


LAYERS = {
    "plain": (lambda: L.Dense(128, "relu", name="a"), (128,), regular(16, 32)),
    "inputs": (lambda: L.Dense(128, "relu", name="a"), (101,), regular(17, 16)),
    "outputs": (
        lambda: L.Dense(101, "gelu", name="a"),
        (128,),
        regular(16, 17),
    ),
    "heads": (
        lambda: L.EinsumDense(
            "abc,cde->abde", (5, 4, 25), bias_axes="de", name="a"
        ),
        (5, 128),
        regular(16, 17),
    ),
    "channels": (
        lambda: L.Conv2D(128, 3, padding="same", name="a"),
        (4, 4, 101),
        regular(17, 16),
    ),
    "filters": (
        lambda: L.Conv1D(101, 2, strides=2, name="a"),
        (6, 128),
        regular(16, 17),
    ),
}


@slow_on_tensorflow
@pytest.mark.parametrize(
    "kind",
    [
        slow_case_on_jax(kind) if kind in ("heads", "filters") else kind
        for kind in LAYERS
    ],
)
def test_blocks_equal_the_masked_twin(kind, tmp_path):
    make, inputs, block = LAYERS[kind]
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input(inputs), make(), L.Flatten(), L.Dense(3, name="head")]
    )
    options = {
        "structure": block,
        "storage": "blocks",
        "exclude": "head",
        "seed": 0,
    }
    blocks = kso.sparsify(model, 0.5, "uniform", **options)
    (weight, _) = kso.prunable_weights(blocks)
    assert weight.storage.block_size == (block.rows, block.cols)
    assert weight.density == 0.5
    assert weight.storage.mask_value().mean() == 0.5
    assert kso.report(blocks).rows[0].orthogonality_error < 1e-6
    stored = array(blocks.layers[0].blocks)
    assert (stored.size > weight.live) == (kind != "plain")  # padded
    masked = kso.convert(blocks, "masked")
    for way in (masked, kso.convert(masked, "compact")):
        again = kso.convert(way, "blocks")
        np.testing.assert_array_equal(array(again.layers[0].blocks), stored)
    np.testing.assert_allclose(train(blocks), train(masked), atol=1e-5)
    x, _ = data(blocks, 3)
    expected = masked.predict(x, verbose=0)
    np.testing.assert_allclose(
        blocks.predict(x, verbose=0), expected, atol=1e-5
    )
    after = kso.convert(blocks, "masked")  # with the moments of the optimizer
    for one, other in zip(
        after.optimizer.variables, masked.optimizer.variables, strict=True
    ):
        np.testing.assert_allclose(array(one), array(other), atol=1e-5)
    # Padding and its moments are zero to the bit.
    live = array(blocks.layers[0].blocks)
    assert np.count_nonzero(live) <= weight.live
    for variable in blocks.optimizer.variables:
        if tuple(variable.shape) == live.shape:
            assert np.count_nonzero(array(variable)) <= weight.live
    np.testing.assert_allclose(
        kso.strip(blocks).predict(x, verbose=0), expected, atol=1e-5
    )
    loaded = reloaded(blocks, tmp_path)
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), expected, atol=1e-5
    )
    assert blocks_of(loaded) == blocks_of(blocks)


@slow_on_tensorflow
@pytest.mark.parametrize("kind", ["outputs", slow_case_on_jax("filters")])
@pytest.mark.parametrize("verb", [kso.sparsify, kso.prune])
def test_rigl_moves_padded_blocks_at_an_exact_count(kind, verb):
    inputs = {"outputs": (256,), "filters": (4, 256)}[kind]
    layer = (
        L.Dense(251, name="a")
        if kind == "outputs"
        else L.Conv1D(251, 2, name="a")
    )
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input(inputs), layer, L.Flatten(), L.Dense(3, name="head")]
    )
    sparse = verb(
        model, 0.2, budget="uniform", storage="blocks", exclude="head"
    )
    (weight, _) = kso.prunable_weights(sparse)
    assert array(weight.variable).size > weight.live  # padded
    before, live = weight.storage.mask_value(), weight.live
    x, y = data(sparse, 3)
    sparse.compile("adam", classifier_loss(), jit_compile=jit_if_quicker())
    moving = kso.callbacks.RigL((x, y), 4, frequency=1, fraction=0.8, seed=0)
    sparse.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[moving])
    mask = weight.storage.mask_value()
    assert (mask != before).any()
    assert mask.sum() == live == 3 * weight.size // 16


SHAPES = {
    "divisible": (128, 256),
    "classes": (256, 10),
    "prime": (127, 131),
    "thin": (64, 64),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "structure", [None, kso.Block(16, 16), kso.Block(16, 16, regular=True)]
)
def test_a_kernel_is_on_blocks_or_that_is_told(shape, structure):
    inputs, outputs = SHAPES[shape]
    model = keras.Sequential(
        [keras.Input((inputs,)), L.Dense(outputs, name="a")]
    )
    on_blocks = shape == "divisible"
    options = {"storage": "blocks", "structure": structure, "seed": 0}
    # A size that fits no kernel.
    if structure is not None and shape in (
        "classes",
        "prime",
    ):
        with pytest.raises(LayoutError, match="needs inputs divisible by 16"):
            kso.sparsify(model, 0.2, **options)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sparse = kso.sparsify(model, 0.2, **options)
    told = any(
        "'a/kernel' is not on live blocks" in str(w.message) for w in caught
    )
    assert told == (not on_blocks)
    found = blocks_of(sparse)["a/kernel"]
    assert (found is not None) == on_blocks
    assert None in (found, structure) or found == (16, 16)


LAYER_BY_LAYER = {
    "wanda": {"score": "wanda"},
    "magnitude": {},
    "any": {"score": "obs", "structure": kso.Block(32, 32)},
    "by error": {"score": "obs", "budget": "error"},
}


def trained_layers():
    """Correlated inputs, so that refits matter, and two kernels for blocks beside a small head."""
    keras.utils.set_random_seed(0)
    layers = [
        L.Conv1D(64, 2, padding="same", name="conv"),
        L.Dense(64, "relu", name="hidden"),
    ]
    model = keras.Sequential(
        [keras.Input((6, 64)), *layers, L.Dense(2, name="head")]
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 6, 64)) * np.arange(1, 65) ** -0.7
    return model, (x @ rng.normal(size=(64, 64))).astype("float32")


def errors_of(model, other, x):
    return float(
        np.mean((np.asarray(model.predict(x, verbose=0)) - other) ** 2)
    )


@pytest.mark.core
@pytest.mark.filterwarnings(
    "ignore:With storage"
)  # of a total that blocks come near to
@pytest.mark.parametrize("name", LAYER_BY_LAYER)
def test_trained_kernels_are_solved_on_blocks(name):
    options, (dense, x) = LAYER_BY_LAYER[name], trained_layers()
    expected = dense.predict(x, verbose=0)
    options = {
        "storage": "blocks",
        "exclude": "head",
        "budget": "uniform",
    } | options
    sparse = kso.prune(dense, 0.5, data=x, **options)
    blocks = blocks_of(sparse)
    assert None not in (blocks["conv/kernel"], blocks["hidden/kernel"])
    live = sum(w.live for w in kso.prunable_weights(sparse)[:2])
    assert 0.4 <= live / (3 * 64 * 64) <= 0.5
    if "structure" in options:
        assert {blocks["conv/kernel"], blocks["hidden/kernel"]} == {(32, 32)}
    masked = kso.prune(
        dense, 0.5, storage="blocks", exclude="head", budget="uniform"
    )
    if name != "wanda":
        refitted = errors_of(sparse, expected, x)
        assert refitted < 0.8 * errors_of(masked, expected, x)
    # On live blocks and masked, what was solved is the same function.
    dense_form = kso.convert(sparse, "masked")
    np.testing.assert_allclose(
        dense_form.predict(x, verbose=0),
        sparse.predict(x, verbose=0),
        atol=1e-4,
    )


def test_masks_of_blocks_in_dense_storage():
    dense, x = trained_layers()
    block = kso.Block(16, 16, regular=True)
    options = {"structure": block, "exclude": "head"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        masked = kso.prune(dense, 0.25, score="obs", data=x, **options)
        on_blocks = kso.prune(
            dense, 0.25, score="obs", data=x, storage="blocks", **options
        )
        by_magnitude = kso.prune(dense, 0.25, **options)
    for one, two in zip(
        *map(kso.prunable_weights, (masked, on_blocks)), strict=True
    ):
        np.testing.assert_allclose(one.value, two.value, atol=1e-6)
    for model in (masked, by_magnitude):
        for weight in kso.prunable_weights(model)[:2]:
            mask = weight.storage.mask_value().reshape(-1, 4, 16, 4, 16)
            assert (mask.all(axis=(2, 4)) == mask.any(axis=(2, 4))).all()
            assert len({*mask.any(axis=(0, 2, 4)).sum(axis=0)}) == 1
    with pytest.raises(
        ValueError, match=r"must be Block, NByM or Channels.*structure=4"
    ):
        kso.prune(dense, 0.25, structure=4)
