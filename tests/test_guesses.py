"""What users of other packages try is answered with the step to take, in one line."""

import inspect

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import _foreign_names

L = keras.layers
pytestmark = pytest.mark.core


def rooms():
    later = ("export", "shrinking", "tfmot")
    found = [getattr(kso, name) for name in dir(kso) if name not in later]
    return [kso, *filter(inspect.ismodule, found)]


def model():
    layers = [keras.Input((8,)), L.Dense(4, name="a"), L.Dense(2, name="b")]
    return keras.Sequential(layers)


def sparse():
    return kso.prune(model(), 0.5)


def one_line(error):
    """The message of an error, which must be one line without nested errors."""
    text = str(error.value)
    assert "\n" not in text
    assert not any(
        internal in text for internal in ("DynamicSparseTraining", "__init__()")
    )
    return text


# Each guess with a part of the step that answers it.
NAMES = {
    # TensorFlow Model Optimization
    "prune_low_magnitude": "MagnitudeMask(schedules.Cubic(density))",
    "strip_pruning": "strip(model)",
    "UpdatePruningStep": "callbacks.UpdateMasks()",
    "PolynomialDecay": "schedules.Cubic",
    "ConstantSparsity": "schedules.Constant",
    "PruningSummaries": "callbacks.DensityLogger()",
    "quantize_annotate_layer": "quantize_aware(model, exclude=...)",
    "cluster_weights": "quantize_aware(model, 'int4')",
    # jaxpruner
    "MagnitudePruning": "callbacks.UpdateMasks()",
    "GlobalMagnitudePruning": "MagnitudeMask",
    "SteMagnitudePruning": "parametrizations.StraightThroughTopK()",
    "SteRandomPruning": "parametrizations.StraightThroughTopK()",
    "NoPruning": "dense until it is sparsified",
    "SparseState": "masks belong to the model",
    "OneShotSchedule": "prune(model, density)",
    "NoUpdateSchedule": "FixedMask(density)",
    "PeriodicSchedule": "schedules.Cubic",
    "sparsity_distributions": "`budget`",
    "algorithms": "prune for a trained model",
    "SaliencyPruning": 'score="snip"',
    "StaticRandomSparse": "sparsify(model",
    "wrap_optax": "docs/custom_loops.md",
    "create_updater_from_config": "docs/custom_loops.md",
    "summarize_sparsity": "report(model)",
    # torch.nn.utils.prune, torchao, Torch-Pruning
    "l1_unstructured": 'budget="uniform"',
    "L1Unstructured": 'budget="uniform"',
    "global_unstructured": "prune(model, density)",
    "random_unstructured": "saliency.random",
    "ln_structured": "remove_channels(model)",
    "custom_from_mask": "apply_masks(model, {path: mask})",
    "remove": "strip(model)",
    "is_pruned": "report(model).density",
    "sparsify_": "sparsify",
    "SemiSparseWeightConfig": '"2:4"',
    "Int8WeightOnlyConfig": "mode='int8'",
    "DependencyGraph": "narrow(model",
    # neural-compressor, llm-compressor
    "WeightPruningConfig": "callbacks.UpdateMasks()",
    "PostTrainingQuantConfig": "mode='int8'",
    "SparseGPTModifier": 'score="obs"',
    "WandaPruningModifier": 'score="obs"',
    "DistillationConfig": "recovery.distill",
    # methods
    "GMP": "MagnitudeMask",
    "STR": "SoftThreshold()",
    "SNIP": "saliency.snip",
    "RigLSchedule": None,
    "EOI": "initializers.ExactOrthogonal",
    "TargetSparsity": "callbacks.TargetDensity(density)",
    "SparsityLogger": "callbacks.DensityLogger()",
    "low_rank": "LowRankSoftThreshold()",
    "prune_channels": "remove_channels(model)",
    "clustering": "quantize_aware(model, 'int4')",
    "n_of_m": "NByM(n, m)",
    # Keras, scikit-learn
    "load_model": "keras.saving.load_model(path)",
    "save_model": "model.save",
    "summary": "print(report(model))",
    "fit": "`fit` of the model",
    "finetune": "`fit` of the model",
    "fine_tune": "`fit` of the model",
    "EarlyStopping": "Keras",
    "Orthogonal": "initializers.ExactOrthogonal",
    # files
    "to_tflite": "export_litert(model, path)",
    "export_tflite": "export_litert(model, path)",
    "TFLiteConverter": "export_litert(model, path)",
    "export_onnx": "format='onnx'",
    "finalize": "strip(model)",
    "remove_masks": "strip(model)",
    "get_sparsity": "1 - report(model).density",
    "get_masks": "w.mask for w in prunable_weights(model)",
    "benchmark": "export.latencies",
}


