"""Compact storage of whole models: verbs, conversions, refusals, and that it trains as masks."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.parametrizations import (
    CompactMask,
    FixedMask,
    SoftThreshold,
)
from tests.helpers import (
    Chain,
    array,
    assert_same,
    classifier_loss,
    data,
    jit,
    jit_if_quicker,
    optimizer_slots,
    slow_on_tensorflow,
    slow_where_traced,
)
from tests.pruning.checks import assert_equal_kernels, fit

L = keras.layers
pytestmark = pytest.mark.core
STORAGES = ("masked", "compact")


def network(regularizer="l2", policy=None):
    """A convolution, normalization and dense layers, one of them shared by two calls."""
    inputs = keras.Input((6, 6, 2))
    x = L.Conv2D(6, 3, name="conv", dtype=policy, kernel_constraint="non_neg")(
        inputs
    )
    x = L.Flatten()(
        L.ReLU()(L.BatchNormalization(name="norm", dtype=policy)(x))
    )
    x = L.Dense(
        12, name="hidden", kernel_regularizer=regularizer, dtype=policy
    )(x)
    shared = L.Dense(12, activation="tanh", name="shared", dtype=policy)
    return keras.Model(
        inputs, L.Dense(3, name="head", dtype=policy)(shared(shared(x)))
    )


def sparse(storage, **options):
    keras.utils.set_random_seed(2)
    return kso.sparsify(network(**options), 0.2, seed=0, storage=storage)


OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-3),
    "adamw_clipped": lambda: keras.optimizers.AdamW(
        1e-3, weight_decay=0.1, clipnorm=0.1
    ),
    "sgd": lambda: keras.optimizers.SGD(
        1e-2, momentum=0.9, global_clipnorm=0.5
    ),
    "adagrad": lambda: keras.optimizers.Adagrad(1e-2),
    "averaged": lambda: keras.optimizers.Adam(
        1e-3, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7
    ),
    "accumulated": lambda: keras.optimizers.SGD(
        1e-2, momentum=0.9, gradient_accumulation_steps=3
    ),
}


def cases(all_of_them, *quick):
    """Each rule of optimizers in one quick case, the others among the slow tests."""
    return [
        pytest.param(*c, marks=[] if c in quick else pytest.mark.slow)
        for c in all_of_them
    ]


@pytest.mark.parametrize(
    "optimizer",
    cases([(name,) for name in OPTIMIZERS], ("adamw_clipped",), ("averaged",)),
)
@slow_on_tensorflow
def test_fifty_steps_lose_as_much_as_with_masks(optimizer):
    hidden = L.Dense(
        16, activation="tanh", kernel_regularizer="l2", name="hidden"
    )
    dense = keras.Sequential(
        [keras.Input((12,)), hidden, L.Dense(3, name="head")]
    )
    losses, models = (
        [],
        [kso.sparsify(dense, 0.3, seed=0, storage=name) for name in STORAGES],
    )
    for model in models:
        model.compile(
            OPTIMIZERS[optimizer](), classifier_loss(), jit_compile=jit()
        )
        losses.append(fit(model, epochs=13))  # 52 steps
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
    assert_equal_kernels(*models, atol=1e-5)


@pytest.mark.parametrize(
    "policy",
    cases([("mixed_bfloat16",), ("mixed_float16",)], ("mixed_float16",)),
)
@slow_on_tensorflow
def test_mixed_precision_trains_as_with_masks(policy):
    losses = []
    for model in (sparse(name, policy=policy) for name in STORAGES):
        model.compile("adam", classifier_loss(), jit_compile=jit())
        losses.append(fit(model, epochs=3))
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(*losses, rtol=1e-3)


CONVERTED = [
    (o, s)
    for o in ("adamw_clipped", "averaged", "accumulated")
    for s in STORAGES
]
QUICK = [
    ("adamw_clipped", "masked"),
    ("adagrad", "compact"),
    ("averaged", "compact"),
]


@pytest.mark.core
@pytest.mark.parametrize(
    ("optimizer", "storage"),
    cases([*CONVERTED, ("adagrad", "compact")], *QUICK),
)
def test_conversion_in_mid_training_changes_nothing(storage, optimizer):
    model, to = sparse(storage), "compact" if storage == "masked" else "masked"
    # On JAX, Keras' compiled `predict` after `fit` frees the arrays of an optimizer's averages.
    compiled = jit_if_quicker() and optimizer != "averaged"
    model.compile(
        OPTIMIZERS[optimizer](), classifier_loss(), jit_compile=compiled
    )
    fit(model)
    x, _ = data(model, 3)
    expected = model.predict(x, verbose=0)
    other = kso.convert(model, to)
    np.testing.assert_allclose(other.predict(x, verbose=0), expected, atol=1e-6)
    assert_equal_kernels(model, other)
    assert_same(
        kso.convert(other, storage).optimizer.variables,
        model.optimizer.variables,
    )
    for slot, start in _dead_slots(other):
        np.testing.assert_array_equal(slot, np.full_like(slot, start))
    # Both go on: on JAX `fit` frees the arrays of its model, so they share none.
    np.testing.assert_allclose(fit(other), fit(model), rtol=1e-5)
    assert_equal_kernels(model, other, atol=1e-5)


def _dead_slots(model):
    """Of each slot the entries under a mask, with the value that they start from."""
    for weight in kso.prunable_weights(model):
        if not weight.storage.compact:
            dead = ~weight.parametrization.mask_value()
            for slot, start in optimizer_slots(
                model.optimizer, weight.variable
            ):
                yield array(slot)[dead], start


@slow_where_traced
@pytest.mark.core
def test_subclassed_models_are_converted():
    def written(storage):
        keras.utils.set_random_seed(4)
        layers = [
            L.Dense(16, "tanh", name="first"),
            L.Dense(16, name="a"),
            L.GRU(6, name="b"),
        ]
        layers[1].trainable = False
        model = Chain(*layers, L.Dense(3, name="head"), name="written")
        model(x)
        model = kso.sparsify(model, 0.3, seed=0, storage=storage)
        model.compile(
            OPTIMIZERS["adamw_clipped"](), "sparse_categorical_crossentropy"
        )
        return model

    x = np.random.default_rng(0).normal(size=(16, 4, 8)).astype("float32")
    options = {
        "y": np.arange(16) % 3,
        "batch_size": 8,
        "shuffle": False,
        "verbose": 0,
    }
    models = [written("masked"), written("compact")]
    frozen = kso.prunable_weights(models[1])[1].value
    for converted in (False, True):
        if converted:
            models = [
                kso.convert(models[0], "compact"),
                kso.convert(models[1], "masked"),
            ]
            kinds = [
                type(kso.prunable_weights(model)[0].parametrization)
                for model in models
            ]
            assert kinds == [CompactMask, FixedMask]
        losses = [
            model.fit(x, epochs=2, **options).history["loss"]
            for model in models
        ]
        np.testing.assert_allclose(*losses, rtol=1e-5)
    assert_equal_kernels(*models, atol=1e-5)
    for model in models:
        np.testing.assert_array_equal(
            kso.prunable_weights(model)[1].value, frozen
        )
        expected = array(model(x))
        plain = kso.strip(model)
        np.testing.assert_allclose(array(plain(x)), expected, atol=1e-6)
        assert [v.name for v in plain.parts[0].weights] == ["kernel", "bias"]


def test_a_layer_inside_may_be_frozen_later():
    block = keras.Sequential(
        [L.Dense(8, name="a"), L.Dense(8, name="b")], name="block"
    )
    model = keras.Sequential(
        [keras.Input((6,)), kso.PrunableLayer(block, CompactMask(0.5))]
    )
    first, second = kso.prunable_weights(model)
    block.layers[0].trainable = False
    before = first.value, second.value
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 6)), np.ones((8, 8)), verbose=0)
    assert not first.variable.trainable
    assert second.variable.trainable
    np.testing.assert_array_equal(first.value, before[0])
    assert (second.value != before[1]).any()


@pytest.mark.parametrize("built", [True, False])
def test_the_layers_own_variable_has_no_value(built):
    dense = L.Dense(4, name="hidden")
    if built:
        dense.build((None, 6))
    layer = kso.PrunableLayer(dense, CompactMask(0.5))
    layer.build((None, 6))
    kernel = dense.kernel
    assert tuple(kernel.shape) == layer.prunable_weights[0].shape == (6, 4)
    assert all(variable is not kernel for variable in layer.variables)
    for use in (lambda: array(kernel), lambda: kernel.assign(np.zeros((6, 4)))):
        with pytest.raises(
            RuntimeError, match=r"stored compactly.*a use of 'hidden"
        ):
            use()
    with pytest.raises(
        kso.errors.NotPrunableError, match=r"LoRA cannot be enabled on 'hidden'"
    ):
        dense.enable_lora(2)
    with pytest.raises(
        NotImplementedError, match=r"'hidden' cannot be quantized while.*Strip"
    ):
        dense.quantize("int8")
    expected = np.ones((1, 6)) @ layer.prunable_weights[0].value
    np.testing.assert_allclose(
        array(layer(np.ones((1, 6)))), expected, rtol=1e-5
    )
    with pytest.raises(RuntimeError, match="while its wrapped layer is called"):
        dense(np.ones((1, 6)))


def test_the_dense_kernel_of_a_copy_is_never_allocated(monkeypatch):
    dense = keras.Sequential([keras.Input((6,)), L.Dense(4)])
    copy, shapes = keras.ops.copy, []
    monkeypatch.setattr(
        keras.ops, "copy", lambda x: shapes.append(tuple(x.shape)) or copy(x)
    )
    for storage, copied in (("masked", [(6, 4), (4,)]), ("compact", [(4,)])):
        shapes.clear()
        model = kso.prune(dense, 0.5, storage=storage)
        # Whose modules hold parameters from `build` on.
        if keras.backend.backend() != "torch":
            assert shapes == copied
        assert kso.prunable_weights(model)[0].live == 12


class OwnSaving(L.Dense):
    def save_own_variables(self, store):
        store["kernel"] = self.kernel


def test_what_needs_the_dense_weight_is_refused():
    dense = network()
    weights = [array(v) for v in dense.weights]
    with pytest.raises(ValueError, match=r"storage.*Received: storage='dense'"):
        kso.sparsify(dense, 0.2, storage="dense")
    learnt = kso.parametrize(dense, SoftThreshold())
    with pytest.raises(
        kso.errors.NotPrunableError, match="'conv/kernel' with SoftThreshold"
    ):
        kso.convert(learnt, "compact")
    with pytest.raises(kso.errors.NotPrunableError, match="nothing to convert"):
        kso.convert(dense, "masked")
    for layer, match in (
        (
            L.Dense(4, kernel_constraint="max_norm"),
            "constraint needs the dense kernel",
        ),
        (
            L.Dense(4, kernel_regularizer="orthogonal_regularizer"),
            "regularizer needs the dense",
        ),
        (OwnSaving(4), r"overrides `save_own_variables`.*Received: OwnSaving"),
    ):
        model = keras.Sequential([keras.Input((6,)), layer])
        with pytest.raises(kso.errors.NotPrunableError, match=match):
            kso.prune(model, 0.5, storage="compact")
        with pytest.raises(kso.errors.NotPrunableError, match=match):
            kso.convert(kso.prune(model, 0.5), "compact")
    assert_same(weights, dense.weights)


@pytest.mark.parametrize("built", [True, False])
def test_a_wrapper_that_cannot_be_built_leaves_its_layer_whole(built):
    layers = [
        L.Dense(6, name="a"),
        L.Dense(4, name="b", kernel_constraint="max_norm"),
    ]
    block = keras.Sequential(layers, name="block")
    if built:
        block.build((None, 5))
        before = block.get_weights()
    with pytest.raises(
        kso.errors.NotPrunableError, match="'b/kernel' cannot be stored"
    ):
        kso.PrunableLayer(block, CompactMask(0.5)).build((None, 5))
    assert [v.name for v in block.weights] == ["kernel", "bias"] * 2
    assert np.abs(array(block(np.ones((1, 5))))).max() > 0
    for now, value in zip(
        block.get_weights(), before if built else [], strict=built
    ):
        np.testing.assert_array_equal(now, value)


def test_adopted_masks_parametrize_and_given_masks():
    orthogonal = kso.initializers.ExactOrthogonal(0.2, seed=3)
    dense = keras.Sequential(
        [keras.Input((20,)), L.Dense(16, kernel_initializer=orthogonal)]
    )
    _, mask = orthogonal.sample((20, 16))
    path = kso.prunable_weights(dense)[0].path
    for model in (
        kso.apply_masks(dense, storage="compact"),
        kso.parametrize(dense, CompactMask()),
        kso.apply_masks(dense, {path: mask}, storage="compact"),
    ):
        [weight] = kso.prunable_weights(model)
        assert isinstance(weight.parametrization, CompactMask)
        np.testing.assert_array_equal(weight.parametrization.mask_value(), mask)
        np.testing.assert_array_equal(
            weight.value, dense.layers[0].get_weights()[0]
        )
        np.testing.assert_array_equal(weight.raw_value(), weight.value)


@pytest.mark.jax_only
def test_a_step_has_no_dense_kernel_in_memory_before_its_layer_is_called():
    import jax

    width, depth = 256, 6
    layers = [L.Dense(width, "tanh", name=f"d{k}") for k in range(depth)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model = kso.sparsify(model, 0.1, "uniform", seed=0, storage="compact")

    def loss(values, indices, x):
        outputs, _ = model.stateless_call(values, indices, x, training=True)
        return (outputs**2).mean()

    values, indices = (
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
        )
    )
    x = jax.ShapeDtypeStruct((8, width), "float32")
    compiled = jax.jit(jax.grad(loss)).lower(values, indices, x).compile()
    # Made all at once, and from one vector of zeros that is kept, they take more than one for each.
    assert (
        compiled.memory_analysis().temp_size_in_bytes
        < (depth - 0.5) * width**2 * 4
    )
    assert array(model(np.zeros((0, width), "float32"))).shape == (0, width)


def test_what_is_known_of_the_draw_survives():
    dense = network()
    masked, compact = (
        kso.sparsify(dense, 0.2, seed=0, storage=name) for name in STORAGES
    )
    for model in (
        compact,
        kso.convert(masked, "compact"),
        kso.convert(compact, "masked"),
    ):
        assert kso.report(model).to_dict() == kso.report(masked).to_dict()
        assert (
            kso.Budget.from_model(model).counts
            == kso.Budget.from_model(masked).counts
        )
    assert all(
        row.orthogonality_error is not None for row in kso.report(compact).rows
    )


# --- copies share no arrays: on JAX a training step takes over those of its model ----------------


def plain():
    layers = [
        L.Dense(16, name="first"),
        L.BatchNormalization(),
        L.Dense(4, name="last"),
    ]
    return keras.Sequential([keras.Input((8,)), *layers])


def train(model):
    model.compile("adam", "mse", jit_compile=jit())
    model.fit(np.ones((8, 8)), np.ones((8, 4)), epochs=2, verbose=0)


def trained():
    sparse = kso.sparsify(plain(), 0.5, seed=0)
    train(sparse)
    return sparse


@pytest.mark.parametrize(
    ("make_source", "make"),
    [
        (plain, lambda model: kso.sparsify(model, 0.5, seed=0)),
        (plain, lambda model: kso.prune(model, 0.5)),
        (trained, kso.strip),
    ],
    ids=["drawn", "kept", "stripped"],
)
def test_training_the_source_leaves_the_copy_alone(make_source, make):
    source = make_source()
    copy = make(source)
    before = [np.array(array(v)) for v in copy.variables]
    train(source)
    assert_same(before, copy.variables)
    train(copy)
