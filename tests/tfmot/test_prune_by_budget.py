"""TFMOT's magnitude pruning with a sparsity for each layer, and what it cannot prune."""

import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from tests.tfmot.test_tfmot_cases import sequential

pytestmark = pytest.mark.tensorflow_only


def nested(tf_keras):
    L = tf_keras.layers
    inner = tf_keras.Sequential([tf_keras.Input((32,)), L.Dense(32, name="a")], name="inner")
    inputs = tf_keras.Input((16,))
    x = inner(L.Dense(32, activation="relu", name="hidden")(inputs))
    return tf_keras.Model(inputs, L.Dense(10, name="head")(L.ReLU()(x)))


def test_each_layer_ends_at_its_share(tf_keras, sparsity):
    budget = kso.budgets.erk(kso.tfmot.prunable_weights(nested(tf_keras)), 0.2)
    pattern = sparsity.PolynomialDecay(0.0, 0.5, begin_step=0, end_step=8, frequency=1)
    model = kso.tfmot.prune_by_budget(nested(tf_keras), budget=budget, schedule=pattern)
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 16)), rng.normal(size=(64, 10))
    model.fit(x, y, batch_size=16, epochs=3, verbose=0, callbacks=[sparsity.UpdatePruningStep()])
    for each in (model, sparsity.strip_pruning(model)):
        weights = kso.tfmot.prunable_weights(each)
        assert [w.path for w in weights] == list(budget)
        for weight in weights:
            assert abs(weight.live - budget.counts[weight.path]) <= 1  # TFMOT rounds otherwise


def test_a_function_makes_the_schedules(tf_keras, sparsity):
    asked = []

    def make(final_sparsity):
        asked.append(round(final_sparsity, 6))
        return sparsity.ConstantSparsity(final_sparsity, 0, frequency=10)

    L = tf_keras.layers
    dense = sequential(tf_keras, L.Dense(8, name="a"), L.Dense(4, name="b"), L.Dense(4, name="c"))
    budget = kso.Budget({"a/kernel": 0.25, "b/kernel": 1.0, "c/kernel": 0.5})
    model = kso.tfmot.prune_by_budget(dense, budget=budget, schedule=make)
    assert asked == [0.75, 0.5]
    kinds = [type(layer).__name__ for layer in model.layers]
    assert kinds == ["PruneLowMagnitude", "Dense", "PruneLowMagnitude"]
    np.testing.assert_array_equal(model.layers[0].layer.kernel, dense.layers[0].kernel)
    assert model.layers[0].layer.kernel is not dense.layers[0].kernel


def test_several_kernels_share_one_schedule(tf_keras, sparsity):
    attention = tf_keras.layers.MultiHeadAttention(2, 4, name="attention")
    inputs = tf_keras.Input((5, 8))
    dense = tf_keras.Model(inputs, attention(inputs, value=inputs))
    pattern = sparsity.ConstantSparsity(0.5, 0, frequency=1)
    densities = dict.fromkeys((w.path for w in kso.tfmot.prunable_weights(dense)), 0.5)
    densities["attention/query/kernel"] = 0.25
    model = kso.tfmot.prune_by_budget(dense, budget=kso.Budget(densities), schedule=pattern)
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
def test_what_tfmot_does_not_prune_is_named_and_ours_prune_it(tf_keras, sparsity, kind):
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
        lambda: kso.tfmot.prune_exact_orthogonal(dense, 0.5, "uniform", "random_sparse", seed=0),
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
            kso.tfmot.prune_by_budget(dense, 0.25, schedule=sparsity.ConstantSparsity(0.5, 0)),
            kso.tfmot.prune_with_mask(dense, density=0.25),
            kso.tfmot.prune_exact_orthogonal(dense, 0.25, initializer="random_sparse", seed=0),
            kso.tfmot.prune_with_soft_threshold(dense),
        ):
            assert [w.path for w in kso.tfmot.prunable_weights(model)] == ["one/form"]
            [wrapper] = model.layers
            assert [v is wrapper.layer.form for v, _, _ in wrapper.pruning_vars] == [True]


def test_refusals(tf_keras, sparsity):
    L = tf_keras.layers
    dense = sequential(tf_keras, L.Dense(8, name="a"))
    constant = sparsity.ConstantSparsity(0.5, 0)
    with pytest.raises(NotPrunableError, match=r"all weights dense.*Received: density=1"):
        kso.tfmot.prune_by_budget(dense, 1.0, schedule=constant)
    with pytest.raises(NotPrunableError, match="Nothing in the model would be pruned"):
        kso.tfmot.prune_by_budget(sequential(tf_keras, L.ReLU()), 0.5, schedule=constant)
    with pytest.raises(ValueError, match=r"function from final sparsity.*Received: schedule=None"):
        kso.tfmot.prune_by_budget(dense, 0.5)
    decay = sparsity.PolynomialDecay(0.7, 0.9, 0, 10)
    with pytest.raises(BudgetError, match=r"more sparsity than \['a/kernel'\].*=0.7"):
        kso.tfmot.prune_by_budget(dense, 0.5, schedule=decay)
    recurrent = sequential(tf_keras, L.GRU(8, name="gru"), shape=(5, 8))
    with pytest.raises(NotPrunableError, match="'gru'"):
        kso.tfmot.prune_by_budget(recurrent, 0.5, schedule=constant, include=".*/kernel")
    again = kso.tfmot.prune_by_budget(dense, 0.5, schedule=constant)
    with pytest.raises(NotPrunableError, match=r"wrapper already.*\['a/kernel'\]"):
        kso.tfmot.prune_by_budget(again, 0.5, schedule=constant)
