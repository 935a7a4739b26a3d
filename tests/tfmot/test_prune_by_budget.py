"""TFMOT's pruning with a sparsity for each layer, what it cannot prune, and masks of EOI in it."""

import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from tests.tfmot.test_tfmot_cases import sequential

pytestmark = pytest.mark.tensorflow_only


def nested(tf_keras):
    L = tf_keras.layers
    inner = tf_keras.Sequential(
        [tf_keras.Input((32,)), L.Dense(32, name="a")], name="inner"
    )
    inputs = tf_keras.Input((16,))
    x = inner(L.Dense(32, activation="relu", name="hidden")(inputs))
    return tf_keras.Model(inputs, L.Dense(10, name="head")(L.ReLU()(x)))


def test_each_layer_ends_at_its_share(tf_keras, sparsity):
    budget = kso.budgets.erk(kso.tfmot.prunable_weights(nested(tf_keras)), 0.2)
    pattern = sparsity.PolynomialDecay(
        0.0, 0.5, begin_step=0, end_step=8, frequency=1
    )
    model = kso.tfmot.prune_by_budget(
        nested(tf_keras), budget=budget, schedule=pattern
    )
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 16)), rng.normal(size=(64, 10))
    model.fit(
        x,
        y,
        batch_size=16,
        epochs=3,
        verbose=0,
        callbacks=[sparsity.UpdatePruningStep()],
    )
    for each in (model, sparsity.strip_pruning(model)):
        weights = kso.tfmot.prunable_weights(each)
        assert [w.path for w in weights] == list(budget)
        for weight in weights:
            # TFMOT rounds otherwise.
            assert abs(weight.live - budget.counts[weight.path]) <= 1


def test_a_function_makes_the_schedules(tf_keras, sparsity):
    asked = []

    def make(final_sparsity):
        asked.append(round(final_sparsity, 6))
        return sparsity.ConstantSparsity(final_sparsity, 0, frequency=10)

    L = tf_keras.layers
    dense = sequential(
        tf_keras,
        L.Dense(8, name="a"),
        L.Dense(4, name="b"),
        L.Dense(4, name="c"),
    )
    budget = kso.Budget({"a/kernel": 0.25, "b/kernel": 1.0, "c/kernel": 0.5})
    model = kso.tfmot.prune_by_budget(dense, budget=budget, schedule=make)
    assert asked == [0.75, 0.5]
    kinds = [type(layer).__name__ for layer in model.layers]
    assert kinds == ["PruneLowMagnitude", "Dense", "PruneLowMagnitude"]
    np.testing.assert_array_equal(
        model.layers[0].layer.kernel, dense.layers[0].kernel
    )
    assert model.layers[0].layer.kernel is not dense.layers[0].kernel


def test_several_kernels_share_one_schedule(tf_keras, sparsity):
    attention = tf_keras.layers.MultiHeadAttention(2, 4, name="attention")
    inputs = tf_keras.Input((5, 8))
    dense = tf_keras.Model(inputs, attention(inputs, value=inputs))
    pattern = sparsity.ConstantSparsity(0.5, 0, frequency=1)
    densities = dict.fromkeys(
        (w.path for w in kso.tfmot.prunable_weights(dense)), 0.5
    )
    densities["attention/query/kernel"] = 0.25
    model = kso.tfmot.prune_by_budget(
        dense, budget=kso.Budget(densities), schedule=pattern
    )
    [wrapper] = [v for v in model.layers if hasattr(v, "pruning_schedule")]
    assert wrapper.pruning_schedule.target_sparsity == 1 - 0.4375
    assert len(wrapper.pruning_vars) == 4


def layers_that_tfmot_leaves(tf_keras):
    class Own(tf_keras.layers.Dense):
        pass

    L = tf_keras.layers
    return {
        "Own": (Own(4, name="one"), (8,)),
        "EinsumDense": (L.EinsumDense("ab,bc->ac", 4, name="one"), (8,)),
        "Bidirectional": (L.Bidirectional(L.LSTM(4), name="one"), (5, 8)),
        "DepthwiseConv2D": (L.DepthwiseConv2D(3, name="one"), (6, 6, 4)),
        "SeparableConv2D": (L.SeparableConv2D(4, 3, name="one"), (6, 6, 4)),
    }


