"""`shrink(target="micro")`: the file of least loss within the flash and the arena of a device.

Arenas are those of a function here; `tests/compat/test_micro.py` asks tflite-micro.
"""

import dataclasses
import importlib.util
import zlib

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import ShrinkError
from keras_sparse_ortho.export import (
    export_litert,
    is_decode,
    read_model,
)
from keras_sparse_ortho.shrinking import (
    Activations,
    Examples,
    Microcontroller,
    MicroCosts,
    MicroFigures,
    MicroReport,
    MicroSearch,
    MicroTrials,
    Score,
    Terms,
    Trial,
    least_loss,
    shrink,
)
from tests.shrinking import networks

L = keras.layers
ROWS = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")


def small():
    return keras.Sequential([keras.Input((8,)), L.Dense(3, "softmax")])


# --- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"max_flash": 100}, "target=None, max_flash=100"),
        ({"max_ram": 100}, "target=None, max_ram=100"),
        ({"arena": len}, "target=None, arena=<built-in function len>"),
        ({"decode_code": 5}, "target=None, decode_code=5"),
        ({"target": "nano", "max_flash": 100}, "target='nano'"),
        ({"target": "arm64", "max_ram": 9}, "target='arm64', max_ram=9"),
        ({"target": "micro"}, "max_flash=None, max_ram=None"),
        ({"target": "micro", "max_flash": -1}, "max_flash=-1"),
        ({"target": "micro", "max_flash": 0}, "max_flash=0"),
        ({"target": "micro", "max_flash": "64k"}, "max_flash='64k'"),
        ({"target": "micro", "max_ram": -5}, "max_ram=-5"),
        ({"target": "micro", "max_ram": 1e4}, "max_ram=10000.0"),
        ({"target": "micro", "max_ram": 9, "decode_code": -1}, "code=-1"),
        ({"target": "micro", "max_ram": 9, "max_bytes": 9}, "max_bytes=9"),
        ({"target": "micro", "max_ram": 9, "max_ms": 1.0}, "max_ms=1.0"),
        ({"target": "micro", "max_ram": 9, "prefer": "ms"}, "prefer='ms'"),
        ({"target": "micro", "max_ram": 9, "arena": 5}, "arena=5"),
    ],
)
def test_arguments_that_do_not_fit(options, received, tmp_path):
    options.setdefault("arena", len if "target" in options else None)
    path = tmp_path / "m.h"
    with pytest.raises(ValueError, match=r"Received: ") as error:
        shrink(small(), ROWS, path, minutes=0, **options)
    assert received in str(error.value)
    assert not path.exists()


def test_a_compressed_array_is_refused(tmp_path):
    path = tmp_path / "m.tflite.gz"
    with pytest.raises(ValueError, match=r"reads neither from gzip.*m.tflite"):
        shrink(small(), ROWS, path, target="micro", max_ram=900, arena=len)


def test_without_tflite_micro_the_extra_is_named(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "tflite_micro" else found(name),
    )
    with pytest.raises(
        ImportError, match=r"arena=.*keras-sparse-ortho\[micro\].*tflite_micro"
    ):
        shrink(small(), ROWS, tmp_path / "m.h", target="micro", max_ram=900)


class Ring(L.Layer):
    """The last four frames, in a variable that each call assigns."""

    def build(self, shape):
        self.frames = self.add_weight(
            shape=(1, 4, shape[-1]), trainable=False, name="frames"
        )

    def call(self, frame):
        frames = keras.ops.concatenate([self.frames[:, 1:], frame], axis=1)
        self.frames.assign(frames)
        return frames


@pytest.mark.core
def test_a_streaming_model_is_refused_by_its_variable(tmp_path):
    inputs = keras.Input((1, 8), batch_size=1)
    frames = Ring(name="ring")(inputs)
    model = keras.Model(inputs, L.Dense(3)(L.Flatten()(frames)))
    before = keras.ops.convert_to_numpy(model.layers[1].frames)
    with pytest.raises(ValueError, match=r"ASSIGN_VARIABLE.*ring/frames"):
        shrink(
            model,
            ROWS[:, None],
            tmp_path / "m.h",
            target="micro",
            max_ram=900,
            arena=len,
        )
    after = keras.ops.convert_to_numpy(model.layers[1].frames)
    np.testing.assert_array_equal(after, before)