@pytest.mark.parametrize("name", [name for name, step in NAMES.items() if step])
def test_names(name):
    for room in (kso, kso.saliency):
        if hasattr(room, name):  # `random` and the like
            continue
        with pytest.raises(AttributeError) as error:
            getattr(room, name)
        assert f"{name!r}. In keras_sparse_ortho use: " in one_line(error)
        assert NAMES[name] in one_line(error)


def test_imports_of_names_are_answered_as_well():
    """Python's own error would end at "cannot import name"."""
    with pytest.raises(
        ImportError, match=r"use: parametrize\(model, SoftThreshold\(\)\)"
    ) as error:
        from keras_sparse_ortho import STR  # noqa: F401
    one_line(error)
    with pytest.raises(ImportError, match=r"use: schedules.Cubic\(density\)"):
        from keras_sparse_ortho.schedules import OneCycle  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from keras_sparse_ortho import nothing  # noqa: F401


@pytest.mark.parametrize(
    "name", ["tflite", "export_onnx", "to_tflite", "evaluate_litert"]
)
def test_names_in_the_room_that_loads_later(name):
    with pytest.raises(AttributeError, match="In keras_sparse_ortho use: "):
        getattr(kso.export, name)


def test_rooms_are_not_called():
    with pytest.raises(
        TypeError, match=r"not callable. Use: export_litert\(model, path\)"
    ):
        kso.export(model(), "m.tflite")
    with pytest.raises(
        TypeError, match=r"not callable. Use: one of its functions: .*synflow"
    ):
        kso.saliency(model())


