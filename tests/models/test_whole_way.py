"""Models of every structure, the whole way: sparse, trained, saved and loaded, stripped.

Every layer that a test makes moves Keras' automatic numbers on, so that a model that is loaded here
has other ones than it was saved with, as in a fresh process.
"""

import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array, slow_where_traced
from tests.models import networks
from tests.models.networks import HEAVY, MODELS, SHAPE

L = keras.layers
pytestmark = pytest.mark.core
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 50, (8, 6)).astype("int32")
IMAGES, WIDE, X = (
    RNG.normal(size=(8, *s)).astype("float32") for s in (SHAPE, (16,), (6,))
)


def outputs(model, x):
    return array(model(x, training=False))


def flops(model):
    found = kso.prunable_weights(model, flops=True)
    assert len({weight.path for weight in found}) == len(found)
    return {weight.path: weight.flops for weight in found}


def live(model):
    return {weight.path: weight.live for weight in kso.prunable_weights(model)}


def assert_shares_nothing(one, other):
    assert not {id(v) for v in one.weights} & {id(v) for v in other.weights}


def whole_way(model, x, folder=None, storage="masked"):
    """The sparse model, after a step of training, and the stripped one; both are loaded again.

    Where a model cannot be saved, there is no folder.
    """
    before, names = outputs(model, x), [layer.name for layer in model.layers]
    model.compile("sgd", "mse", jit_compile=False)
    sparse = kso.sparsify(model, 0.4, seed=0, storage=storage)
    assert isinstance(sparse, type(model))
    assert_shares_nothing(sparse, model)
    weights = kso.prunable_weights(sparse)
    assert flops(sparse) == flops(model)
    assert model.compiled
    assert not sparse.compiled
    assert sum(w.live for w in weights) == round(
        0.4 * sum(w.size for w in weights)
    )
    # One mask each, nothing twice.
    assert len(sparse.weights) == len(model.weights) + len(weights)
    assert all(weight.parametrization.is_as_drawn() for weight in weights)

    sparse.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    sparse.train_on_batch(x, np.ones_like(before))
    for weight in weights:
        dead = ~weight.parametrization.mask_value()
        assert not (
            weight.raw_value() if storage == "masked" else weight.value
        )[dead].any()
    np.testing.assert_array_equal(outputs(model, x), before)
    expected = outputs(sparse, x)
    assert not np.array_equal(expected, before)

    plain = kso.strip(sparse)
    assert type(plain) is type(model)
    assert not plain.compiled
    assert getattr(plain, "optimizer", None) is None  # so no slots in its file
    assert_shares_nothing(plain, sparse)
    assert (
        [layer.name for layer in sparse.layers]
        == [layer.name for layer in plain.layers]
        == names
    )
    np.testing.assert_allclose(
        outputs(plain, x), expected, atol=1e-6 if storage != "masked" else 0
    )
    np.testing.assert_array_equal(outputs(sparse, x), expected)
    # The zeros are in the weights now; a live weight may still have the value 0 that it began with.
    assert live(plain) == {w.path: np.count_nonzero(w.value) for w in weights}
    assert all(
        "keras_sparse_ortho" not in type(la).__module__
        for la in plain._flatten_layers()
    )
    if folder is None:
        return sparse, plain
    # Files of compact weights are for masks of the same counts.
    if storage == "masked":
        other = kso.sparsify(model, 0.4, seed=1)
        sparse.save_weights(folder / "sparse.weights.h5")
        other.load_weights(folder / "sparse.weights.h5")
        np.testing.assert_array_equal(outputs(other, x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras', of any `Tokens` that it loads
        for name, kept in (("sparse", sparse), ("plain", plain)):
            kept.save(folder / f"{name}.keras")
            loaded = keras.saving.load_model(folder / f"{name}.keras")
            assert isinstance(loaded, type(model))
            np.testing.assert_array_equal(outputs(loaded, x), outputs(kept, x))
            assert len(loaded.weights) == len(kept.weights)
            if name == "sparse":
                assert live(loaded) == live(kept)
                np.testing.assert_allclose(
                    outputs(kso.strip(loaded), x), expected, atol=1e-6
                )
                loaded.save(folder / "sparse.keras")
                again = keras.saving.load_model(folder / "sparse.keras")
                np.testing.assert_array_equal(outputs(again, x), expected)
    return sparse, plain


SAVED = {
    "backbone": (networks.Backbone, {"ids": IDS}),
    "task": (networks.task, {"ids": IDS}),
    "stack": (networks.stack, X),
    "a class of inputs and outputs": (networks.with_step, X),
    "built late": (networks.built_late, IDS),
    "late": (lambda: networks.Late(name="late"), WIDE),
    "tied": (networks.tied, IDS),
}
NOT_SAVED = {
    **{name: (make, IMAGES) for name, make in MODELS.items()},
    "two parts, models": (lambda: networks.halves(keras.Model, False), IDS),
    "two parts, models, and at the top": (
        lambda: networks.halves(keras.Model, True),
        IDS,
    ),
    "two parts, layers": (lambda: networks.halves(L.Layer, False), IDS),
    "two parts, layers, and at the top": (
        lambda: networks.halves(L.Layer, True),
        IDS,
    ),
    "aliases": (networks.Aliases, X),
    "concealed": (networks.Concealed, X),
    "a configuration of more layers": (networks.growing, X),
}
COMPACT = ("backbone", "task", "built late", "concealed", "tied")
SLOW_WHERE_TRACED = ("stack", "late", "built late", *HEAVY)
CASES = [(name, "masked") for name in (*SAVED, *NOT_SAVED)] + [
    (name, "compact") for name in COMPACT
]


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        pytest.param(*case, marks=slow_where_traced)
        if case[0] in SLOW_WHERE_TRACED
        else case
        for case in CASES
    ],
)
def test_the_whole_way(name, storage, tmp_path):
    make, x = (SAVED | NOT_SAVED)[name]
    model = make()
    model(x)
    whole_way(model, x, tmp_path if name in SAVED else None, storage)