KINDS = ["Own", "EinsumDense", "DepthwiseConv2D", "SeparableConv2D"]
KINDS += [pytest.param("Bidirectional", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_tfmot_does_not_prune_is_named_and_ours_prune_it(
    tf_keras, sparsity, kind
):
    layer, shape = layers_that_tfmot_leaves(tf_keras)[kind]
    message = f"'one'.*Received: layer={kind}"
    if "Conv" in kind:  # TFMOT takes the layer, and leaves the kernel
        message = r"'one'.*not pruned \['one/depthwise_kernel'\], pruned but not selected \[\]"
    dense = sequential(tf_keras, layer, tf_keras.layers.Flatten(), shape=shape)
    pattern = sparsity.ConstantSparsity(0.5, 0)
    with pytest.raises(NotPrunableError, match=message):
        kso.tfmot.prune_by_budget(dense, 0.5, "uniform", pattern)
    for prune in (
        lambda: kso.tfmot.prune_with_mask(dense, density=0.5, budget="uniform"),
        lambda: kso.tfmot.prune_exact_orthogonal(
            dense, 0.5, "uniform", "random_sparse", seed=0
        ),
        lambda: kso.tfmot.prune_with_soft_threshold(dense),
    ):
        for weight in kso.tfmot.prunable_weights(prune()):
            assert weight.wrapped
            assert weight.state is not None


def test_the_method_of_custom_layers(tf_keras, sparsity):
    class Bilinear(tf_keras.layers.Layer):
        def build(self, input_shape):
            self.form = self.add_weight("form", shape=(input_shape[-1], 4, 4))
            self.other = self.add_weight("other", shape=(4, 4))

        def call(self, inputs):
            import tensorflow as tf

            return tf.einsum("bi,ijk->bjk", inputs, self.form) @ self.other

        def get_prunable_weights(self):
            return [self.form]

    dense = sequential(tf_keras, Bilinear(name="one"), shape=(8,))
    with tf_keras.utils.custom_object_scope({"Bilinear": Bilinear}):
        for model in (
            kso.tfmot.prune_by_budget(
                dense, 0.25, schedule=sparsity.ConstantSparsity(0.5, 0)
            ),
            kso.tfmot.prune_with_mask(dense, density=0.25),
            kso.tfmot.prune_exact_orthogonal(
                dense, 0.25, initializer="random_sparse", seed=0
            ),
            kso.tfmot.prune_with_soft_threshold(dense),
        ):
            assert [w.path for w in kso.tfmot.prunable_weights(model)] == [
                "one/form"
            ]
            [wrapper] = model.layers
            assert [
                v is wrapper.layer.form for v, _, _ in wrapper.pruning_vars
            ] == [True]


def test_refusals(tf_keras, sparsity):
    L = tf_keras.layers
    dense = sequential(tf_keras, L.Dense(8, name="a"))
    constant = sparsity.ConstantSparsity(0.5, 0)
    with pytest.raises(
        NotPrunableError, match=r"all weights dense.*Received: density=1"
    ):
        kso.tfmot.prune_by_budget(dense, 1.0, schedule=constant)
    with pytest.raises(
        NotPrunableError, match="Nothing in the model would be pruned"
    ):
        kso.tfmot.prune_by_budget(
            sequential(tf_keras, L.ReLU()), 0.5, schedule=constant
        )
    with pytest.raises(
        ValueError,
        match=r"function from final sparsity.*Received: schedule=None",
    ):
        kso.tfmot.prune_by_budget(dense, 0.5)
    decay = sparsity.PolynomialDecay(0.7, 0.9, 0, 10)
    with pytest.raises(
        BudgetError, match=r"more sparsity than \['a/kernel'\].*=0.7"
    ):
        kso.tfmot.prune_by_budget(dense, 0.5, schedule=decay)
    recurrent = sequential(tf_keras, L.GRU(8, name="gru"), shape=(5, 8))
    with pytest.raises(NotPrunableError, match="'gru'"):
        kso.tfmot.prune_by_budget(
            recurrent, 0.5, schedule=constant, include=".*/kernel"
        )
    again = kso.tfmot.prune_by_budget(dense, 0.5, schedule=constant)
    with pytest.raises(
        NotPrunableError, match=r"wrapper already.*\['a/kernel'\]"
    ):
        kso.tfmot.prune_by_budget(again, 0.5, schedule=constant)


@pytest.mark.parametrize("jit", [False, True])
def test_zeros_and_moments_stay_and_stripping_keeps_them(
    tf_keras, sparsity, jit
):
    L = tf_keras.layers
    dense = sequential(
        tf_keras, L.Dense(32, "relu", name="a"), L.Dense(10, name="head")
    )
    model = kso.tfmot.prune_exact_orthogonal(dense, 0.3, seed=0)
    weights = kso.tfmot.prunable_weights(model)
    assert sum(w.live for w in weights) == round(
        0.3 * sum(w.size for w in weights)
    )
    model.compile(tf_keras.optimizers.Adam(1e-2), "mse", jit_compile=jit)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 16)), rng.normal(size=(64, 10))
    # Which masks do not need.
    callbacks = [] if jit else [sparsity.UpdatePruningStep()]
    model.fit(x, y, epochs=2, verbose=0, callbacks=callbacks)
    optimizer = model.optimizer
    for weight in weights:
        mask = weight.state.mask()
        slot = optimizer._index_dict[optimizer._var_key(weight.variable)]
        for values in (
            weight.variable,
            optimizer._momentums[slot],
            optimizer._velocities[slot],
        ):
            assert not values.numpy()[~mask].any()
            assert values.numpy()[mask].any()
    plain = sparsity.strip_pruning(model)
    np.testing.assert_allclose(
        plain.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6
    )
    assert not any(
        isinstance(layer, kso.tfmot.PruneWithMask) for layer in plain.layers
    )


