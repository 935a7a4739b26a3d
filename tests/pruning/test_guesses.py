"""What newcomers try: a density for each kernel, layers, indices, names of other packages."""

import operator
import re

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho._other_names import _INSTEAD
from keras_sparse_ortho.errors import BudgetError, DensityError, UnknownWeightError

L = keras.layers
pytestmark = pytest.mark.core
TABLE = {"first": 0.1, "second": 0.25, "head": 0.5}
PATHS = [f"{name}/kernel" for name in TABLE]


def network():
    inputs = keras.Input((32,))
    x = L.Dense(32, activation="relu", name="first")(inputs)
    x = L.Dense(32, activation="relu", name="second")(x)
    return keras.Model(inputs, L.Dense(8, name="head")(x))


def densities(model):
    return {w.path: round(w.density, 2) for w in kso.prunable_weights(model)}


def masked(model):
    return [w.path for w in kso.prunable_weights(model) if w.storage is not None]


@pytest.mark.parametrize("given", [TABLE, [*TABLE.values()], np.array([*TABLE.values()])])
def test_a_density_for_each_kernel_is_a_budget(given):
    expected = dict(zip(PATHS, TABLE.values(), strict=True))
    top = kso.StraightThroughTopK(1.0)
    for made in (
        kso.sparsify(network(), given, seed=0),
        kso.sparsify(network(), budget=given, seed=0),
        kso.prune(network(), given),
        kso.parametrize(network(), top, given),
        kso.parametrize(network(), top, budget=given),
    ):
        assert densities(made) == expected


def test_what_is_wrong_with_densities_is_told():
    with pytest.raises(BudgetError, match=r"each of the 3 kernels: first/k.*Received: 2 densities"):
        kso.sparsify(network(), [0.1, 0.2])
    with pytest.raises(BudgetError, match=r"leave `budget` out. Received.*budget='uniform'"):
        kso.prune(network(), [0.1, 0.2, 0.3], budget="uniform")
    with pytest.raises(BudgetError, match=r"budget of 'head/kernel'.*density=0.9 keeps 90%"):
        kso.sparsify(network(), {**TABLE, "head": 90})
    with pytest.raises(BudgetError, match=r"or a list of one density.*Received: budget=array"):
        kso.sparsify(network(), budget=np.ones((2, 2)))
    percent = r"not a percentage: density=0.9 keeps 90%, density=0.1 prunes 90%. Received: .*=90"
    for verb in (kso.sparsify, kso.prune):
        with pytest.raises(DensityError, match=percent):
            verb(network(), 90)
    with pytest.raises(DensityError, match=r"in \(0, 1\]. Received: density=1.2"):
        kso.sparsify(network(), 1.2)


def test_layers_and_indices_select_kernels():
    model = network()
    first, second, head = (model.get_layer(name) for name in TABLE)
    for excluded in ([first, head], [0, -1], [first, "head"], np.array([0, 2])):
        assert masked(kso.sparsify(model, 0.5, exclude=excluded, seed=0)) == PATHS[1:2]
        assert masked(kso.prune(model, 0.5, exclude=excluded)) == PATHS[1:2]
    assert masked(kso.sparsify(model, 0.5, include=second, seed=0)) == PATHS[1:2]
    assert masked(kso.sparsify(model, 0.5, include=-1, seed=0)) == PATHS[2:]
    outer = keras.Sequential([keras.Input((32,)), model, L.Dense(4, name="last")])
    assert masked(kso.sparsify(outer, 0.5, include=model, seed=0)) == [
        f"{model.name}/{path}" for path in PATHS
    ]
    with pytest.warns(UserWarning, match="stay dense"):  # no index counts unregistered matrices
        assert masked(kso.sparsify(with_mixer(), 0.5, exclude=-1, seed=0)) == ["a/kernel"]


def with_mixer():
    class Mixer(L.Layer):
        def build(self, input_shape):
            self.mix = self.add_weight(shape=(input_shape[-1], 8), name="mix")

        def call(self, inputs):
            return keras.ops.matmul(inputs, self.mix)

    return keras.Sequential(
        [keras.Input((8,)), L.Dense(8, name="a"), Mixer(name="m"), L.Dense(4, name="b")]
    )


@pytest.mark.parametrize("wrong", [3, -4, 1.5, None, L.Dense, "stranger"])
def test_what_selects_nothing_is_told(wrong):
    if wrong == "stranger":
        wrong = network().get_layer("head")
    with pytest.raises(UnknownWeightError, match=r"first/kernel, second/kernel.*Received: exclude"):
        kso.sparsify(network(), 0.5, exclude=[wrong])


def test_masks_by_the_names_of_layers():
    mask = np.eye(32, dtype=bool)
    model = kso.prune(network(), masks={"second": mask})
    assert masked(model) == PATHS[1:2]
    np.testing.assert_array_equal(kso.prunable_weights(model)[1].mask, mask)
    recurrent = keras.Sequential([keras.Input((4, 32)), L.SimpleRNN(32, name="rnn")])
    for model, masks, received in (
        (network(), {"tail": mask}, r"'tail', which names none"),
        (network(), {"second": mask, "second/kernel": mask}, r"'second/kernel', which"),
        (recurrent, {"rnn": mask}, r"'rnn', which names \['rnn.*kernel', 'rnn.*recurrent_kernel'"),
    ):
        with pytest.raises(UnknownWeightError, match=f"each prunable weight once.*{received}"):
            kso.prune(model, masks=masks)


def test_every_weight_has_a_mask():
    model = network()
    for weight in kso.prunable_weights(model):
        assert weight.mask.all()
    for made in (kso.sparsify(model, 0.2, seed=0), kso.prune(model, 0.2, storage="compact")):
        for weight in kso.prunable_weights(made):
            assert weight.mask.dtype == bool
            np.testing.assert_array_equal(weight.mask, weight.storage.mask_value())
    for weight in kso.prunable_weights(kso.strip(kso.prune(model, 0.2))):
        np.testing.assert_array_equal(weight.mask, weight.value() != 0)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        (kso, "prune_low_magnitude", r"parametrize\(model, MagnitudeMask.*UpdateMasks\(\)"),
        (kso, "PolynomialDecay", r"schedules.Cubic"),
        (kso.schedules, "ConstantSparsity", r"schedules.Constant"),
        (kso.callbacks, "UpdatePruningStep", r"callbacks.UpdateMasks\(\)"),
        (kso, "l1_unstructured", r"prune\(model, density, budget=\"uniform\"\)"),
        (kso, "remove", r"strip\(model\)"),
        (kso, "density", r"report\(model\).density"),
        (kso, "ExactOrthogonal", r"initializers.ExactOrthogonal"),
    ],
)
def test_names_from_elsewhere_are_answered_with_ours(module, name, instead):
    with pytest.raises(AttributeError, match=rf"'{name}'. In keras_sparse_ortho use: {instead}"):
        getattr(module, name)


def test_names_that_nobody_knows_are_plain_attribute_errors():
    for module in (kso, kso.schedules, kso.callbacks, kso.pruning):
        with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
            _ = module.nothing
        assert not hasattr(module, "__wrapped__")


def test_all_that_is_recommended_exists():
    for text in _INSTEAD.values():
        for name in re.findall(r"\b(?:callbacks|schedules)\.\w+|\b[A-Za-z_]+(?=\()", text):
            assert operator.attrgetter(name)(kso)


def test_dir_lists_the_public_names():
    names = {name for name in dir(kso) if not name.startswith("__")}
    assert names == set(kso.__all__)
