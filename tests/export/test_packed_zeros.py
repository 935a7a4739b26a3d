"""Packed zeros of C arrays: what is packed, what stays dense, and what is refused."""

import dataclasses

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import ExportVerificationError, LiteRTFileError
from keras_sparse_ortho.export import (
    PackedZeros,
    c_array,
    check_filters,
    decode,
    encode,
    export_litert,
    is_decode,
    load_litert,
    pack_zeros,
    read_model,
)
from tests.export.filters import (
    TYPES,
    dense_layers,
    edited,
    quantized,
    sparse,
)
from tests.export.models import layers

pytestmark = pytest.mark.tensorflow_only

HEADER = bytes([2, 1, 0, 0, 1]) + bytes(11)
DENSE_LAYERS = "Packed zeros are for convolutions"


def array_of(path, **options):
    """The header of a file, its array, and the operators."""
    header = path.with_suffix(".h")
    operators = c_array(path, header, **options)
    text = header.read_text(encoding="utf-8")
    body = text.partition("[] = {")[2].partition("}")[0]
    return text, bytes(map(int, body.split(",")[:-1])), operators


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Two convolutions, a depthwise and a dense layer at density 0.2, in int8."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 4), name="x"),
            layers.Conv2D(24, 3, name="first"),
            layers.DepthwiseConv2D(3, name="depthwise"),
            layers.Conv2D(32, 1, name="pointwise"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3, name="head"),
        ]
    )
    pruned = kso.strip(kso.prune(model, 0.2, budget="uniform"))
    path = tmp_path_factory.mktemp("packed") / "model.tflite"
    rows = np.random.default_rng(0).normal(size=(20, 8, 8, 4))
    export_litert(
        pruned, path, mode="int8", representative_data=rows.astype("float32")
    )
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.tflite"


# --- format -----------------------------------------------------------------------------------


def test_mask_starts_at_the_highest_bit_and_entries_follow_in_order():
    values = np.array([[0, 5, 0], [0, -3, 0], [0, 0, 7]], "int8")
    packed = encode(values, np.zeros_like(values))
    assert packed.mask == bytes([0b01001000, 0b10000000])
    assert packed.entries == HEADER + bytes([5, 256 - 3, 7])
    assert packed.bytes == 2 + 16 + 3


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["int8", "<f4"])
def test_unpacking_gives_the_array_back(axis, dtype):
    points = np.arange(-3, 4).reshape(*((7, 1) if axis == 0 else (1, 7)))
    shape = (7, 5) if axis == 0 else (5, 7)
    zeros = np.broadcast_to(points if dtype == "int8" else 0, shape)
    zeros = zeros.astype(dtype)
    values = sparse(*shape, zeros=zeros, dtype=dtype)
    packed = encode(values, zeros)
    assert packed.bytes == 5 + 16 + 7 * values.itemsize
    np.testing.assert_array_equal(decode(packed, zeros), values)


def test_negative_zeros_are_zeros_and_nan_is_none():
    values = np.array([-0.0, np.nan, 0.0, 2.0], "<f4")
    zeros = np.zeros_like(values)
    packed = encode(values, zeros)
    assert packed.mask == bytes([0b01010000])
    np.testing.assert_array_equal(decode(packed, zeros), values)


def damages():
    """What can be wrong with a packed filter of 35 entries, 7 of them live."""
    yield "type", {"entries": lambda old: b"\0" + old[1:]}
    yield "version", {"entries": lambda old: old[:4] + b"\2" + old[5:]}
    yield "header cut", {"entries": lambda old: old[:10]}
    yield "entry lost", {"entries": lambda old: old[:-1]}
    yield "entry added", {"entries": lambda old: old + b"\1"}
    yield "mask cut", {"mask": lambda old: old[:-1]}
    yield "mask of another size", {"mask": lambda old: old + b"\0"}
    yield "bit set", {"mask": lambda old: bytes([old[0] ^ 1]) + old[1:]}