def test_infinite_gradients_stay_off_the_mask(tf_keras):
    import tensorflow as tf

    dense = sequential(tf_keras, tf_keras.layers.Dense(4))
    [weight] = kso.tfmot.prunable_weights(
        kso.tfmot.prune_exact_orthogonal(dense, 0.5, seed=0)
    )
    with tf.GradientTape() as tape:
        kernel = weight.state.effective()
    upstream = tf.fill(kernel.shape, np.inf)
    gradient = tape.gradient(
        kernel, weight.variable, output_gradients=upstream
    ).numpy()
    mask = weight.state.mask()
    assert np.isinf(gradient[mask]).all()
    assert not gradient[~mask].any()


def test_dead_outputs_are_named(tf_keras):
    L = tf_keras.layers
    model = sequential(tf_keras, L.Dense(64, name="a"), L.Dense(8, name="head"))
    with pytest.warns(
        UserWarning, match=r"Received: 24 of 'a/kernel'$"
    ) as told:
        kso.tfmot.prune_exact_orthogonal(model, 48 / 1536, seed=0)
    assert told[0].filename == __file__
    [first, _] = kso.tfmot.prunable_weights(
        kso.tfmot.prune_exact_orthogonal(model, 72 / 1536, seed=0)
    )
    assert first.live == 64


# --- where TFMOT and these meet: layers without names, stale methods, options ---------------------


def test_layers_whose_configuration_leaves_the_name_out(tf_keras):
    class Block(tf_keras.layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.units = units
            self.first = tf_keras.layers.Dense(units, name="first")
            self.last = tf_keras.layers.Dense(4, name="last")

        def call(self, inputs):
            return self.last(self.first(inputs))

        def get_config(self):
            return {"units": self.units}

    dense = sequential(tf_keras, Block(8))
    paths = [weight.path for weight in kso.tfmot.prunable_weights(dense)]
    mask = np.random.default_rng(0).random((8, 4)) < 0.5
    held = kso.tfmot.prune_with_mask(dense, {paths[1]: mask})
    soft = kso.tfmot.prune_with_soft_threshold(dense)
    for model in (
        held,
        soft,
        kso.tfmot.prune_exact_orthogonal(dense, 0.5, seed=0),
    ):
        assert [
            weight.path for weight in kso.tfmot.prunable_weights(model)
        ] == paths
    first, last = kso.tfmot.prunable_weights(held)
    np.testing.assert_array_equal(last.value != 0, mask)
    assert first.density == 1


def test_nothing_of_a_wrapper_stays_on_a_stripped_layer(tf_keras, sparsity):
    dense = sequential(
        tf_keras, tf_keras.layers.LSTM(8, name="l"), shape=(3, 4)
    )
    held = kso.tfmot.prune_with_mask(
        dense, density=0.5, include="l/lstm_cell/kernel"
    )
    assert [v.shape for v in held.layers[0].prunable_weights] == [(4, 32)]
    plain = sparsity.strip_pruning(held)
    assert not hasattr(plain.layers[0], "get_prunable_weights")
    again = sparsity.prune_low_magnitude(
        plain, sparsity.ConstantSparsity(0.5, 0)
    )
    assert len(again.layers[0].pruning_vars) == 2
    conv = tf_keras.layers.ConvLSTM2D(2, 2)
    stripped = kso.tfmot.PruneWithMask(conv, density=0.5).layer
    with pytest.raises(ValueError, match="supported layer"):  # as before
        sparsity.prune_low_magnitude(
            stripped, sparsity.ConstantSparsity(0.5, 0)
        )


@pytest.mark.parametrize("name", ["PruneWithMask", "PruneWithSoftThreshold"])
def test_options_that_would_have_no_effect_are_refused(
    tf_keras, sparsity, name
):
    for options in (
        {"sparsity_m_by_n": (2, 4)},
        {"block_size": (4, 1)},
        {"pruning_schedule": sparsity.ConstantSparsity(0.5, 0)},
    ):
        with pytest.raises(
            ValueError, match=r"no effect.*structure=.*Received"
        ):
            getattr(kso.tfmot, name)(tf_keras.layers.Dense(8), **options)


def test_density_of_one_layer(tf_keras):
    layer = kso.tfmot.PruneWithMask(tf_keras.layers.LSTM(8), density=0.25)
    layer.build((None, 3, 4))
    assert [int(state.mask().sum()) for state in layer.states] == [32, 64]
    clone = type(layer).from_config(layer.get_config())
    clone.build((None, 3, 4))
    assert [int(state.mask().sum()) for state in clone.states] == [32, 64]
    for options in ({"density": 0}, {"density": 0.5, "live": [4]}):
        with pytest.raises(ValueError, match="Received"):
            kso.tfmot.PruneWithMask(tf_keras.layers.Dense(8), **options)
    for options in ({"live": [4]}, {"initializers": [None]}):
        with pytest.raises(
            ValueError, match=r"one for each kernel.*recurrent_kernel"
        ):
            kso.tfmot.PruneWithMask(tf_keras.layers.LSTM(8), **options).build(
                (None, 3, 4)
            )