# --- activations ------------------------------------------------------------------------------


@pytest.mark.core
def test_activations_that_live_together():
    inputs = keras.Input((6, 6, 2))
    x = L.Conv2D(8, 3, padding="same", name="a")(inputs)
    x = L.ReLU()(L.BatchNormalization()(x))
    x = L.DepthwiseConv2D(3, padding="same")(x)
    x = L.Conv2D(4, 1, name="b")(x)
    x = L.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, L.Dense(3)(x))
    activations = Activations(model, kso.channel_groups(model))
    assert activations.peak({}) == 36 * (8 + 8)
    assert activations.peak({"a": 4}) == 36 * (4 + 4)
    assert activations.peak({"a": 1}) == 36 * (1 + 4)
    assert activations.peak({"a": 1, "b": 1}) == 36 * (2 + 1)


@pytest.mark.core
def test_activations_of_a_branch_wait_for_the_sum():
    inputs = keras.Input((6, 6, 2))
    x = L.Conv2D(8, 1, name="a")(inputs)
    y = L.Conv2D(16, 1, name="b")(x)
    y = L.Conv2D(8, 1, name="c")(y)
    x = L.GlobalAveragePooling2D()(L.Add()([x, y]))
    model = keras.Model(inputs, L.Dense(3)(x))
    activations = Activations(model, kso.channel_groups(model))
    assert activations.peak({}) == 36 * (8 + 16 + 8)
    assert activations.peak({"b": 8}) == 36 * (8 + 8 + 8)
    # The channels of the sum are one group.
    (name,) = [
        group.name for group in kso.channel_groups(model) if "a" in group.makers
    ]
    assert activations.peak({name: 4}) == 36 * (4 + 16 + 4)


# --- figures ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pruned_file(tmp_path_factory):
    """An int8 file of two convolutions at density 0.2, of 864 and of 768 entries."""
    keras.utils.set_random_seed(0)
    layers = [L.Conv2D(24, 3), L.Conv2D(32, 1), L.GlobalAveragePooling2D()]
    model = keras.Sequential([keras.Input((8, 8, 4)), *layers, L.Dense(3)])
    pruned = kso.strip(kso.prune(model, 0.2, budget="uniform"))
    rows = np.random.default_rng(0).normal(size=(20, 8, 8, 4))
    path = tmp_path_factory.mktemp("micro") / "model.tflite"
    export_litert(
        pruned, path, mode="int8", representative_data=rows.astype("float32")
    )
    return path.read_bytes()


def arena_of(array):
    """Like LiteRT Micro's: the largest filter that is unpacked comes on top."""
    model = read_model(array)
    graph = model.subgraphs[0]
    sizes = [0]
    for operator in graph.operators:
        if is_decode(model, operator):
            sizes.append(np.prod(graph.tensors[operator.outputs[0]].shape))
    return 1000 + int(max(sizes))


@pytest.mark.tensorflow_only
def test_packed_arrays_are_tried_with_fewer_filters(pruned_file):
    def figures(max_flash, max_ram, **options):
        device = Microcontroller(max_flash, max_ram, arena=arena_of, **options)
        return device.figures(pruned_file, "m.tflite")

    plain = figures(None, 1000)
    assert (plain.arena, plain.is_packed, plain.ram) == (1000, False, None)
    assert plain.operators["Conv2D"] == 2
    both = figures(None, 5000)  # of two within the limits the smaller one
    assert (both.arena, both.is_packed, both.ram) == (1864, True, 864)
    assert both.flash < plain.flash
    assert both.operators["Decode"] == 2
    one = figures(plain.flash - 1, 1800)
    assert (one.arena, one.ram, one.operators["Decode"]) == (1768, 768, 1)
    assert both.flash < one.flash < plain.flash
    # Code counts: then the plain array is smaller.
    code = figures(None, 5000, decode_code=11_100)
    assert code == plain
    counted = figures(both.flash + 10, 5000, decode_code=10)
    assert counted.flash == both.flash + 10


