"""Plans: what each kernel would become, and the only function that makes it true."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError
from tests.helpers import Chain, array

L = keras.layers
pytestmark = pytest.mark.core
X = np.random.default_rng(0).normal(size=(4, 16)).astype("float32")


def network(name="hidden", written=False):
    keras.utils.set_random_seed(0)
    layers = [
        L.Dense(32, activation="tanh", name=name),
        L.Dense(8, name="head"),
    ]
    model = (
        Chain(*layers)
        if written
        else keras.Sequential([keras.Input((16,)), *layers])
    )
    model(X)
    return model


def masked(model):
    return kso.sparsify.in_place(model, 0.25, seed=0)


BLOCKS = {"structure": kso.Block(4, 4, regular=True), "storage": "blocks"}
VERBS = {
    "sparsify": (None, kso.sparsify, (0.25,), {"seed": 0}),
    "compact": (None, kso.sparsify, (0.25,), {"seed": 0, "storage": "compact"}),
    "prune": (None, kso.prune, (0.25,), {}),
    "blocks": (None, kso.prune, (0.25,), BLOCKS | {"include": "hidden"}),
    "apply_masks": (
        None,
        kso.apply_masks,
        ({"head": np.eye(32, 8, dtype=bool)},),
        {},
    ),
    "parametrize": (
        None,
        kso.parametrize,
        (kso.SoftThreshold(s_init=-4.0),),
        {},
    ),
    "convert": (masked, kso.convert, ("compact",), {}),
    "strip": (masked, kso.strip, (), {}),
    "quantize_aware": (masked, kso.quantize_aware, ("int4", None), {}),
}


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("name", VERBS)
def test_a_function_is_its_plan_applied(name, written):
    prepare, verb, args, options = VERBS[name]
    model = network(written=written)
    model = prepare(model) if prepare else model
    before = array(model(X))
    plan = verb.plan(model, *args, **options)
    expected = array(verb(model, *args, **options)(X))
    for _ in range(2):  # a plan that is the user's is not used up
        np.testing.assert_array_equal(
            array(kso.models.apply(model, plan)(X)), expected
        )
    np.testing.assert_array_equal(array(model(X)), before)
    assert verb.in_place(model, *args, **options) is model
    np.testing.assert_array_equal(array(model(X)), expected)


def test_what_a_plan_says():
    model = network()
    assert str(
        kso.sparsify.plan(model, 0.25, "uniform", seed=0)
    ).splitlines() == [
        "kernel         shape     becomes  live  density  values",
        "hidden/kernel  (16, 32)  masked   128   0.25     new",
        "head/kernel    (32, 8)   masked   64    0.25     new",
    ]
    plan = kso.parametrize.plan(model, kso.SoftThreshold(), include="head")
    assert list(plan) == ["head/kernel"]
    assert str(plan).splitlines()[1].split()[3:] == [
        "SoftThreshold",
        "-",
        "-",
        "kept",
    ]
    quantized = str(kso.quantize_aware.plan(model, "int4", None))
    assert "masked, FakeQuantization" in quantized


def test_plans_for_another_model_are_refused():
    plan = kso.prune.plan(network(), 0.25)
    with pytest.raises(
        UnknownWeightError, match=r"another model.*Received: .*hidden/kernel"
    ):
        kso.models.apply(network("other"), plan)
    trained = kso.convert.plan(kso.sparsify(network(), 0.5, seed=0), "compact")
    with pytest.raises(
        UnknownWeightError, match=r"another model.*Received: .*hidden/kernel"
    ):
        # A twin: the same paths.
        kso.models.apply(kso.sparsify(network(), 0.5, seed=0), trained)


def test_a_result_that_is_not_as_planned_is_refused():
    model = network()
    plan = kso.prune.plan(model, 0.25)
    found = kso.PrunableLayer.build

    def spoilt(self, *args):
        found(self, *args)
        for own in self.parametrizations.values():
            own.mask.assign(np.ones(own.mask.shape, bool))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kso.PrunableLayer, "build", spoilt)
        with pytest.raises(
            NotPrunableError, match=r"that were planned.*Received: others for"
        ):
            kso.models.apply(model, plan)


def test_all_kernels_of_a_wrapped_layer_change_or_none():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4, 16)), L.LSTM(8, name="rnn")])
    sparse = kso.sparsify(model, 0.5, seed=0)
    plan = kso.convert.plan(sparse, "compact")
    some = {path: plan[path] for path in list(plan)[:1]}
    with pytest.raises(
        NotPrunableError, match="All kernels of a wrapped layer"
    ):
        kso.models.apply(sparse, kso.models.Plan(plan.weights[:1], some))
