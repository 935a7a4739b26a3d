"""What newcomers try: a density for each kernel, layers, indices, names of other packages."""

import inspect

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import (
    BudgetError,
    DensityError,
    NotPrunableError,
    UnknownWeightError,
)
from tests.pruning.checks import with_mixer

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
    return [
        w.path for w in kso.prunable_weights(model) if w.storage is not None
    ]


@pytest.mark.parametrize(
    "given", [TABLE, [*TABLE.values()], np.array([*TABLE.values()])]
)
def test_a_density_for_each_kernel_is_a_budget(given):
    expected = dict(zip(PATHS, TABLE.values(), strict=True))
    top = kso.parametrizations.StraightThroughTopK()
    for made in (
        kso.sparsify(network(), given, seed=0),
        kso.sparsify(network(), budget=given, seed=0),
        kso.prune(network(), given),
        kso.parametrize(network(), top, given),
        kso.parametrize(network(), top, budget=given),
    ):
        assert densities(made) == expected


def test_what_is_wrong_with_densities_is_told():
    with pytest.raises(
        BudgetError,
        match=r"each of the 3 kernels: first/k.*Received: 2 densities",
    ):
        kso.sparsify(network(), [0.1, 0.2])
    with pytest.raises(
        BudgetError, match=r"leave `budget` out. Received.*budget='uniform'"
    ):
        kso.prune(network(), [0.1, 0.2, 0.3], budget="uniform")
    with pytest.raises(
        BudgetError, match=r"budget of 'head/kernel'.*density=0.9 keeps 90%"
    ):
        kso.sparsify(network(), {**TABLE, "head": 90})
    with pytest.raises(
        BudgetError, match=r"or a list of one density.*Received: budget=array"
    ):
        kso.sparsify(network(), budget=np.ones((2, 2)))
    percent = r"not a percentage: density=0.9 keeps 90%, density=0.1 prunes 90%. Received: .*=90"
    for verb in (kso.sparsify, kso.prune):
        with pytest.raises(DensityError, match=percent):
            verb(network(), 90)
    with pytest.raises(
        DensityError, match=r"in \(0, 1\]. Received: density=1.2"
    ):
        kso.sparsify(network(), 1.2)


@pytest.mark.parametrize("verb", [kso.sparsify, kso.prune])
def test_a_density_beside_a_budget_must_be_that_of_the_budget(verb):
    budget = kso.budgets.uniform(network(), 0.25, orthogonal=False)
    with pytest.raises(
        BudgetError, match=r"density 0.25; leave `density` out. Received: .*0.5"
    ):
        verb(network(), 0.5, budget=budget)
    sparse = verb(network(), 0.25, budget=budget)
    assert kso.report(sparse).density == 0.25


def test_layers_and_indices_select_kernels():
    model = network()
    first, second, head = (model.get_layer(name) for name in TABLE)
    for excluded in ([first, head], [0, -1], [first, "head"], np.array([0, 2])):
        assert (
            masked(kso.sparsify(model, 0.5, exclude=excluded, seed=0))
            == PATHS[1:2]
        )
        assert masked(kso.prune(model, 0.5, exclude=excluded)) == PATHS[1:2]
    assert (
        masked(kso.sparsify(model, 0.5, include=second, seed=0)) == PATHS[1:2]
    )
    assert masked(kso.sparsify(model, 0.5, include=-1, seed=0)) == PATHS[2:]
    assert masked(kso.sparsify(model, 0.5, include=-3, seed=0)) == PATHS[:1]
    for anchored, paths in (
        ("^first", PATHS[:1]),
        ("^(first|head)", PATHS[::2]),
        ("el$", PATHS),
    ):
        assert masked(kso.prune(model, 0.5, include=anchored)) == paths
    outer = keras.Sequential(
        [keras.Input((32,)), model, L.Dense(4, name="last")]
    )
    assert masked(kso.sparsify(outer, 0.5, include=model, seed=0)) == [
        f"{model.name}/{path}" for path in PATHS
    ]
    # No index counts unregistered matrices.
    with pytest.warns(UserWarning, match="stay dense"):
        assert masked(kso.sparsify(with_mixer(), 0.5, exclude=-1, seed=0)) == [
            "lift/kernel"
        ]


@pytest.mark.parametrize("wrong", [3, -4, 1.5, None, L.Conv2D, "stranger"])
def test_what_selects_nothing_is_told(wrong):
    if wrong == "stranger":
        wrong = network().get_layer("head")
    with pytest.raises(
        UnknownWeightError,
        match=r"first/kernel, second/kernel.*Received: exclude",
    ):
        kso.sparsify(network(), 0.5, exclude=[wrong])