# A call, and a part of the step in its error.
CALLS = {
    # names of arguments
    "prune(amount=)": (lambda: kso.prune(None, amount=0.9), "Use `density`"),
    "prune(layers=)": (
        lambda: kso.prune(None, 0.1, layers=["a"]),
        "Use `include`",
    ),
    "prune(scope=)": (
        lambda: kso.prune(None, 0.1, scope="global"),
        "Use `include`",
    ),
    "prune(exclude_layers=)": (
        lambda: kso.prune(None, 0.1, exclude_layers="a"),
        "Use `exclude`",
    ),
    "prune(ignored_layers=)": (
        lambda: kso.prune(None, 0.1, ignored_layers=[]),
        "Use `exclude`",
    ),
    "prune(block_size=)": (
        lambda: kso.prune(None, 0.1, block_size=(1, 1)),
        "Use `structure`",
    ),
    "prune(structured=)": (
        lambda: kso.prune(None, 0.1, structured=True),
        "Use `structure`",
    ),
    "prune(sparsity_m_by_n=)": (
        lambda: kso.prune(None, 0.1, sparsity_m_by_n=(2, 4)),
        "Use `structure`",
    ),
    "prune(iterations=)": (
        lambda: kso.prune(None, 0.1, iterations=9),
        "callbacks.UpdateMasks()",
    ),
    "prune(importance=)": (
        lambda: kso.prune(None, 0.1, importance="l1"),
        "Use `score`",
    ),
    "prune(calibration_data=)": (
        lambda: kso.prune(None, 0.1, calibration_data=1),
        "Use `data`",
    ),
    "prune(x=)": (lambda: kso.prune(None, 0.1, x=1), "Use `data`"),
    "prune(random_state=)": (
        lambda: kso.prune(None, 0.1, random_state=0),
        "arguments are",
    ),
    "sparsify(random_state=)": (
        lambda: kso.sparsify(None, 0.1, random_state=0),
        "Use `seed`",
    ),
    "sparsify(rng=)": (lambda: kso.sparsify(None, 0.1, rng=0), "Use `seed`"),
    "sparsify(method=)": (
        lambda: kso.sparsify(None, 0.1, method="eoi"),
        "Use `initializer`",
    ),
    "sparsify(distribution=)": (
        lambda: kso.sparsify(None, 0.1, distribution="erk"),
        "`budget`",
    ),
    "quantize_aware(bits=)": (
        lambda: kso.quantize_aware(None, bits=8),
        "Use `weights`",
    ),
    "export_litert(bits=)": (
        lambda: kso.export_litert(None, "a", bits=8),
        "Use `mode`",
    ),
    "export_litert(calibration_data=)": (
        lambda: kso.export_litert(None, "a", calibration_data=1),
        "Use `representative_data`",
    ),
    "export_litert(optimizations=)": (
        lambda: kso.export_litert(None, "a", optimizations=[]),
        "Use `mode`",
    ),
    "shrink(labels=)": (lambda: kso.shrink(None, 1, "a", labels=1), "(x, y)"),
    "shrink(y=)": (lambda: kso.shrink(None, 1, "a", y=1), "(x, y)"),
    "shrink(target_size=)": (
        lambda: kso.shrink(None, 1, "a", target_size=1),
        "Use `max_bytes`",
    ),
    "shrink(time_limit=)": (
        lambda: kso.shrink(None, 1, "a", time_limit=1),
        "Use `minutes`",
    ),
    "shrink(max_accuracy_drop=)": (
        lambda: kso.shrink(None, 1, "a", max_accuracy_drop=1),
        "Use `max_drop`",
    ),
    "RigL(alpha=)": (
        lambda: kso.callbacks.RigL(1, alpha=0.3),
        "RigL() has no argument `alpha`",
    ),
    "RigL(delta_t=)": (
        lambda: kso.callbacks.RigL(1, delta_t=100),
        "Use `frequency`",
    ),
    "RigL(update_freq=)": (
        lambda: kso.callbacks.RigL(1, update_freq=100),
        "Use `frequency`",
    ),
    "RigL(drop_fraction=)": (
        lambda: kso.callbacks.RigL(1, drop_fraction=0.3),
        "Use `fraction`",
    ),
    "SET(zeta=)": (
        lambda: kso.callbacks.SET(zeta=0.3),
        "SET() has no argument `zeta`",
    ),
    "SET(T_end=)": (lambda: kso.callbacks.SET(T_end=100), "Use `end_step`"),
    "SET(sparsity=)": (
        lambda: kso.callbacks.SET(sparsity=0.9),
        "Its arguments are: frequency",
    ),
    "load_litert(num_threads=)": (
        lambda: kso.load_litert("a", num_threads=4),
        "Use `threads`",
    ),
    "distill(lr=)": (
        lambda: kso.recovery.distill(1, 2, 3, lr=1),
        "Use `learning_rate`",
    ),
    "distill(temperature=)": (
        lambda: kso.recovery.distill(1, 2, 3, temperature=1),
        "logits",
    ),
    "distill(y=)": (lambda: kso.recovery.distill(1, 2, 3, y=1), "`data`"),
    "Cubic(final_epoch=)": (
        lambda: kso.schedules.Cubic(0.1, end_epoch=9),
        "Use `end_step`",
    ),
    "restore_statistics(x=)": (
        lambda: kso.restore_statistics(1, x=1),
        "Use `data`",
    ),
    # arguments by position
    "UpdateMasks(model)": (
        lambda: kso.callbacks.UpdateMasks(1),
        "UpdateMasks() in the callbacks",
    ),
    "RigL(x, y)": (
        lambda: kso.callbacks.RigL(np.ones((4, 2)), np.ones(4)),
        "Use RigL((x, y))",
    ),
    "sensitivity(m, x, y)": (
        lambda: kso.sensitivity(1, 2, 3),
        "sensitivity(model, (x, y))",
    ),
    "shrink(m, x, y, p)": (
        lambda: kso.shrink(1, 2, 3, "a"),
        "shrink(model, (x, y), path)",
    ),
    "distill(s, t, x, y)": (
        lambda: kso.recovery.distill(1, 2, 3, 4),
        "distill(student, teacher, x",
    ),
    "Budget('erk', 0.1)": (
        lambda: kso.Budget("erk", 0.1),
        "Use budgets.erk(model, density)",
    ),
    "report(m, x)": (
        lambda: kso.report(model(), 1),
        "by position: model. Give the others by name: orthogonality",
    ),
    "narrow(m, w, x)": (
        lambda: kso.narrow(1, 0.5, 3),
        "by position: model, widths. Use narrow(model, widths, data=x)",
    ),
    "widths(m, x, 5)": (
        lambda: kso.widths(1, 2, 5),
        "Give the others by name: multiple_of",
    ),
    "Constant(0.5, ...)": (
        lambda: kso.schedules.Constant(0.5, 1, 2, 3, 4, 5, 6),
        "by position",
    ),
    # values
    "structure='channels'": (
        lambda: kso.prune(model(), 0.5, structure="channels"),
        "structure=calibration.Channels()",
    ),
    "structure='N:M'": (
        lambda: kso.prune(model(), 0.5, structure="N:M"),
        'structure="2:4"',
    ),
    "score='l1'": (
        lambda: kso.prune(model(), 0.5, score="l1"),
        'score="magnitude"',
    ),
    "score=function": (
        lambda: kso.prune(model(), 0.5, score=lambda kernel: abs(kernel)),
        "a subclass of saliency.ModelScore",
    ),
    "storage='csr'": (
        lambda: kso.sparsify(model(), 0.5, storage="csr"),
        'storage="compact"',
    ),
    "budget='layerwise'": (
        lambda: kso.prune(model(), 0.5, budget="layerwise"),
        '"uniform"',
    ),
    "weights=8": (lambda: kso.quantize_aware(model(), 8), 'weights="int8"'),
}