def test_figures_beside_limits():
    device = Microcontroller(1000, 500, arena=len)
    figures = MicroFigures(1100, 450, {})
    assert device.excess(figures) == {"max_flash": 100, "max_ram": 0}
    assert device.reach(figures) == pytest.approx(1.1)
    assert device.reach(MicroFigures(1000, 500, {})) == 1.0
    ram_alone = Microcontroller(None, 400, arena=len)
    assert ram_alone.excess(figures) == {"max_ram": 50}


@pytest.mark.tensorflow_only
@pytest.mark.parametrize("size", [0, -3, 2.5, None])
def test_an_arena_must_be_a_number_of_bytes(size, pruned_file):
    device = Microcontroller(None, 500, arena=lambda array: size)
    with pytest.raises(ValueError, match=r"`arena\(array\)` must be a positi"):
        device.figures(pruned_file, "m.tflite")


# --- choice and report ------------------------------------------------------------------------


def trial(name, flash, arena, lost, **options):
    figures = MicroFigures(flash, arena, {"Conv2D": 2, "Mean": 1}, **options)
    score = Score(1 - lost, 0.0, 1.0)
    return Trial(name, "int8", score, 900, 90, lost=lost, micro=figures)


def test_the_file_of_least_loss_within_both_limits_is_taken():
    device = Microcontroller(1000, 500, arena=len)
    dense = trial("dense", 2000, 400, 0.0)
    wide, narrow = (
        trial("wide", 900, 500, 0.02),
        trial("narrow", 500, 300, 0.03),
    )
    smaller = trial("smaller", 800, 500, 0.02)
    high = trial("high", 900, 501, 0.01)
    failed = Trial("failed", "int8", reason="refused")
    trials = [dense, narrow, wide, high, failed]
    assert least_loss(trials, 1.0, device) is wide
    assert least_loss([*trials, smaller], 1.0, device) is smaller
    assert least_loss(trials, 0.015, device) is None
    assert least_loss([dense, high, failed], 1.0, device) is None


def report_of(taken, *trials, **options):
    return MicroReport(
        "m.h",
        taken,
        trials,
        "accuracy",
        99,
        Score(1.0, 1.0, 1.0),
        1.0,
        device=Microcontroller(1000, 500, arena=len),
        **options,
    )


def test_the_report_has_flash_arena_and_operators_of_each_file():
    dense = trial("dense", 2345, 678, 0.0)
    packed = trial("packed", 990, 450, 0.02, is_packed=True, ram=64)
    failed = Trial("failed", "int8", reason="refused")
    report = report_of(packed, dense, packed, failed)
    header, *lines = str(report).splitlines()
    assert header.split()[-3:] == ["flash", "arena", "s"]
    assert lines[0].split()[-3:-1] == ["2,345", "678"]
    assert lines[1].startswith("->packed")
    assert "no file: refused" in lines[2]
    assert "max_flash=1,000: 10 bytes are left." in report.words
    assert "max_ram=500: 50 bytes are left." in report.words
    assert any("AddDecode" in words for words in report.words)
    assert report.words[-2:] == (
        "Operators of dense; packed:",
        "  Conv2D 2, Mean 1",
    )
    assert report.frontier == (dense, packed)
    assert not dense.beats(packed)
    worse = trial("worse", 995, 450, 0.02)
    assert packed.beats(worse)


def test_the_report_says_by_how_much_the_nearest_file_misses():
    dense = trial("dense", 2000, 400, 0.0)
    near = trial("near", 1100, 520, 0.2)
    report = report_of(None, dense, near, untried=("other widths",))
    assert report.words[:4] == (
        "No file was written.",
        "max_flash=1,000: the nearest file, near, misses it by 100 bytes.",
        "max_ram=500: the nearest file, near, misses it by 20 bytes.",
        "The least loss is 0.0 points of accuracy: dense.",
    )
    assert "More minutes would allow other widths." in report.words
    dense_alone = report_of(None, dense)
    assert any("dense, is within it" in text for text in dense_alone.words)
    assert report_of(None).words == ("No file could be made.",)