def test_masks_by_the_names_of_layers():
    mask = np.eye(32, dtype=bool)
    model = kso.apply_masks(network(), {"second": mask})
    assert masked(model) == PATHS[1:2]
    np.testing.assert_array_equal(kso.prunable_weights(model)[1].mask, mask)
    recurrent = keras.Sequential(
        [keras.Input((4, 32)), L.SimpleRNN(32, name="rnn")]
    )
    for model, masks, received in (
        (network(), {"tail": mask}, r"'tail', which names none"),
        (
            network(),
            {"second": mask, "second/kernel": mask},
            r"'second/kernel', which",
        ),
        (
            recurrent,
            {"rnn": mask},
            r"'rnn', which names \['rnn.*kernel', 'rnn.*recurrent_kernel'",
        ),
    ):
        with pytest.raises(
            UnknownWeightError, match=f"each prunable weight once.*{received}"
        ):
            kso.apply_masks(model, masks)


@pytest.mark.parametrize(
    ("module", "name", "instead"),
    [
        (kso, "export_tflite", r"export_litert\(model, path\)"),
        (
            kso.saliency,
            "get_masks",
            r"{w.path: w.mask for w in prunable_weights\(model\)}",
        ),
        (kso.callbacks, "MagnitudeMask", r"parametrizations.MagnitudeMask"),
        (kso.callbacks, "UpdatePruningStep", r"callbacks.UpdateMasks\(\)"),
        (kso, "ExactOrthogonal", r"initializers.ExactOrthogonal"),
    ],
)
def test_names_from_elsewhere_are_answered_with_ours(module, name, instead):
    with pytest.raises(
        AttributeError, match=rf"'{name}'. In keras_sparse_ortho use: {instead}"
    ):
        getattr(module, name)


def rooms():
    found = [getattr(kso, name) for name in dir(kso) if name != "tfmot"]
    return [kso, *filter(inspect.ismodule, found)]


def test_names_that_nobody_knows_are_plain_attribute_errors():
    for module in rooms():
        with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
            _ = module.nothing
        assert not hasattr(module, "__wrapped__")


def test_dir_lists_the_public_names():
    for module in rooms():
        names = {name for name in dir(module) if not name.startswith("__")}
        assert names - set(kso._ROOMS) == set(module.__all__)


# Bases, records and counts, whose densities are not given by hand.
OTHERS = {"live_count", "rotations_for_density", "Saliency"}
OTHERS |= {"Schedule", "Ramp"}  # without `at`


def test_every_function_with_a_density_takes_a_sparsity():
    for module in rooms():
        for name in {*module.__all__} - OTHERS:
            function = getattr(module, name)
            if not callable(function) or module is kso.errors:
                continue
            try:
                names = inspect.signature(function).parameters
            except ValueError:  # a type without a constructor of ours
                continue
            if {"density"} & {*names} and "kwargs" not in names:
                with pytest.raises(
                    DensityError, match=r"`sparsity` .*0.9 prunes 90%.*=90"
                ):
                    function(sparsity=90)


def test_names_of_before_are_still_taken():
    with pytest.raises(ValueError, match="`model` must be a model of Keras 3"):
        kso.export_litert(None, "a", quantization="int8")
    assert kso.export.ExportRouteError is kso.errors.ExportRouteError


def test_a_sparsity_is_one_minus_the_density():
    model = network()
    table = {name: 1 - share for name, share in TABLE.items()}
    for sparse in (
        kso.prune(model, sparsity=table),
        kso.prune(model, sparsity=[*table.values()]),
        kso.sparsify(model, sparsity=np.array([*table.values()]), seed=0),
    ):
        assert densities(sparse) == dict(
            zip(PATHS, TABLE.values(), strict=True)
        )
    assert kso.report(kso.prune(model, sparsity=0.75)).density == 0.25
    cubic = kso.schedules.Cubic(final_sparsity=0.9, initial_sparsity=0.5)
    assert (
        cubic.get_config()
        == kso.schedules.Cubic(0.1, initial_density=0.5).get_config()
    )
    assert (
        kso.MagnitudeMask(sparsity=0.9).get_config()
        == kso.MagnitudeMask(0.1).get_config()
    )
    assert kso.callbacks.TargetDensity(sparsity=0.9).density == 0.1
    assert kso.FixedMask(sparsity=0.9).density == 0.1
    for wrong in (1.0, -0.1, True, "0.9", [0.5, 2.0]):
        with pytest.raises(
            DensityError, match=r"`sparsity` must be a number in \[0, 1\)"
        ):
            kso.prune(model, sparsity=wrong)
    with pytest.raises(
        TypeError, match=r"takes `density` or `sparsity`.*both, sparsity=0.9"
    ):
        kso.prune(model, 0.1, sparsity=0.9)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: kso.prune(None, amount=0.9),
            "Use `density`. It is the fraction",
        ),
        (lambda: kso.prune(None, 0.1, criterion="snip"), "Use `score`"),
        (
            lambda: kso.sparsify(None, 0.1, gain="auto"),
            r"Use initializer=.*ExactOrthogonal\(gain=",
        ),
        (lambda: kso.export_litert(None, "a", dtype="int8"), "Use `mode`"),
        (
            lambda: kso.prune(None, 0.1, quantize="int8"),
            r"Use quantize_aware\(model\)",
        ),
        (
            lambda: kso.SoftThreshold(density=0.1),
            r"Use callbacks.TargetDensity\(density\)",
        ),
        (
            lambda: kso.schedules.Cubic(0.1, steps=9),
            "Use `end_step`. It is a step, or a fraction",
        ),
        (
            lambda: kso.MagnitudeMask(density=0.1),
            "Use `schedule`. It is a Schedule, or",
        ),
        (
            lambda: kso.prune(None, 0.1, scoer="snip"),
            "Its arguments are: model, density, score, ",
        ),
    ],
)
def test_keywords_from_elsewhere_are_answered_with_ours(call, message):
    with pytest.raises(
        TypeError, match=f"has no argument.*{message}.*Received: "
    ):
        call()


