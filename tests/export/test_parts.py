"""The pure parts: names, nesting, comparison, zeros, which routes a mode tries and takes."""

import copy
import types

import keras
import numpy as np
import pytest

from keras_sparse_ortho.errors import ExportVerificationError
from keras_sparse_ortho.export import (
    ROUTES,
    Candidate,
    Route,
    RouteOutcome,
    WeightZeros,
    c_array,
    choose,
    compare,
    drop_unread,
    find_zeros,
    inputs_of,
    kernels_of,
    leaves,
    name_kernels,
    name_of,
    nesting_of,
    pack,
    plain_model,
    read_model,
    read_weights,
    routes_of,
    signature_of,
    stored_weights,
    unique_names,
    write_model,
)
from tests.helpers import array, assert_same

L = keras.layers
pytestmark = pytest.mark.tensorflow_only


def test_names_and_nesting_do_not_depend_on_keras():
    nested = {"b": [10, (20, 30)], "a": {"d": 40, "c": 50}}
    flat = [value for _, value in leaves(nested)]
    assert pack(nesting_of(nested), flat) == {
        "a": {"c": 50, "d": 40},
        "b": [10, [20, 30]],
    }
    assert [key for key, _ in leaves(nested)] == ["c", "d", None, None, None]
    assert unique_names(["keras_tensor_41"], "input") == ["input"]
    assert unique_names(["a", "input_layer_3", None], "input") == [
        "a",
        "input_1",
        "input_2",
    ]
    assert unique_names(["dense", "dense", "x/y"], "output") == [
        "dense",
        "dense_1",
        "x_y",
    ]


# --- comparison ----------------------------------------------------------------------------------


def compared(*pairs, measure="max"):
    """The comparison of outputs named "0", "1"..."""
    want, got = zip(*pairs, strict=True)
    return compare([*map(str, range(len(pairs)))], [*want], [*got], measure)


@pytest.mark.parametrize("sign", [1, -1])
def test_measures(sign):
    y, d = (
        np.array([[0.0, 30.0], [40.0, 0.0]]),
        np.array([[3.0, 0.0], [0.0, 0.0]]),
    )
    largest = compared((y, y + sign * d))
    assert (largest.max_abs_diff, largest.error) == (3.0, pytest.approx(3 / 40))
    assert compared((y, y + sign * d), measure="rms").error == pytest.approx(
        1.5 / 25
    )
    assert largest.argmax_agreement == 1.0
    small = np.full((1, 2), 1e-3), np.full((1, 2), 2e-3)
    assert compared(small).error == pytest.approx(1e-3)
    assert compared(small, measure="rms").error == pytest.approx(1.0)
    y, z = np.ones((2, 3)), np.array([[1.0, 1, 1], [1, np.nan, 1]])
    for measure in ("max", "rms"):
        found = compared((y, y), (y, z), measure=measure)
        assert (found.error, found.worst_output) == (float("inf"), "1")


def test_argmax_agreement_counts_rows_of_the_worst_output():
    y, cube = np.eye(4), np.ones((2, 3, 4))
    assert compared((y, y), (y, y[[0, 1, 3, 2]])).argmax_agreement == 0.5
    assert compared((cube, cube)).argmax_agreement is None


# --- models and data -----------------------------------------------------------------------------


def test_kernels_are_known_by_name_or_by_some_zeros():
    values = [
        ("kernel", [[1.0, 1.0]]),
        ("embeddings", [[0.0, 0.0]]),
        ("mine", [[0.0, 1.0]]),
        ("bias", [[0.0, 0.0]]),  # a fresh bias of rank 2, as GRU's
        ("bias", [[0.0, 1.0]]),  # of keys: without a gradient, but for rounding
        ("alpha", [[1.0, 2.0]]),
        ("bias", [0.0, 1.0]),
    ]
    variables = [
        keras.Variable(np.array(value, "float32"), name=name)
        for name, value in values
    ]
    chosen = kernels_of(types.SimpleNamespace(weights=variables))
    assert [*chosen] == ["kernel", "embeddings", "mine"]


