"""What is frozen when a model is made from another one can be unfrozen, and then trains."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.parametrizations import (
    LowRankSoftThreshold,
    SoftThreshold,
)
from tests.helpers import array, slow_on_jax
from tests.models.returned import CASES, CLASSES, KINDS, SHAPE, STORAGES, x

pytestmark = pytest.mark.core

L = keras.layers
y = np.random.default_rng(1).normal(size=(len(x), CLASSES)).astype("float32")


def saved(model, folder):
    path = folder / "m.keras"
    model.save(path)
    return keras.models.load_model(path)


def cloned(model, folder):
    clone = keras.models.clone_model(model)
    if not clone.built:
        clone.build((None, *SHAPE))
    clone.set_weights(model.get_weights())
    return clone


def unmoved(model):
    """The numbers of the trainable variables that one training step leaves as they are."""
    model.compile(keras.optimizers.SGD(0.5), "mse", run_eagerly=True)
    before = [array(variable) for variable in model.trainable_variables]
    model.train_on_batch(x, y)
    after = [array(variable) for variable in model.trainable_variables]
    pairs = enumerate(zip(before, after, strict=True))
    return [number for number, (old, new) in pairs if np.array_equal(old, new)]


def unfreeze(model):
    model.trainable = (
        False  # Keras on TensorFlow does nothing where the value is the old one
    )
    model.trainable = True


def of(name, *, frozen):
    """The model of a name in `RETURNED`, made of a frozen dense model or of one that trains."""
    storage, _, kind = name.partition(" of ")
    keras.utils.set_random_seed(0)
    dense = KINDS[kind]()
    dense.trainable = not frozen
    return STORAGES[storage](dense)


@slow_on_jax  # where each operation of each model is compiled
@pytest.mark.parametrize("name", CASES)
def test_what_was_frozen_trains_once_it_is_unfrozen(name):
    model, never_frozen = of(name, frozen=True), of(name, frozen=False)
    assert not model.trainable_variables
    assert [v.name for v in model.variables] == [
        v.name for v in never_frozen.variables
    ]
    unfreeze(model)
    trainable = [variable.trainable for variable in model.variables]
    assert trainable == [
        variable.trainable for variable in never_frozen.variables
    ]
    # Some never move: the bias of an attention's keys has no gradient.
    assert unmoved(model) == unmoved(never_frozen)


_QUICK = (
    "compact of sequential",
    "blocks of recurrent",
    "low rank of functional",
)


_OTHERS = [case.values[0] for case in CASES if not case.marks]
_AGAIN = [
    *(
        pytest.param(name, again)
        for name in _QUICK
        for again in (saved, cloned)
    ),
    *(pytest.param(name, saved, marks=pytest.mark.slow) for name in _OTHERS),
    # Keras clones no subclassed models.
    *(
        pytest.param(name, cloned, marks=pytest.mark.slow)
        for name in _OTHERS
        if not name.endswith("subclassed")
    ),
]


@pytest.mark.parametrize(("name", "again"), _AGAIN)
def test_saved_and_cloned_models_are_frozen_as_before_and_can_be_unfrozen(
    name, again, tmp_path
):
    model = again(of(name, frozen=True), tmp_path)
    assert not model.trainable_variables
    unfreeze(model)
    assert unmoved(model) == unmoved(of(name, frozen=False))


MADE = {
    "sparsify": lambda m: kso.sparsify(m, 0.5),
    "compact": lambda m: kso.sparsify(m, 0.5, storage="compact"),
    "prune": lambda m: kso.prune(m, 0.5),
    "blocks": lambda m: kso.prune(
        m,
        0.5,
        budget="uniform",
        storage="blocks",
        structure=kso.Block(4, 4, regular=True),
    ),
    "apply_masks": lambda m: kso.apply_masks(
        m, {"body/kernel": np.eye(16, dtype=bool)}
    ),
    "soft": lambda m: kso.parametrize(m, SoftThreshold()),
    "low rank": lambda m: kso.parametrize(m, LowRankSoftThreshold()),
    "quantize_aware": kso.quantize_aware,
    "strip": lambda m: kso.strip(kso.sparsify(m, 0.5)),
    "strip compact": lambda m: kso.strip(MADE["compact"](m)),
    "strip blocks": lambda m: kso.strip(MADE["blocks"](m)),
    "strip low rank": lambda m: kso.strip(
        kso.parametrize(m, LowRankSoftThreshold(rank=4))
    ),
    "convert": lambda m: kso.convert(MADE["blocks"](m), "compact"),
    "convert back": lambda m: kso.convert(
        kso.convert(MADE["blocks"](m), "compact"), "blocks"
    ),
    "remove_channels": lambda m: kso.remove_channels(_with_dead_channels(m)),
}

# Layers of other sizes, or two in place of one.
_MADE_ANEW = (
    "remove_channels",
    "strip low rank",
)


def _with_dead_channels(model):
    kernel, bias = model.get_layer("body").get_weights()
    kernel[:, :4], bias[:4] = 0, 0
    model.get_layer("body").set_weights([kernel, bias])
    return model


def two_layers(policy=None):
    body = L.Dense(
        16, "relu", name="body", dtype=policy, activity_regularizer="l2"
    )
    return keras.Sequential(
        [keras.Input((16,)), body, L.Dense(16, name="top")], name="two"
    )


def flat_layers(model):
    return [
        layer
        for layer in model._flatten_layers()
        if layer.name in ("body", "top")
    ]


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("frozen", ["kernel", "bias"])
def test_single_variables_stay_frozen(made, frozen):
    """As where biases alone are trained."""
    dense = two_layers()
    getattr(dense.get_layer("body"), frozen).trainable = False
    model = MADE[made](dense)
    body = [
        variable
        for variable in model.get_layer("body").variables
        if variable.trainable
    ]
    assert body, "the other variable still trains"
    is_bias = [variable.name == "bias" for variable in body]
    assert not any(is_bias) if frozen == "bias" else all(is_bias)
    values = {id(v): array(v) for v in model.variables}
    inputs = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    kernel = next(
        w for w in kso.prunable_weights(model) if w.path.startswith("body")
    )
    before = kernel.value
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model.train_on_batch(inputs, inputs[:, : model.output_shape[-1]])
    assert not np.array_equal(values[id(body[0])], array(body[0]))
    if frozen == "kernel":
        np.testing.assert_array_equal(kernel.value, before)


@pytest.mark.parametrize("made", MADE)
def test_one_layer_stays_frozen(made):
    """A frozen body under a head that trains, as in transfer learning."""
    dense = two_layers()
    dense.get_layer("body").trainable = False
    model = MADE[made](dense)
    assert all("body" not in v.path for v in model.trainable_variables)
    assert model.trainable_variables
    assert not model.get_layer("body").trainable
    model.get_layer("body").trainable = True
    trained = {variable.path for variable in model.trainable_variables}
    never_frozen = MADE[made](two_layers())
    assert trained == {
        variable.path for variable in never_frozen.trainable_variables
    }


@pytest.mark.parametrize("made", MADE)
def test_policies_losses_and_names_stay(made):
    dense = two_layers("mixed_bfloat16")
    model = MADE[made](dense)
    inputs = keras.ops.convert_to_tensor(np.ones((4, 16), "float32"))
    assert model.name == dense.name
    if made not in _MADE_ANEW:
        assert all(
            variable.path.startswith("two/") for variable in model.variables
        )
    assert [layer.name for layer in model.layers] == [
        layer.name for layer in dense.layers
    ]
    assert keras.backend.standardize_dtype(model(inputs).dtype) == "float32"
    body = model.get_layer("body")
    assert keras.backend.standardize_dtype(body(inputs).dtype) == "bfloat16"
    assert body.variable_dtype == "float32"
    model(inputs)
    assert len(model.losses) == 1, "the activity regularizer of the body"
    before = keras.backend.standardize_dtype(
        dense.get_layer("body")(inputs).dtype
    )
    assert before == "bfloat16"


class Measured(L.Layer):
    """A layer with a metric, and a loss of its own, around one with a kernel."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = L.Dense(16, name="inner")
        self.seen = keras.metrics.Mean(name="seen")

    def build(self, input_shape):
        self.inner.build(input_shape)

    def call(self, inputs):
        outputs = self.inner(inputs)
        self.add_loss(keras.ops.mean(keras.ops.square(outputs)))
        self.seen.update_state(outputs)
        return outputs