def test_the_mask_of_a_layer_is_where_its_weights_are():
    layer = kso.prune(network(), 0.5).get_layer("head")
    for name in ("mask", "masks"):
        with pytest.raises(
            AttributeError,
            match=r"Use: {w.path: w.mask for w in prunable_weights",
        ):
            getattr(layer, name)
    block = kso.layers.BlockSparseDense(16, block=4, sparsity=0.75)
    block.build((None, 16))
    assert block.density == 0.25


@pytest.mark.parametrize("given", ["2:4", (4, 4), "4x4", "4 x 4", [4, 4]])
def test_structures_in_short_form(given):
    full = kso.NByM(2, 4) if given == "2:4" else kso.Block(4, 4)
    made = [
        kso.sparsify(network(), 0.5, structure=own, seed=0)
        for own in (given, full)
    ]
    made += [kso.prune(network(), 0.5, structure=own) for own in (given, full)]
    live = [
        [weight.live for weight in kso.prunable_weights(model)]
        for model in made
    ]
    assert live[0] == live[1]
    assert live[2] == live[3]
    assert kso.initializers.ExactOrthogonal(structure=given).structure == full
    for wrong in ("2-4", "2:3:4", "four"):
        with pytest.raises(
            ValueError, match=r'"n:m".*"32x32".*Received: structure='
        ):
            kso.prune(network(), 0.5, structure=wrong)


def test_classes_of_layers_select_kernels():
    inputs = keras.Input((4, 8))
    x = L.MultiHeadAttention(2, 4, name="mha")(inputs, inputs)
    model = keras.Model(
        inputs, L.Dense(8, name="head")(L.Dense(8, name="first")(x))
    )
    dense = ["first/kernel", "head/kernel"]
    assert masked(kso.prune(model, 0.5, include=L.Dense)) == dense
    assert masked(kso.prune(model, 0.5, exclude=L.MultiHeadAttention)) == dense
    assert (
        masked(kso.prune(model, 0.5, exclude=[L.MultiHeadAttention, "head"]))
        == dense[:1]
    )
    assert len(masked(kso.prune(model, 0.5, exclude=L.Dense))) == 4
    wrapped = kso.prune(model, 0.5)  # the wrappers stand where the layers stood
    assert kso.strip(wrapped).count_params() == model.count_params()
    found = {
        w.path for w in kso.prunable_weights(wrapped) if L.Dense in w.inside
    }
    assert found == {*dense}
    with pytest.raises(
        NotPrunableError, match=r"leave no kernel.*first/kernel.*exclude=<class"
    ):
        kso.prune(model, 0.5, exclude=L.Layer)
    with pytest.raises(
        UnknownWeightError, match=r"their classes.*Received: include=<class"
    ):
        kso.prune(model, 0.5, include=L.Conv2D)


def test_the_fraction_that_stays_is_logged_once(caplog):
    for density in (0.8125, 0.8125, 0.5, 0.1, 1.0):
        kso.prune(network(), density)
    [record] = caplog.records
    assert "keeps 81.25% of the entries" in record.getMessage()
    assert "density=0.1875, or sparsity=0.8125" in record.getMessage()


def test_percent_in_text_is_explained():
    with pytest.raises(
        DensityError, match=r"Give a number, not text.*density=0.1 keeps 10%"
    ):
        kso.sparsify(network(), "10%")