@pytest.mark.tensorflow_only
def test_the_report_writes_arrays_and_files(pruned_file, tmp_path):
    packed = trial("packed", 990, 450, 0.02, is_packed=True, ram=800)
    plain = trial("plain", 1990, 400, 0.01)
    content = zlib.compress(pruned_file)
    report = report_of(packed, packed, plain, contents={0: content, 1: content})
    report.write(packed, tmp_path / "packed.h")
    text = (tmp_path / "packed.h").read_text()
    assert "resolver.AddDecode();" in text
    assert "at most 768 bytes" in text
    report.write(plain, tmp_path / "plain.h")
    assert "AddDecode" not in (tmp_path / "plain.h").read_text()
    report.write(packed, tmp_path / "packed.tflite")
    assert (tmp_path / "packed.tflite").read_bytes() == pruned_file
    with pytest.raises(ValueError, match="can be written"):
        report.write(dataclasses.replace(plain), tmp_path / "other.h")


# --- the search -------------------------------------------------------------------------------


def dense_network():
    """Two groups of 64 and of 32 channels."""
    keras.utils.set_random_seed(0)
    layers = [L.Dense(64, "relu", name="a"), L.Dense(32, "relu", name="b")]
    return keras.Sequential([keras.Input((8,)), *layers, L.Dense(3)])


class Estimated(MicroTrials):
    """Takes sizes from widths, in the place of files."""

    def make(self, name, make, training, route, widths=None):
        full = {"a": 64, "b": 32, **(widths or {})}
        entries = 8 * full["a"] + full["a"] * full["b"] + 3 * full["b"]
        figures = MicroFigures(1000 + entries, 100 + full["a"] + full["b"], {})
        made = trial(name, figures.flash, figures.arena, 0.1)
        self.made.append(dataclasses.replace(made, widths=widths or {}))
        return self.made[-1], None


def trials_of(model, tmp_path, max_flash, max_ram):
    examples = object.__new__(Examples)
    examples.calibration = np.random.default_rng(0).normal(size=(64, 8))
    device = Microcontroller(max_flash, max_ram, arena=len)
    terms = Terms(lambda *_: 0.0, 1e9, 1.0, 0)
    return Estimated(model, examples, tmp_path, terms, device)


def searched(tmp_path, max_flash, max_ram):
    """The trials of the search for widths."""
    model = dense_network()
    trials = trials_of(model, tmp_path, max_flash, max_ram)
    rows = np.random.default_rng(0).normal(size=(64, 8))
    table = kso.widths(model, rows)
    dense = MicroFigures(3656, 196, {})
    costs = MicroCosts(model, table, dense, trials.device)
    return trials, MicroSearch(trials)._widest(table, costs)


@pytest.mark.parametrize(
    ("max_flash", "max_ram"), [(2400, None), (None, 160), (2600, 150)]
)
def test_the_widest_network_that_fits_is_found(max_flash, max_ram, tmp_path):
    trials, widest = searched(tmp_path, max_flash, max_ram)
    device = trials.device
    figures = widest.trial.micro
    assert device.reach(figures) == 1.0
    largest = max(
        device.figure(figures, name) / limit
        for name, limit in device.limits.items()
    )
    assert largest > 0.85
    fitting = [one for one in trials.made if trials.fits(one)]
    assert figures.flash == max(one.micro.flash for one in fitting)
    assert len(trials.made) <= 8


def test_where_nothing_fits_the_narrowest_network_is_tried(tmp_path):
    trials, widest = searched(tmp_path, 1100, None)
    assert widest is None
    assert trials.made[-1].widths == {"a": 8, "b": 8}