@pytest.mark.parametrize(
    "make", [lambda m: kso.sparsify(m, 0.5), lambda m: kso.prune(m, 0.5)]
)
def test_metrics_and_losses_inside_of_layers_are_those_of_the_copy(make):
    dense = keras.Sequential([keras.Input((16,)), Measured(name="measured")])
    model = make(dense)
    inputs = np.ones((4, 16), "float32")
    model.compile("sgd", "mse", run_eagerly=True)
    logs = model.train_on_batch(inputs, inputs, return_dict=True)
    (metric,) = [m for m in model.metrics if m.name == "seen"]
    (own,) = [m for m in dense.metrics if m.name == "seen"]
    assert metric is not own
    assert float(own.result()) == 0.0
    losses = len(model.losses)
    dense.compile("sgd", "mse", run_eagerly=True)
    plain = dense.train_on_batch(inputs, inputs, return_dict=True)
    assert logs.keys() == plain.keys() == {"loss", "seen"}
    # Keras on JAX leaves it at 0.
    assert bool(logs["seen"]) == bool(plain["seen"])
    assert losses == len(dense.losses)
    model(inputs)
    assert len(model.losses) == 1


@pytest.mark.parametrize(
    "made", [made for made in MADE if made not in _MADE_ANEW]
)
def test_an_activation_that_is_changed_later_is_the_one_that_is_used(made):
    model = MADE[made](two_layers())
    body = model.get_layer("body")
    body.activation = keras.ops.zeros_like
    inputs = np.random.default_rng(0).normal(size=(4, 16)).astype("float32")
    assert not array(body(inputs)).any()
    assert body.activation is keras.ops.zeros_like


@pytest.mark.parametrize("made", ["compact", "convert"])
def test_a_regularizer_that_is_changed_later_is_that_of_the_stripped_kernel(
    made,
):
    model = MADE[made](two_layers())
    (weight,) = [
        w for w in kso.prunable_weights(model) if w.path == "body/kernel"
    ]
    weight.variable.regularizer = decay = keras.regularizers.L2(0.1)
    assert kso.strip(model).get_layer("body").kernel.regularizer is decay