@pytest.mark.parametrize("which", [name for name, _ in damages()])
def test_damaged_filters_are_refused(which):
    values = sparse(5, 7)
    packed = encode(values, np.zeros_like(values))
    changes = dict(damages())[which]
    for name, change in changes.items():
        value = change(getattr(packed, name))
        packed = dataclasses.replace(packed, **{name: value})
    with pytest.raises(LiteRTFileError, match=r"damaged.*Received: "):
        decode(packed, np.zeros_like(values))


# --- whole files ------------------------------------------------------------------------------


def decodes(model):
    graph = model.subgraphs[0]
    return [op for op in graph.operators if is_decode(model, op)]


def test_packed_array_has_the_filters_of_the_file(exported):
    _, plain, operators = array_of(exported)
    text, packed, with_decode = array_of(exported, packed=True)
    assert with_decode == tuple(sorted([*operators, "Decode"]))
    assert "//   resolver.AddDecode();\n" in text
    assert f"MicroMutableOpResolver<{len(with_decode)}>" in text
    model = read_model(packed)
    check_filters(model, read_model(exported.read_bytes()))
    assert len(decodes(model)) == 2  # the convolutions; the others are small
    dense_bytes = 24 * 36 + 32 * 24
    stored = round(0.2 * 24 * 36) + round(0.2 * 32 * 24) + dense_bytes // 8 + 32
    assert f"2 filters have {stored} bytes instead of {dense_bytes}." in text
    assert "at most 864 bytes." in text
    assert "2025-10-23" in text
    assert "11 kB of code" in text
    assert "Vela" in text
    assert text.count("// Dense, smaller as it is: ") == 2
    # Buffers start at multiples of 16: operators read them from flash as they are.
    saved = len(plain) - len(packed)
    assert dense_bytes - stored - 2 * 160 <= saved < dense_bytes - stored


def test_constants_of_a_packed_array_are_aligned(exported):
    from ai_edge_litert import schema_py_generated as schema

    _, packed, _ = array_of(exported, packed=True)
    model = schema.Model.GetRootAs(packed, 0)
    whole = np.frombuffer(packed, np.uint8)
    start = whole.__array_interface__["data"][0]
    for k in range(model.BuffersLength()):
        data = model.Buffers(k).DataAsNumpy()
        if isinstance(data, np.ndarray):
            place = data.__array_interface__["data"][0] - start
            assert place % 16 == 0


def test_unpacked_filters_stand_directly_before_their_layers(exported):
    _, packed, _ = array_of(exported, packed=True)
    model = read_model(packed)
    operators = model.subgraphs[0].operators
    operators.insert(0, operators.pop(1))  # the first convolution, before
    assert len(decodes(model)) == 2
    with pytest.raises(ExportVerificationError, match="layer 0"):
        check_filters(model, read_model(exported.read_bytes()))


@pytest.mark.parametrize("constant", [0, 1])
def test_a_damaged_packed_file_is_found(exported, constant):
    _, packed, _ = array_of(exported, packed=True)

    def damage(model):
        index = decodes(model)[0].inputs[constant]
        buffer = model.buffers[model.subgraphs[0].tensors[index].buffer]
        buffer.data = buffer.data.copy()
        # Of the mask two bits, so that as many entries are live; of the entries, one.
        if constant:
            buffer.data[-1] ^= 1
        else:
            bits = np.unpackbits(buffer.data)
            bits[[np.argmax(bits == 0), np.argmax(bits == 1)]] ^= 1
            buffer.data = np.packbits(bits)

    model = read_model(edited(packed, damage))
    with pytest.raises(ExportVerificationError, match="layer 0"):
        check_filters(model, read_model(exported.read_bytes()))


def test_nothing_is_written_where_an_entry_was_lost(
    exported, tmp_path, monkeypatch
):
    packbits = np.packbits
    monkeypatch.setattr(np, "packbits", lambda live: packbits(np.roll(live, 1)))
    with pytest.raises(ExportVerificationError, match="after packing"):
        c_array(exported, tmp_path / "m.h", packed=True)
    assert not (tmp_path / "m.h").exists()


