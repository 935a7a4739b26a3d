"""Every refusal of every transform leaves the user's model as it was."""

import json

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import (
    BudgetError,
    DensityError,
    LayoutError,
    NotPrunableError,
)
from keras_sparse_ortho.errors import UnknownWeightError as Unknown
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.models import ResultChecks, SameFunction, _rewrite
from keras_sparse_ortho.parametrizations import CompactMask, StraightThroughTopK
from tests.helpers import array

L = keras.layers
X = np.random.default_rng(0).normal(size=(4, 12)).astype("float32")
Y = np.zeros((4, 3), "float32")


def layers():
    relu = {"activation": "relu"}
    return [
        L.Dense(16, name="a", **relu),
        L.Dense(16, name="b", **relu),
        L.Dense(3, name="c"),
    ]


class Written(keras.Model):
    """Holds its layers in an attribute, a list and a dict, one of them twice."""

    def __init__(self):
        super().__init__(name="net")
        first, second, third = layers()
        self.first = first
        self.chain = [first, second]
        self.heads = {"main": (third,)}

    def call(self, x):
        for layer in self.chain:
            x = layer(x)
        return self.heads["main"][0](x)


def functional():
    x = inputs = keras.Input((12,))
    for layer in layers():
        x = layer(x)
    return keras.Model(inputs, x, name="net")


def written():
    model = Written()
    model(X)
    return model


def compiled(model, optimizer):
    model.compile(optimizer, "mse", jit_compile=False)
    model.train_on_batch(X, Y)
    return model


def state(model):
    """All that a user could see of a model, with what must stay the same object."""
    held = [
        (id(layer), layer.name, type(layer), path)
        for layer, path in walk(model, "")
    ]
    holding = [sorted(vars(layer)) for layer, _ in walk(model, "")]
    weights = [
        (id(v), v.path, v.trainable, array(v).tobytes()) for v in model.weights
    ]
    attributes = [
        id(getattr(model, name, None))
        for name in ("first", "chain", "optimizer")
    ]
    try:
        config = json.dumps(model.get_config(), default=str)
    # Of a class that does not say what it is made by.
    except NotImplementedError:
        config = ""
    kernels = [(w.path, w.live) for w in kso.prunable_weights(model)]
    compiled = model.compiled, [id(v) for v in model.trainable_variables]
    outputs = array(model(X)).tobytes()
    return (
        held,
        holding,
        weights,
        attributes,
        config,
        kernels,
        compiled,
        outputs,
    )


SOFT = kso.SoftThreshold()
FULL = np.ones((12, 16), bool)
DENSE = {
    "sparsify": [
        (DensityError, {}),
        (DensityError, {"density": 0}),
        (DensityError, {"density": 1.5}),
        (BudgetError, {"density": 0.01}),
        (BudgetError, {"density": 0.5, "budget": "snip"}),
        (BudgetError, {"budget": {"a": 0.5}}),
        (BudgetError, {"budget": {"a": 0.5, "b": 0.01, "c": 1.0}}),
        (
            BudgetError,
            {"density": 0.2, "budget": kso.Budget({"a/kernel": 0.5})},
        ),
        (Unknown, {"budget": {"nowhere": 0.5}}),
        (ValueError, {"density": 0.5, "initializer": None}),
        (ValueError, {"density": 0.5, "initializer": "glorot"}),
        (
            ValueError,
            {
                "density": 0.5,
                "initializer": "random_sparse",
                "structure": kso.NByM(2, 4),
            },
        ),
        (LayoutError, {"density": 0.5, "structure": kso.Block(5, 5)}),
        (ValueError, {"density": 0.5, "storage": "disk"}),
        (ValueError, {"density": 0.5, "seed": "zero"}),
        (Unknown, {"density": 0.5, "include": "nowhere"}),
        (Unknown, {"density": 0.5, "exclude": "nowhere"}),
        (NotPrunableError, {"density": 0.5, "include": lambda weight: False}),
    ],
    "prune": [
        (DensityError, {}),
        (DensityError, {"density": 2}),
        (BudgetError, {"density": 0.5, "budget": "snip"}),
        (BudgetError, {"density": 0.001}),
        (ValueError, {"density": 0.5, "score": "luck"}),
        (ValueError, {"density": 0.5, "score": "snip"}),
        (ValueError, {"density": 0.5, "score": "synflow", "data": X}),
        (ValueError, {"density": 0.5, "score": lambda kernel: 1}),
        (Unknown, {"density": 0.5, "include": "nowhere"}),
        (ValueError, {"density": 0.5, "storage": "disk"}),
    ],
    "apply_masks": [
        (NotPrunableError, {}),
        (Unknown, {"include": "nowhere"}),
        (Unknown, {"masks": {"nowhere": FULL}}),
        (NotPrunableError, {"masks": {"a/kernel": FULL.T}}),
        (NotPrunableError, {"masks": {"a/kernel": FULL.astype("float32")}}),
        (NotPrunableError, {"masks": {"a/kernel": ~FULL}}),
        (NotPrunableError, {"masks": {}}),
    ],
    "parametrize": [
        (ValueError, {"parametrization": "soft"}),
        (ValueError, {"parametrization": kso.MagnitudeMask}),
        (
            ValueError,
            {"parametrization": kso.SoftThreshold(granularity="global")},
        ),
        (NotPrunableError, {"parametrization": SOFT, "density": 0.5}),
        (
            BudgetError,
            {"parametrization": StraightThroughTopK(0.5), "budget": "snip"},
        ),
        (Unknown, {"parametrization": SOFT, "exclude": "nowhere"}),
    ],
    "convert": [
        *(
            (NotPrunableError, {"storage": way})
            for way in ("masked", "compact", "blocks")
        ),
        (ValueError, {"storage": "auto"}),
    ],
}
AGAIN = {
    "sparsify": [(NotPrunableError, {"density": 0.5})],
    "prune": [(NotPrunableError, {"density": 0.5})],
    "parametrize": [(NotPrunableError, {"parametrization": SOFT})],
    "convert": [
        (NotPrunableError, {"storage": "blocks"}),
        (NotPrunableError, {"storage": "blocks", "block": 4}),
    ],
}