@pytest.mark.parametrize(
    "policy", ["mixed_float16", "mixed_bfloat16", "float16"]
)
def test_half_precision_becomes_float32_with_the_same_weights(policy):
    keras.config.set_dtype_policy(policy)
    x = keras.Input((4, 3), dtype="float32")
    y = keras.layers.Bidirectional(keras.layers.GRU(2))(x)
    # A list, because Keras before 3.11 makes one of a single input when it restores a model.
    name = policy  # a layer may be called so
    model = keras.Model([x], keras.layers.Dense(2, name=name)(y))
    model.compile("sgd", "mse")
    plain, reference = plain_model(model)
    assert plain is reference is not model
    assert {v.dtype for v in plain.weights} == {"float32"}
    data = np.random.default_rng(0).standard_normal((5, 4, 3)).astype("float32")
    out = plain([data])
    assert keras.backend.standardize_dtype(out.dtype) == "float32"
    half = array(keras.ops.cast(model([data]), "float32"))
    np.testing.assert_allclose(array(out), half, atol=0.02)
    assert plain.layers[-1].name == name
    for mine, theirs in zip(plain.weights, model.weights, strict=True):
        np.testing.assert_array_equal(
            array(mine), array(keras.ops.cast(theirs, "float32"))
        )


def test_data_with_targets_are_handed_over_as_for_fit():
    a, b, y = (
        np.arange(12.0).reshape(6, 2),
        np.arange(18.0).reshape(6, 3),
        np.zeros(6),
    )
    one = signature_of(
        keras.Sequential([keras.Input((2,)), L.Dense(1)]), 1, None
    )
    halves = [(a[:4], y[:4]), (a[4:], y[4:])]

    for given in (a, (a, y), (a, y, y), lambda: iter(halves), iter(halves)):
        [found] = one.flatten(inputs_of(given, 1), "sample")
        np.testing.assert_array_equal(found, a)
    inputs = [keras.Input((2,)), keras.Input((3,))]
    model = keras.Model(inputs, L.Dense(1)(L.Concatenate()(inputs)))
    two = signature_of(model, 1, None)
    for given in ([a, b], (a, b), ([a, b], y), lambda: iter([([a, b], y)])):
        found = two.flatten(inputs_of(given, 2), "sample")
        assert_same(found, (a, b))