@pytest.mark.parametrize("guess", CALLS)
def test_calls(guess):
    call, step = CALLS[guess]
    with pytest.raises((TypeError, ValueError)) as error:
        call()
    text = one_line(error)
    assert step in text
    assert "Received: " in text


def test_values_are_shown_in_one_line():
    with pytest.raises(TypeError) as error:
        kso.prune(None, 0.1, x=np.ones((256, 8), "float32"))
    assert one_line(error).endswith(
        "Received: x=ndarray of shape (256, 8) and type float32"
    )
    with pytest.raises(TypeError, match=r"Received: masks=\[array.*0.*\]$"):
        kso.sparsify(None, 0.1, masks=[np.eye(2)])


@pytest.mark.torch_only
@pytest.mark.filterwarnings(
    r"ignore:`torch.jit:DeprecationWarning"
)  # torch's own
def test_compiled_models_of_torch():
    import torch

    for function in (kso.report, lambda wrapped: kso.prune(wrapped, 0.5)):
        with pytest.raises(
            kso.errors.NotPrunableError,
            match=r"After torch.compile use the model that was compiled: model\._orig_mod",
        ) as error:
            function(torch.compile(model()))
        one_line(error)


MODES = {
    "INT8": "mode='int8'",
    "fp16": "mode='float16'",
    "full_int8": "mode='int8'",
    "full-integer": "mode='int8'",
    "dynamic_range": "mode='dynamic_int8'",
    "4bit": "mode='dynamic_int4'",
}


@pytest.mark.tensorflow_only
@pytest.mark.parametrize("mode", MODES)
def test_modes(mode, tmp_path):
    with pytest.raises(
        ValueError, match=rf"Use {MODES[mode]}\. Received: mode='{mode}'"
    ):
        kso.export_litert(model(), tmp_path / "m.tflite", mode=mode)


@pytest.mark.tensorflow_only
def test_types_of_ends_and_metrics(tmp_path):
    import tensorflow as tf

    for kind in (tf.int8, np.int8):
        with pytest.raises(
            ValueError,
            match=r'Use text: inference_input_type="int8"\. Received',
        ):
            kso.export_litert(
                model(),
                tmp_path / "m.tflite",
                mode="int8",
                representative_data=np.ones((4, 8), "float32"),
                inference_input_type=kind,
            )
    rows = np.random.default_rng(0).normal(size=(40, 8)).astype("float32")
    with pytest.raises(
        ValueError, match=r"Use no `metric`, and data=\(x, labels\)\. Received"
    ):
        kso.shrink(model(), rows, tmp_path / "m.tflite", metric="accuracy")


def objects():
    pruned = sparse()
    return {
        "report": kso.report(pruned),
        "row": kso.report(pruned).rows[0],
        "budget": kso.budgets.erk(model(), 0.5, orthogonal=False),
        "weight": kso.prunable_weights(pruned)[0],
        "plan": kso.prune.plan(model(), 0.5),
        "layer": pruned.get_layer("a"),
    }