def refuse_all(model, table):
    before = state(model)
    for verb, cases in table.items():
        for error, arguments in cases:
            with pytest.raises(error, match="Received: "):
                getattr(kso, verb)(model, **arguments)
            assert state(model) == before, (verb, arguments)


@pytest.mark.core
@pytest.mark.parametrize("make", [functional, written])
def test_dense_models(make):
    model = compiled(make(), "sgd")
    refuse_all(model, DENSE)
    if make is written:
        refuse_all(model, {"remove_channels": [(NotPrunableError, {})]})
    spoilt = make()
    spoilt.weights[0].assign(np.full((12, 16), np.inf))
    refuse_all(
        spoilt,
        {
            v: [(NotPrunableError, {"density": 0.5})]
            for v in ("sparsify", "prune")
        },
    )
    held = make()
    held.weights[0].constraint = keras.constraints.MaxNorm(2)
    compact = {"density": 0.5, "storage": "compact"}
    refuse_all(held, {"sparsify": [(NotPrunableError, compact)]})


# A model that is cloned is only read; on JAX it compiles for long.
FORMS = [written, pytest.param(functional, marks=pytest.mark.slow_on("jax"))]


@pytest.mark.core
@pytest.mark.parametrize("make", FORMS)
def test_sparse_models(make):
    masked = compiled(
        kso.sparsify(make(), 0.5, seed=0), keras.optimizers.Adafactor()
    )
    # Adafactor keeps factors of whole kernels.
    refuse_all(
        masked, {**AGAIN, "convert": [(ValueError, {"storage": "compact"})]}
    )
    refuse_all(kso.convert(kso.sparsify(make(), 0.5, seed=0), "compact"), AGAIN)
    learnt = kso.parametrize(make(), SOFT)
    refuse_all(
        learnt,
        {**AGAIN, "convert": [(NotPrunableError, {"storage": "compact"})]},
    )
    scheduled = kso.parametrize(
        make(), kso.MagnitudeMask(kso.schedules.Constant(0.5, 0))
    )
    refuse_all(scheduled, {**AGAIN, "strip": [(NotPrunableError, {})]})


class Broken(Exception):
    pass


def breaks(*_, **__):
    raise Broken