def tensors(*zeros, size=64):
    return [
        WeightZeros("tensor", (8, size // 8), "float32", size, each)
        for each in zeros
    ]


def kernel(zeros, size=64):
    return (np.arange(size) >= zeros).reshape(8, -1).astype("float32")


def test_every_kernel_has_a_tensor_with_its_zeros():
    kernels = {"few": kernel(20), "many": kernel(40), "dense": kernel(0)}
    assert find_zeros(kernels, tensors(43, 20)) == ()  # rounding makes more
    assert find_zeros(kernels, [*tensors(40), *tensors(30, size=128)]) == (
        "few",
    )
    # Combined with something else.
    assert find_zeros(kernels, tensors(40, 0)) == ("few",)
    assert find_zeros({"dense": kernel(0)}, []) == ()
    for lost in (tensors(40, 19), tensors(39, 20)):
        with pytest.raises(
            ExportVerificationError,
            match=r"of which 1 are not zero in the file",
        ):
            find_zeros(kernels, lost)


def test_weights_behind_the_flatbuffer_are_read_and_written_into_it(
    all_routes, tmp_path
):
    """As ai-edge-quantizer leaves them; a file of ours is written anew with its record."""
    model = read_model((all_routes[3] / "float32.tflite").read_bytes())
    model.metadata = []
    plain = write_model(model)
    buffer = max(
        model.buffers, key=lambda one: 0 if one.data is None else len(one.data)
    )
    data, buffer.data = bytes(buffer.data), None
    buffer.offset = buffer.size = len(data)
    buffer.offset = start = -(-len(write_model(model)) // 16) * 16
    behind = write_model(model).ljust(start, b"\0") + data
    assert read_weights(behind) == read_weights(plain)
    assert write_model(read_model(behind)) == plain
    headers = []
    for content in (plain, behind):
        (tmp_path / "m.tflite").write_bytes(content)
        c_array(tmp_path / "m.tflite", tmp_path / "m.h")
        headers.append((tmp_path / "m.h").read_text())
    assert headers[0] == headers[1]


@pytest.mark.parametrize(
    "name", ["float16", "int8", "dynamic_int8", "float32+sp"]
)
def test_files_hold_nothing_twice_and_nothing_unread(name, all_routes):
    from ai_edge_litert import schema_py_generated as schema

    content = (all_routes[3] / f"{name}.tflite").read_bytes()
    model = schema.Model.GetRootAs(content, 0)
    graph = model.Subgraphs(0)
    vectors = []
    for k in range(graph.TensorsLength()):
        vectors.append(graph.Tensors(k).ShapeAsNumpy())
        settings = graph.Tensors(k).Quantization()
        if settings is not None and settings.ScaleLength():
            vectors += [settings.ScaleAsNumpy(), settings.ZeroPointAsNumpy()]
    vectors += [
        model.Buffers(k).DataAsNumpy() for k in range(1, model.BuffersLength())
    ]
    # Others are missing.
    vectors = [x for x in vectors if isinstance(x, np.ndarray)]
    places = {x.__array_interface__["data"][0] for x in vectors}
    assert len(places) == len({(x.dtype.str, x.tobytes()) for x in vectors})
    read = {*graph.InputsAsNumpy(), *graph.OutputsAsNumpy()}
    for k in range(graph.OperatorsLength()):
        read |= {
            *graph.Operators(k).InputsAsNumpy(),
            *graph.Operators(k).OutputsAsNumpy(),
        }
    assert read - {-1} == {*range(graph.TensorsLength())}
    buffers = {graph.Tensors(k).Buffer() for k in range(graph.TensorsLength())}
    buffers |= {
        model.Metadata(k).Buffer() for k in range(model.MetadataLength())
    }
    assert buffers | {0} == {*range(model.BuffersLength())}


def test_tensors_that_nothing_reads_leave_a_file(all_routes):
    model = read_model((all_routes[3] / "int8.tflite").read_bytes())
    plain = write_model(model)
    extra = read_model(plain)
    graph = extra.subgraphs[0]
    # In front of all others, which get new numbers.
    graph.tensors.insert(0, copy.copy(graph.tensors[-1]))
    graph.tensors[0].buffer = len(extra.buffers)
    extra.buffers.append(copy.copy(extra.buffers[-1]))
    graph.inputs = graph.inputs + 1
    graph.outputs = graph.outputs + 1
    for operator in graph.operators:
        operator.inputs = np.where(
            operator.inputs < 0, operator.inputs, operator.inputs + 1
        )
        operator.outputs = operator.outputs + 1
    for signature in extra.signatureDefs:
        for end in (*signature.inputs, *signature.outputs):
            end.tensorIndex += 1
    assert len(write_model(extra)) > len(plain)
    drop_unread(extra)
    assert write_model(extra) == plain


def test_kernels_are_found_by_their_values(all_routes):
    """Another kernel has the same shape, and normalizations scale channels."""
    model = read_model((all_routes[3] / "int8.tflite").read_bytes())
    rng = np.random.default_rng(0)
    kernels = {}
    for weight in stored_weights(model):
        scales = np.exp(rng.normal(size=(len(weight.entries), 1)))
        kernels[weight.tensor.name.decode()] = [(scales * weight.values()).T]
        weight.tensor.name = b"arith.constant"
    kernels = {
        "other": [rng.normal(size=(64, 64))],
        **dict(sorted(kernels.items())),
    }
    name_kernels(model, kernels)
    named = {
        name_of(weight.tensor): weight.values()
        for weight in stored_weights(model)
    }
    assert {*named} == {"shared/kernel", "wide/kernel", "head/kernel"}
    for name, values in named.items():
        assert_same(np.sign(values), np.sign(kernels[name][0].T))


# --- routes --------------------------------------------------------------------------------------


def test_the_smallest_of_the_fastest_files_is_chosen():
    def chosen(*found):
        timed = [
            Candidate(
                Route("float32", str(k)),
                RouteOutcome(str(k), bytes=size, latency_ms=ms),
            )
            for k, (size, ms) in enumerate(found)
        ]
        return timed.index(choose(timed))

    assert chosen((100, 10.0), (50, 1.07), (70, 1.0)) == 2
    # Less than 5% is the clock's noise.
    assert chosen((100, 10.0), (50, 1.04), (70, 1.0)) == 1


def test_routes_of_each_mode():
    def names(*arguments):
        return [route.name for route in routes_of(*arguments)]

    assert names(None, True) == ["float32", "float32+sp", "float32+blocks"]
    assert names("int8+blocks", False) == ["int8+blocks"]
    assert len(names("small", True)) == len(ROUTES) == 16
    assert names("fast", True) == names("small", True)
    assert not [
        name for name in names("small", False) if name.startswith("int")
    ]
    for mode in ("quick", "int8+sp", "float32+csr"):
        with pytest.raises(
            ValueError, match=r"`mode` must be one of .*Received: mode="
        ):
            routes_of(mode, False)