ATTRIBUTES = {
    "report.sparsity": "1 - report.density",
    "report.to_pandas": "pandas.DataFrame",
    "report.to_json": "json.dumps(report.to_dict())",
    "report.summary": "print(report)",
    "report.layers": "report.rows",
    "row.sparsity": "1 - row.density",
    "budget.densities": "dict(budget)",
    "weight.sparsity": "1 - weight.density",
    "weight.numpy": "`value`",
    "plan.apply": "models.apply(model, plan)",
    "layer.mask": "w.mask for w in prunable_weights(layer)",
    "layer.kernel_mask": "w.mask for w in prunable_weights(layer)",
    "layer.weight_mask": "w.mask for w in prunable_weights(layer)",
    "layer.sparsity": "1 - prunable_weights(layer)[0].density",
}


@pytest.mark.parametrize("guess", ATTRIBUTES)
def test_attributes(guess):
    owner, name = guess.split(".")
    with pytest.raises(AttributeError) as error:
        getattr(objects()[owner], name)
    text = one_line(error)
    assert f"has no attribute '{name}'. Use: " in text
    assert ATTRIBUTES[guess] in text


def test_entries():
    made = objects()
    with pytest.raises(
        TypeError, match=r"Use: {row.path: row for row in report.rows}"
    ):
        made["report"]["a/kernel"]
    for table in (made["budget"], made["plan"]):
        with pytest.raises(
            KeyError, match=r"by path: 'a/kernel', 'b/kernel'. Received: 'a'"
        ):
            table["a"]
        assert "a" not in table
        assert table.get("a") is None


@pytest.mark.tensorflow_only
def test_files(tmp_path):
    kso.export_litert(model(), tmp_path / "m.tflite")
    file, x = kso.load_litert(tmp_path / "m.tflite"), np.ones((2, 8), "float32")
    with pytest.raises(
        TypeError, match=r"'LiteRTModel' object is not callable. Use: `predict`"
    ):
        file(x)
    for name, step in (
        ("evaluate", "`predict`"),
        ("get_input_details", "`inputs`"),
    ):
        with pytest.raises(AttributeError, match=f"'{name}'. Use: {step}"):
            getattr(file, name)


def test_a_property_that_fails_keeps_its_own_error():
    class Broken(_foreign_names.Answering):
        @property
        def figure(self):
            return self.missing_part

    with pytest.raises(AttributeError, match="no attribute 'missing_part'"):
        _ = Broken().figure


def test_every_public_function_answers_other_keywords():
    raw = set()
    for room in rooms():
        for name in room.__all__:
            function = getattr(room, name)
            if room is kso.errors or not callable(function):
                continue
            try:
                parameters = inspect.signature(function).parameters
            except ValueError:
                continue
            takes_any = any(
                p.kind is p.VAR_KEYWORD for p in parameters.values()
            )
            if takes_any or inspect.isabstract(function):
                continue
            with pytest.raises(TypeError) as error:
                function(nonsense=1)
            if "has no argument `nonsense`. Its arguments are: " not in str(
                error.value
            ):
                raw.add(name)
    assert raw == RECORDS


# Dataclasses and plain classes, whose constructors are Python's, and functions that dispatch on a
# layer.
RECORDS = {
    *("ChannelCall", "ChannelGroup", "ChannelGroups", "ChannelRule"),
    *(
        "Block",
        "Channels",
        "Draw",
        "KernelChange",
        "KernelLayout",
        "NByM",
        "Plan",
    ),
    *("PrunableWeight", "Saliency", "Sensitivity", "SparsityReport", "Target"),
    *("LayerScore", "LossDerivatives", "Score", "WidthTable", "register_score"),
    *("WrappedForm", "register_storage", "kernel_layouts", "kernel_positions"),
    *("Rows", "kernel_rows", "kernel_rounding", "keeps_range"),
}


def test_guesses_stand_once_in_the_table():
    guesses = [
        guess for line, _ in _foreign_names.STEPS for guess in line.split()
    ]
    folded = [_foreign_names.folded(guess) for guess in guesses]
    assert len({*folded}) == len(folded)