# The model to begin with, the function, its arguments, and what fails inside.
LATE = [
    ("masked", kso.strip, {}, SameFunction, "check"),
    ("masked", kso.strip, {}, kso.PrunableLayer, "release"),
    (
        "masked",
        kso.convert,
        {"storage": "compact"},
        ResultChecks,
        "_carry_slots",
    ),
    (
        "masked",
        kso.convert,
        {"storage": "compact"},
        SameFunction,
        "check",
    ),
    ("masked", kso.convert, {"storage": "compact"}, CompactMask, "settle"),
    (
        "compact",
        kso.convert,
        {"storage": "masked"},
        ResultChecks,
        "_carry_slots",
    ),
    ("compact", kso.convert, {"storage": "masked"}, kso.FixedMask, "settle"),
    (
        "compact",
        kso.convert,
        {"storage": "masked"},
        _rewrite,
        "save_with_layers",
    ),
    (
        "learnt",
        kso.strip,
        {},
        SameFunction,
        "check",
    ),  # its raw weights are others
    (
        "drawn",
        kso.apply_masks,
        {"storage": "blocks"},
        _rewrite,
        "save_with_layers",
    ),
    ("drawn", kso.sparsify, {"density": 0.5}, kso.FixedMask, "mark_as_drawn"),
    (
        "drawn",
        kso.sparsify,
        {"density": 0.5, "storage": "compact"},
        CompactMask,
        "mark_as_drawn",
    ),
]


def drawn(model):
    """A dense model with live blocks in the kernel of a layer."""
    blocks = kso.initializers.ExactOrthogonal(
        0.5, seed=0, structure=kso.Block(4, 4, regular=True)
    )
    layer = model.get_layer("b")
    layer.kernel_initializer = blocks
    layer.kernel.assign(blocks((16, 16)))
    return model


def third_time(function):
    """A method that works twice."""
    calls = []

    def fails(*args, **kwargs):
        calls.append(args)
        return breaks() if len(calls) == 3 else function(*args, **kwargs)

    return fails


@pytest.mark.core
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "make",
    [pytest.param(written, marks=pytest.mark.slow_on("tensorflow")), FORMS[1]],
)
def test_failures_when_much_has_been_changed(make, in_place, monkeypatch):
    models = {
        "masked": compiled(
            kso.sparsify(make(), 0.5, seed=0), keras.optimizers.Adam()
        ),
        "compact": compiled(
            kso.sparsify(make(), 0.5, seed=0, storage="compact"), "adam"
        ),
        "learnt": kso.parametrize(make(), SOFT),
        "drawn": drawn(make()),
    }
    for name, verb, arguments, owner, attribute in LATE:
        before = state(models[name])
        several = attribute in ("release", "settle", "mark_as_drawn")
        failure = third_time(getattr(owner, attribute)) if several else breaks
        with monkeypatch.context() as patch:
            patch.setattr(owner, attribute, failure)
            with pytest.raises(Broken):
                (verb.in_place if in_place else verb)(models[name], **arguments)
        assert state(models[name]) == before, (name, verb, attribute)
    # Go on as if nothing had happened.
    for model in (
        models["masked"],
        models["compact"],
    ):
        counts = {
            weight.path: weight.live for weight in kso.prunable_weights(model)
        }
        model.train_on_batch(X, Y)
        for weight in kso.prunable_weights(model):
            assert np.count_nonzero(weight.value) <= counts[weight.path]
        expected = array(model(X))
        np.testing.assert_array_equal(array(kso.strip(model)(X)), expected)
    blocks = kso.apply_masks(models["drawn"], storage="blocks").get_layer("b")
    assert isinstance(blocks, kso.layers.BlockSparseDense)


class Asking(L.Layer):
    """Computes something else where the layer inside is of another class than at first."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = L.Dense(12, name="inner")
        self.known = L.Dense

    def build(self, input_shape):
        self.inner.build(input_shape)

    def call(self, x):
        return self.inner(x) * (1 if type(self.inner) is self.known else 2)


@pytest.mark.core
def test_a_result_that_computes_something_else_is_refused():
    inputs = keras.Input((12,))
    model = keras.Model(
        inputs, L.Dense(3, name="a")(Asking(name="asks")(inputs)), name="net"
    )
    before = state(model)
    for verb in (kso.prune, kso.sparsify):
        with pytest.raises(
            NotPrunableError,
            match=r"something else.* by up to [\d.]+ for one sample",
        ):
            verb(model, 0.5)
        assert state(model) == before
    model.layers[1].known = None
    sparse = kso.sparsify(model, 0.5, seed=0)
    sparse.layers[1].known = kso.PrunableLayer
    sparse(X)
    before = state(sparse)
    with pytest.raises(NotPrunableError, match="something else"):
        kso.strip(sparse)
    assert state(sparse) == before