def test_layers_that_share_a_filter_have_an_operator_each(path):
    values = sparse(64, 64)
    path.write_bytes(dense_layers(values, layers=3))
    with pytest.warns(UserWarning, match=DENSE_LAYERS):
        _, packed, operators = array_of(path, packed=True)
    assert operators == ("Decode", "FullyConnected")
    model = read_model(packed)
    graph = model.subgraphs[0]
    kinds = [is_decode(model, op) for op in graph.operators]
    assert kinds == [True, False] * 3
    unpacked = decodes(model)
    assert len({tuple(op.inputs) for op in unpacked}) == 1
    assert len({int(op.outputs[0]) for op in unpacked}) == 3
    for unpack, layer in zip(unpacked, graph.operators[1::2], strict=True):
        assert layer.inputs[1] == unpack.outputs[0]
        assert graph.tensors[layer.inputs[1]].buffer == 0


def test_filters_above_ram_stay_dense(exported):
    text, packed, _ = array_of(exported, packed=True, ram=863)
    model = read_model(packed)
    check_filters(model, read_model(exported.read_bytes()))
    assert len(decodes(model)) == 1
    assert "// Dense, above `ram`, 863 bytes: " in text
    assert "at most 768 bytes." in text
    _, exact, _ = array_of(exported, packed=True, ram=864)
    assert len(decodes(read_model(exact))) == 2


@pytest.mark.parametrize("axis", [0, 1])
def test_dead_entries_become_the_zero_point_of_their_channel(path, axis):
    points = np.arange(64) - 32
    along = points[:, None] if axis == 0 else points[None, :]
    values = sparse(64, 64, zeros=along)
    path.write_bytes(dense_layers(values, points=tuple(points), axis=axis))
    with pytest.warns(UserWarning, match=DENSE_LAYERS):
        _, packed, _ = array_of(path, packed=True)
    model = read_model(packed)
    (unpack,) = decodes(model)
    graph = model.subgraphs[0]
    mask, entries = (
        model.buffers[graph.tensors[k].buffer].data.tobytes()
        for k in unpack.inputs
    )
    assert len(entries) == 16 + round(0.2 * 64 * 64)
    zeros = np.broadcast_to(along, (64, 64)).astype("int8")
    np.testing.assert_array_equal(
        decode(PackedZeros(mask, entries), zeros), values
    )


def test_filters_of_floats_and_of_layers_of_16_bits_are_packed(path):
    floats = sparse(64, 64, dtype="float32")
    for content in (
        dense_layers(floats, TYPES.FLOAT32, ends=TYPES.FLOAT32),
        dense_layers(sparse(64, 64), ends=TYPES.INT16),
    ):
        path.write_bytes(content)
        with pytest.warns(UserWarning, match=DENSE_LAYERS):
            _, packed, operators = array_of(path, packed=True)
        assert operators == ("Decode", "FullyConnected")
        assert len(packed) < 0.6 * len(content)


def unpackable():
    """Files whose filter stays dense, and why."""
    values = sparse(64, 64)
    no_decoder = "of a type that LiteRT Micro cannot unpack"
    unknown = "with zero points that LiteRT Micro does not read"
    yield "int4", dense_layers(values, TYPES.INT4), no_decoder
    halves = sparse(64, 64, dtype="float16")
    float16 = dense_layers(halves, TYPES.FLOAT16, ends=TYPES.FLOAT32)
    yield "float16", float16, no_decoder
    yield "uint8", dense_layers(values, TYPES.UINT8), no_decoder
    yield "no zero points", dense_layers(values, points=None), unknown
    some = dense_layers(values, points=(0, 0), scales=np.ones(64))
    yield "too few zero points", some, unknown
    more = dense_layers(values, points=(0, 0, 0))
    yield "channels of another size", more, unknown
    yield "dense", dense_layers(sparse(64, 64, density=0.9)), "smaller as it is"
    yield "small", dense_layers(sparse(8, 8)), "smaller as it is"

    def also_an_output(model):
        model.subgraphs[0].outputs = np.array([1, 2], np.int32)

    others = "read by other operations, too"
    yield "an output", edited(dense_layers(values), also_an_output), others

    def shared_bytes(model):
        graph = model.subgraphs[0]
        graph.tensors[0].buffer = graph.tensors[2].buffer

    yield "shared bytes", edited(dense_layers(values), shared_bytes), others


