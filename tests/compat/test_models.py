"""Every model of the catalogue, the whole way: sparse, trained, saved, loaded, stripped, exported.

What each stage gave is recorded as properties of the tests, from which `tools/compatibility.py`
writes the table of docs/compatibility.md.
"""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.compat.catalogue import CASES
from tests.compat.fresh import in_a_fresh_process
from tests.helpers import array, assert_same, jit_if_quicker

pytestmark = [
    pytest.mark.core,
    # Other packages' own, of masks that are dropped, weights that no output uses, `compile` of
    # tasks, layers without `build`, data sets that cannot be shuffled.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
BACKEND = keras.backend.backend()
DENSITY = 0.5


def outputs(model, x):
    return [array(value) for value in keras.tree.flatten(model(x))]


def assert_equal(found, expected):
    assert_same(found, expected)


def train(model, x, jit=None):
    """Two steps towards zero."""
    target = keras.tree.map_structure(
        lambda value: np.zeros(value.shape, "float32"), model(x)
    )
    jit = jit_if_quicker() if jit is None else jit
    model.compile(
        "adam", "mse", metrics=[], weighted_metrics=[], jit_compile=jit
    )
    model.fit(x, target, batch_size=2, verbose=0)


def with_known_sizes(model, x):
    """A model whose inputs have the sizes of the data, as LiteRT asks for."""

    def entry(name, value):
        return keras.Input(value.shape[1:], dtype=str(value.dtype), name=name)

    if isinstance(x, dict):
        inputs = {name: entry(name, value) for name, value in x.items()}
    elif isinstance(x, list):
        inputs = [
            entry(f"input_{place}", value) for place, value in enumerate(x)
        ]
    else:
        inputs = entry("input", x)
    return keras.Model(inputs, model(inputs))


def export(model, x, path):
    return kso.export_litert(
        with_known_sizes(model, x), path, sample=x, tolerance=1e-4
    )


@pytest.fixture
def stages(record_property):
    """Notes what a stage gave, at once."""

    def note(stage, result="ok"):
        record_property(f"stage {stage}", result)

    return note


@pytest.mark.parametrize(
    "name", [name for name, case in CASES.items() if BACKEND in case.backends]
)
def test_the_whole_way(name, tmp_path, stages):
    case = CASES[name]
    model, x = case.make(), case.data()
    before = outputs(model, x)
    paths = sorted(weight.path for weight in kso.prunable_weights(model))
    count = len(model.weights)

    sparse = kso.sparsify(model, DENSITY, seed=0)
    assert isinstance(sparse, type(model))
    if sparse is not model:
        assert_equal(outputs(model, x), before)
    weights = kso.prunable_weights(sparse)
    assert sorted(weight.path for weight in weights) == paths
    assert sum(w.live for w in weights) == round(
        DENSITY * sum(w.size for w in weights)
    )
    # One mask each, nothing twice.
    assert len(sparse.weights) == count + len(weights)
    stages("sparsify")

    # Torch would share the memory.
    raw = [np.array(weight.raw_value()) for weight in weights]
    live = [weight.live for weight in weights]
    train(sparse, x)
    moved = 0
    for weight, old, expected in zip(weights, raw, live, strict=True):
        new, mask = weight.raw_value(), weight.parametrization.mask_value()
        assert not new[~mask].any(), weight.path
        assert weight.live == np.count_nonzero(mask) == expected
        moved += not np.array_equal(new, old)
    assert moved > len(weights) / 2  # not all have gradients
    stages("fit")

    expected = outputs(sparse, x)
    sparse.save(tmp_path / "sparse.keras")
    plain = kso.strip(sparse)
    assert isinstance(plain, type(model))
    assert_equal(outputs(plain, x), expected)
    assert (
        sorted(weight.path for weight in kso.prunable_weights(plain)) == paths
    )
    stages("strip")
    plain.save(tmp_path / "plain.keras")
    alone, loaded = in_a_fresh_process(tmp_path, x, case.modules)
    assert_equal(loaded, expected)
    stages("load")
    assert_equal(alone, expected)
    stages("load without the package")

    if BACKEND != "tensorflow":
        return
    if case.litert is None:
        export(plain, x, tmp_path / "model.tflite")
        stages("LiteRT")
    else:
        with pytest.raises(kso.errors.ExportConversionError, match=case.litert):
            export(plain, x, tmp_path / "model.tflite")
        stages("LiteRT", f"lacks {case.litert}")