def test_attributes_of_graphs_follow():
    sparse, plain = whole_way(networks.task(len), {"ids": IDS})
    for model in (sparse, plain):
        bone = model.backbone
        assert model.preprocessor is len
        assert (
            model.head.embedding
            is bone.embedding
            is bone.get_layer("embedding")
        )
        assert bone.blocks[0] is bone.get_layer("mixing")
        assert bone.mixer is bone.blocks[0].inner[0]
        levels = keras.Model(bone.input, bone.levels)({"ids": IDS})["mixing"]
        mixed = bone.blocks[0](bone.embedding(IDS))
        np.testing.assert_array_equal(array(levels), array(mixed))
    assert isinstance(sparse.backbone.mixer, kso.PrunableLayer)
    stack = networks.stack()
    sparse, plain = whole_way(stack, X)
    for model, kind in ((sparse, kso.PrunableLayer), (plain, L.Dense)):
        tower = model.get_layer("tower")
        assert type(model) is networks.Stack
        assert isinstance(tower, networks.Tower)
        assert (
            tower.first is tower.layers[0] is not stack.get_layer("tower").first
        )
        assert type(tower.first) is kind
        assert tower.parts["out"] == [tower.layers[-1]]
        np.testing.assert_array_equal(
            array(model.halved(X)), outputs(model, X) / 2
        )
    assert type(plain.get_layer("tower")) is networks.Tower


def test_models_of_a_class_inside_functional_ones(tmp_path):
    ids, wide = keras.Input((6,), dtype="int32", name="ids"), keras.Input((16,))
    bone, late = networks.Backbone(name="bone"), networks.Late(name="late")
    outer = keras.Model(ids, L.Dense(2, name="out")(bone({"ids": ids})))
    sparse, _ = whole_way(outer, IDS, tmp_path)
    assert isinstance(sparse.get_layer("bone"), networks.Backbone)
    assert type(bone.mixer) is L.Dense
    copy = type(sparse).from_config(sparse.get_config())
    copy.set_weights(sparse.get_weights())
    np.testing.assert_array_equal(outputs(copy, IDS), outputs(sparse, IDS))
    late(WIDE)
    whole_way(keras.Model(wide, late(wide)), WIDE, tmp_path)


def test_holders_of_one_layer_hold_one_wrapper():
    model = networks.halves(L.Layer, True)
    model(IDS)
    for storage in ("masked", "compact"):
        sparse, plain = whole_way(model, IDS, storage=storage)
        for own in (sparse, plain):
            assert own.dec.embedding is own.enc.embedding is own.embedding
        assert isinstance(sparse.embedding, kso.PrunableLayer)
    aliases = networks.Aliases()
    aliases(X)
    sparse, _ = whole_way(aliases, X)
    assert sparse._chain[0] is sparse.first
    assert sparse._pair.first is sparse.third
    sparse, _ = whole_way(networks.tied(), IDS)
    assert sparse.get_layer("head").embedding is sparse.get_layer("embedding")
    # Of which none is masked.
    other = kso.sparsify(networks.tied(), 0.3, seed=0, include="hidden")
    assert other.get_layer("head").embedding is other.get_layer("embedding")