def test_dense_networks_are_pruned_to_the_density_at_which_they_fit(tmp_path):
    dense = MicroFigures(3656, 196, {})
    entries = 8 * 64 + 64 * 32 + 32 * 3
    # An entry takes a bit and its share of bytes, each of the three kernels 160 bytes more.
    saved = (1 - 1 / 8 - 0.3) * entries - 3 * 160
    limit = round(3656 - saved)
    trials = trials_of(dense_network(), tmp_path, limit, None)
    MicroSearch(trials)._pack(dense, None, None)
    assert trials.made[0].name == "dense, density 0.3"
    # So few bytes take no density.
    trials = trials_of(dense_network(), tmp_path, 1300, None)
    MicroSearch(trials)._pack(dense, None, None)
    assert trials.made == []
    # Filters do not become smaller in the arena.
    trials = trials_of(dense_network(), tmp_path, limit, 100)
    MicroSearch(trials)._pack(dense, None, None)
    assert trials.made == []


# --- whole calls ------------------------------------------------------------------------------


@pytest.mark.tensorflow_only
def test_a_dense_file_within_the_limits_is_enough(tmp_path):
    path = tmp_path / "model.h"
    arrays = []

    def arena(array):
        arrays.append(array)
        return 500

    limits = {"target": "micro", "max_flash": 9000, "max_ram": 600}
    report = shrink(small(), ROWS, path, minutes=9, arena=arena, **limits)
    assert [one.name for one in report.trials] == ["dense"]
    assert report.taken.micro.arena == 500
    assert report.taken.micro.operators == {"FullyConnected": 1, "Softmax": 1}
    text = path.read_text()
    body = text.partition("[] = {")[2].partition("}")[0]
    assert bytes(map(int, body.split(",")[:-1])) == arrays[0]
    assert report.taken.micro.flash == len(arrays[0]) == report.taken.bytes
    graph = read_model(arrays[0]).subgraphs[0]
    kinds = {graph.tensors[k].type for k in (*graph.inputs, *graph.outputs)}
    assert kinds == {9}  # int8
    # The limits are inclusive.
    limits = {"max_flash": len(arrays[0]), "max_ram": 500}
    shrink(
        small(),
        ROWS,
        path.with_suffix(".tflite"),
        target="micro",
        minutes=0,
        arena=arena,
        **limits,
    )
    assert path.with_suffix(".tflite").read_bytes()[4:8] == b"TFL3"


@pytest.mark.tensorflow_only
def test_integers_that_lose_much_get_remedies_without_floats(tmp_path):
    rows = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
    report = shrink(
        networks.uneven(),
        rows,
        tmp_path / "model.h",
        target="micro",
        max_flash=10**6,
        minutes=9,
        metric="closeness",
        arena=lambda array: 500,
    )
    lost = {trial.name: trial.lost for trial in report.trials}
    assert [*lost] == [
        "dense",
        "dense, fitted ranges",
        "dense, fitted ranges, equalized channels",
    ]
    assert report.taken.name == "dense, fitted ranges, equalized channels"
    assert report.taken.lost < 0.1 * lost["dense"]
    assert not report.taken.in_floats


def test_remedies_without_time_are_noted(tmp_path, monkeypatch):
    trials = trials_of(dense_network(), tmp_path, 10**6, None)
    monkeypatch.setattr(trials, "is_late", lambda: True)
    MicroSearch(trials)._try_remedies(trial("dense", 1000, 500, 0.1))
    assert trials.made == []
    assert trials.untried == [
        "dense, fitted ranges",
        "dense, fitted ranges, equalized channels",
    ]


@pytest.mark.tensorflow_only
def test_the_error_says_by_how_much_the_nearest_file_misses(tmp_path):
    path = tmp_path / "model.h"
    with pytest.raises(ShrinkError, match=r"max_flash=1, max_ram=400") as error:
        shrink(
            small(),
            ROWS,
            path,
            target="micro",
            max_flash=1,
            max_ram=400,
            minutes=0,
            arena=lambda array: 500,
        )
    assert "dense, misses it by 100 bytes." in str(error.value)
    assert "max_drop" not in str(error.value)
    assert not path.exists()