@pytest.mark.parametrize("which", [name for name, *_ in unpackable()])
def test_filters_that_stay_dense(which, path):
    content, why = {name: rest for name, *rest in unpackable()}[which]
    path.write_bytes(content)
    _, plain, _ = array_of(path)
    with pytest.warns(UserWarning, match=f"plain one.*filter is {why}"):
        text, array, operators = array_of(path, packed=True)
    assert (array, operators) == (plain, ("FullyConnected",))
    assert f"// Dense, {why}: filter\n" in text
    assert "Packed zeros" not in text


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_channels_along_an_inner_axis_stay_dense(axis):
    model = read_model(dense_layers(sparse(64, 64)))
    tensor = model.subgraphs[0].tensors[2]
    tensor.shape = np.array([16, 4, 64], np.int32)
    channels = np.zeros(tensor.shape[axis])
    quantized(tensor, channels + 0.1, channels, axis)
    (size,) = pack_zeros(model, None)
    assert ("zero points" in size.why_dense) == (axis == 1)


def test_computed_filters_are_no_constants(path):
    def computed(model):
        model.subgraphs[0].tensors[2].buffer = 0

    path.write_bytes(edited(dense_layers(sparse(64, 64)), computed))
    with pytest.warns(UserWarning, match="no filters"):
        c_array(path, path.with_suffix(".h"), packed=True)


def test_a_filter_of_another_size_is_a_damaged_file(path):
    def cut(model):
        model.buffers[1].data = model.buffers[1].data[:-1]

    path.write_bytes(edited(dense_layers(sparse(64, 64)), cut))
    with pytest.raises(LiteRTFileError, match="damaged"):
        c_array(path, path.with_suffix(".h"), packed=True)


def test_layers_of_blocks_are_the_remedy_for_dense_ones(path):
    path.write_bytes(dense_layers(sparse(64, 64)))
    with pytest.warns(UserWarning, match=r"int8\+blocks.*4096 bytes of dense"):
        c_array(path, path.with_suffix(".h"), packed=True)


def test_names_of_filters_do_not_become_code(path):
    def renamed(model):
        model.subgraphs[0].tensors[2].name = b"x\nint y = 1; //"

    content = dense_layers(sparse(64, 64, density=0.9))
    path.write_bytes(edited(content, renamed))
    with pytest.warns(UserWarning, match="plain one"):
        text, _, _ = array_of(path, packed=True)
    before = text.partition("#pragma once")[0].splitlines()
    assert all(line.startswith("// ") for line in before)


def test_arguments_of_packing(exported, tmp_path):
    target = tmp_path / "m.h"
    for ram in (0, 1.5, "16k", True):
        with pytest.raises(ValueError, match=r"`ram` must be .*Received: ram="):
            c_array(exported, target, packed=True, ram=ram)
    with pytest.raises(ValueError, match="`packed=True` with it"):
        c_array(exported, target, ram=1000)
    assert not target.exists()


def test_packing_twice_changes_nothing(exported):
    model = read_model(exported.read_bytes())
    first = pack_zeros(model, None)
    assert sum(not size.why_dense for size in first) == 2
    again = pack_zeros(model, None)
    assert all(size.why_dense for size in again)
    assert len(decodes(model)) == 2


def test_load_litert_names_the_operator_and_who_runs_it(exported, path):
    _, packed, _ = array_of(exported, packed=True)
    path.write_bytes(packed)
    with pytest.raises(
        LiteRTFileError, match=r"TFLM_DECODE.*LiteRT Micro.*tflite-micro"
    ) as caught:
        load_litert(path)
    assert str(path) in str(caught.value)
