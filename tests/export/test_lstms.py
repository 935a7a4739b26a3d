"""LSTMs as LiteRT's fused operator, by TensorFlow's converter and without it; states in files."""

import sys

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import (
    ExportConversionError,
    ExportRouteError,
)
from keras_sparse_ortho.export import (
    c_array,
    export_litert,
    kind_of,
    load_litert,
    read_model,
    write_model,
)
from tests.export.models import (
    exported,
    interpreter_of,
    kernel_zeros,
    layers,
    rms,
    thin_out,
)
from tests.helpers import array, assert_same, slow_case_on_jax, slow_on_jax

# On JAX and on torch the same process makes the file; torch is quick.
pytestmark = pytest.mark.core

OPERATOR = "UNIDIRECTIONAL_SEQUENCE_LSTM"
STEPS, FEATURES = 6, 8
MOST = {  # of the error by mode
    "float32+lstm": 1e-5,
    "float16+lstm": 2e-3,
    "dynamic_int8+lstm": 0.05,
    "int8+lstm": 0.08,
}


@pytest.fixture(autouse=True)
def _own_converter(monkeypatch):
    """TensorFlow's converter for models of TensorFlow, the other one for the others."""
    if keras.backend.backend() != "tensorflow":
        monkeypatch.setitem(sys.modules, "tensorflow", None)


def kinds(path):
    model = read_model(path.read_bytes())
    return [
        kind_of(model, operator)
        for graph in model.subgraphs
        for operator in graph.operators
    ]


def sequences(rows=32, steps=STEPS, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, steps, FEATURES)).astype("float32")


def network(*made, steps=STEPS):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((steps, FEATURES), name="x"), *made])


def stacked(steps=STEPS):
    return network(
        layers.LSTM(16, return_sequences=True, name="first"),
        layers.LSTM(12, name="second"),
        layers.Dense(4, name="head"),
        steps=steps,
    )


# --- answers -------------------------------------------------------------------------------------


def zoo():
    """LSTMs in many places, with an output for each; the number of operators that they become."""
    keras.utils.set_random_seed(0)
    x = keras.Input((STEPS, FEATURES), name="x")
    twice = layers.LSTM(FEATURES, return_sequences=True)
    inner, other = (
        keras.Model(x, layers.LSTM(4, name="rnn")(x)) for _ in range(2)
    )
    assert inner.weights[0].path == other.weights[0].path
    normalized = layers.BatchNormalization()(layers.Conv1D(5, 3)(x))
    windows = keras.ops.reshape(x, (-1, 2, STEPS // 2, FEATURES))
    outputs = {
        "last": layers.LSTM(5)(x),
        "all": layers.LSTM(5, return_sequences=True)(x),
        "both_ways": layers.Bidirectional(
            layers.LSTM(3, return_sequences=True)
        )(x),
        "backwards": layers.LSTM(4, go_backwards=True, return_sequences=True)(
            x
        ),
        "without_bias": layers.LSTM(4, use_bias=False, dropout=0.5)(x),
        "unrolled": layers.LSTM(4, unroll=True)(x),
        "one_unit": layers.LSTM(1)(x),
        "twice": twice(twice(x)),
        "nested": inner(x),
        "nested_again": other(x),
        "convolved": layers.LSTM(4)(normalized),
        "windows": layers.TimeDistributed(layers.LSTM(4))(windows),
    }
    return keras.Model(x, outputs), 1 + 1 + 2 + 1 + 1 + 1 + 1 + 2 + 2 + 1 + 2


@slow_on_jax
def test_lstms_in_many_places_answer_as_keras(tmp_path):
    model, count = zoo()
    x = sequences(4)
    path = tmp_path / "m.tflite"
    report = export_litert(
        model, path, mode="float32+lstm", sample=x[:2], batch_size=2
    )
    assert kinds(path).count(OPERATOR) == count
    assert "WHILE" not in kinds(path)
    assert report.kept == {}
    assert report.error < 1e-5
    # The states of one call are none of the next one's.
    run = interpreter_of(path).get_signature_runner()
    for start in (0, 2):
        batch = x[start : start + 2]
        found = run(x=batch)
        for name, values in model(batch).items():
            np.testing.assert_allclose(
                found[name], array(values), atol=1e-5, err_msg=name
            )


LONG = [
    ("float32+lstm", 20),
    *(slow_case_on_jax(mode, 20) for mode in MOST if mode != "float32+lstm"),
    slow_case_on_jax("int8+lstm", 50),
    *(pytest.param(mode, 100, marks=pytest.mark.slow) for mode in MOST),
]


@pytest.mark.parametrize(("mode", "steps"), LONG)
def test_long_sequences_in_each_storage(mode, steps, tmp_path):
    model = stacked(steps)
    rows = sequences(48, steps)
    x = rows[:8]
    # All rows: one output in 32 that is larger than those of calibration would hide the rest.
    data = {"representative_data": rows} if mode == "int8+lstm" else {}
    path = tmp_path / "m.tflite"
    # On JAX each call of Keras compiles its loops.
    report = exported(model, path, mode, sample=x, batch_size=8, **data)
    assert report.route == mode
    assert report.in_floats == ()
    want = array(model(x))
    found = load_litert(path).predict(x)
    assert rms(found, want) < MOST[mode]
    assert kinds(path).count(OPERATOR) == 2


@pytest.mark.filterwarnings("ignore:An int8 file is right only")  # few rows
@pytest.mark.parametrize("mode", ["float32+lstm", "int8+lstm"])
def test_a_cell_may_count_beyond_ten(mode, tmp_path):
    """TensorFlow's own fused operator clips the cell at 10."""
    model = network(layers.LSTM(2, name="counter"), steps=29)
    cell = model.get_layer("counter").cell
    kernel = np.zeros((FEATURES, 8))
    kernel[0, 4:6] = 20.0  # tanh of it is added to the cell
    cell.kernel.assign(kernel)
    cell.recurrent_kernel.assign(np.zeros((2, 8)))
    cell.bias.assign([20.0, 20.0, 20.0, 20.0, 0.0, 0.0, 20.0, 20.0])
    x = np.zeros((3, 29, FEATURES), "float32")
    x[:, :, 0] = -1
    for row, count in enumerate((14, 15, 16)):  # up, and then down again
        x[row, :count, 0] = 1
    assert np.allclose(array(model(x))[:, 0], np.tanh([-1, 1, 3]), atol=1e-4)
    path = tmp_path / "m.tflite"
    data = {"representative_data": x} if mode == "int8+lstm" else {}
    export_litert(model, path, mode=mode, sample=x, **data)
    found = load_litert(path).predict(x)
    most = 0.05 if mode == "int8+lstm" else 1e-5
    np.testing.assert_allclose(found, array(model(x)), atol=most)


@slow_on_jax
def test_integers_at_the_ends_leave_no_floats(tmp_path):
    model = stacked()
    rows = sequences(48)
    for kind in ("int8", "uint8"):
        path = tmp_path / f"{kind}.tflite"
        report = export_litert(
            model,
            path,
            mode="int8+lstm",
            representative_data=rows,
            sample=rows,  # so that all of them calibrate
            inference_input_type=kind,
            inference_output_type=kind,
            batch_size=16,
        )
        assert report.in_floats == ()
        assert "DEQUANTIZE" not in kinds(path)
        found = load_litert(path).predict(rows)
        assert rms(found, array(model(rows))) < 0.08


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["float32+lstm", "float16+lstm", "int8+lstm"])
def test_zeros_are_counted_gate_by_gate(mode, tmp_path):
    first = layers.LSTM(16, return_sequences=True, name="first")
    model = thin_out(network(first, layers.LSTM(6, name="second")), 0.3)
    # A gate of zeros alone has no scale.
    cell = model.get_layer("second").cell
    kernel = np.array(array(cell.kernel.value))
    kernel[:, :6] = 0
    cell.kernel.assign(kernel)
    rows = sequences(48)
    data = {"representative_data": rows} if mode == "int8+lstm" else {}
    path = tmp_path / "m.tflite"
    report = export_litert(
        model, path, mode=mode, sample=rows[:8], batch_size=8, **data
    )
    assert report.folded == ()
    assert report.total_zeros >= kernel_zeros(model)
    weights = {weight.name: weight for weight in report.weights}
    recurrent = first.cell.recurrent_kernel
    for gate, quarter in enumerate(np.split(array(recurrent), 4, axis=1)):
        weight = weights[f"{recurrent.path} ({gate + 1} of 4)"]
        assert weight.shape == (16, 16)
        zeros = np.sum(quarter == 0)
        assert 0 <= weight.zeros - zeros < 10  # more, as integers
        assert weight.dtype == mode.partition("+")[0]


@pytest.mark.parametrize("storage", ["masked", slow_case_on_jax("blocks")])
def test_sparse_lstms_of_ours_are_fused_as_well(storage, tmp_path):
    dense = network(layers.LSTM(16, name="rnn"), layers.Dense(4))
    options = {"storage": storage, "structure": kso.Block(4, 4)}
    model = kso.sparsify(dense, 0.5, seed=0, exclude=["dense.*"], **options)
    path = tmp_path / "m.tflite"
    report = export_litert(
        model, path, mode="float32+lstm", sample=sequences(2), batch_size=2
    )
    assert kinds(path).count(OPERATOR) == 1
    assert 0.4 < report.density < 0.6
    assert report.error < 1e-5


def trained(model, weights="int8", epochs=1):
    """A model of `quantize_aware` that has seen rows, and the rows."""
    model = kso.quantize_aware(model, weights, momentum=0.5)
    rows = sequences(64)
    model.compile(keras.optimizers.Adam(3e-3), "mse")
    model.fit(rows, np.tanh(rows[:, -1, :4]), epochs=epochs, verbose=0)
    return model, rows


def constants_of_operators(path):
    """The integers of the kernels of fused LSTMs, four gates and then four of the states."""
    model = read_model(path.read_bytes())
    [graph] = model.subgraphs
    for operator in graph.operators:
        if kind_of(model, operator) == OPERATOR:
            matrices = []
            for place in range(1, 9):
                tensor = graph.tensors[operator.inputs[place]]
                data = np.asarray(model.buffers[tensor.buffer].data)
                matrices.append(data.view(np.int8).reshape(tensor.shape))
            yield matrices


@pytest.mark.parametrize("weights", ["int8", slow_case_on_jax("int4")])
def test_lstms_have_the_integers_of_training(weights, tmp_path):
    model, rows = trained(stacked(), weights)
    path = tmp_path / "m.tflite"
    report = exported(
        model,
        path,
        "int8+lstm",
        sample=rows[:8],
        batch_size=8,
        representative_data=rows,
    )
    assert report.in_floats == ()
    assert kinds(path).count(OPERATOR) == 2
    assert report.error < 0.05
    levels, multiple = {"int8": (127, 1), "int4": (7, 18)}[weights]
    plain = kso.strip(model)
    for name, matrices in zip(
        ("first", "second"), constants_of_operators(path), strict=True
    ):
        cell = plain.get_layer(name).layer.cell
        kernels = [array(cell.kernel.value), array(cell.recurrent_kernel.value)]
        gates = [
            gate for kernel in kernels for gate in np.split(kernel, 4, axis=1)
        ]
        for gate, integers in zip(gates, matrices, strict=True):
            steps = np.rint(gate.T / np.abs(gate).max() * levels)
            np.testing.assert_array_equal(integers, steps * multiple)


@slow_on_jax
def test_trained_lstms_in_both_directions_are_integers(tmp_path):
    both_ways = layers.Bidirectional(layers.LSTM(6, return_sequences=True))
    model, rows = trained(network(both_ways, layers.LSTM(8), layers.Dense(4)))
    path = tmp_path / "m.tflite"
    report = exported(
        model,
        path,
        "int8+lstm",
        sample=rows[:8],
        batch_size=8,
        representative_data=rows,
    )
    # The quantizer does not know REVERSE_V2.
    assert {text.partition(" ")[0] for text in report.in_floats} == {
        "REVERSE_V2"
    }
    assert len(list(constants_of_operators(path))) == 3
    assert report.error < 0.05


@slow_on_jax
def test_without_rows_trained_lstms_stay_in_floats(tmp_path):
    """Nothing says how large their cell states become."""
    model, rows = trained(network(layers.LSTM(16), layers.Dense(4)))
    path = tmp_path / "m.tflite"
    report = exported(model, path, "int8+lstm", sample=rows[:8], batch_size=8)
    assert any(OPERATOR in text for text in report.in_floats)
    assert report.error < 0.05
    # LiteRT Micro computes it in floats as well.
    operators = c_array(path, tmp_path / "m.h")
    assert "UnidirectionalSequenceLSTM" in operators


# --- which ---------------------------------------------------------------------------------------


@slow_on_jax
def test_what_the_operator_does_not_compute_stays_a_loop(tmp_path):
    x = keras.Input((STEPS, FEATURES), name="x")
    state = layers.LSTM(4, return_state=True, name="encoder")(x)
    outputs = [
        layers.LSTM(4, name="fused")(x),
        layers.LSTM(4, activation="relu", name="relu")(x),
        layers.LSTM(4, recurrent_activation="hard_sigmoid", name="hard")(x),
        layers.LSTM(4, name="masked")(layers.Masking()(x)),
        layers.LSTM(4, name="decoder")(x, initial_state=state[1:]),
        layers.RNN(layers.LSTMCell(4), name="cell")(x),
    ]
    model = keras.Model(x, outputs)
    path = tmp_path / "m.tflite"
    report = export_litert(
        model, path, mode="float32+lstm", sample=sequences(2), batch_size=2
    )
    assert report.kept == {
        "encoder": "it has return_state=True",
        "relu": "its activation is not tanh",
        "hard": "its recurrent_activation is not sigmoid",
        "masked": "it has a mask",
        "decoder": "it has an initial_state",
    }
    assert "not fused             encoder: it has return_state" in str(report)
    assert kinds(path).count(OPERATOR) == 1
    assert report.error < 1e-5
    # Nothing of the trace is left in the model.
    assert "call" not in vars(model.get_layer("fused"))


def test_a_model_without_such_lstms_is_refused_by_name(tmp_path):
    path = tmp_path / "m.tflite"
    model = network(layers.LSTM(4, activation="relu", name="rnn"))
    with pytest.raises(
        ExportRouteError,
        match=r"'float32\+lstm' needs .*Received: '.*rnn': its activation is",
    ):
        export_litert(model, path, mode="float32+lstm")
    with pytest.raises(ExportRouteError, match="a model without LSTMs"):
        export_litert(network(layers.Flatten()), path, mode="float32+lstm")


@slow_on_jax
def test_small_takes_the_operator(tmp_path):
    model = stacked()
    rows = {"sample": sequences(8), "batch_size": 8}
    report = export_litert(model, tmp_path / "m.tflite", mode="small", **rows)
    assert report.route.endswith("+lstm")
    storage = report.route.partition("+")[0]
    without = export_litert(model, tmp_path / "m.tflite", mode=storage, **rows)
    assert report.bytes < without.bytes


def test_plain_float32_has_loops_where_the_converter_has_them(tmp_path):
    path = tmp_path / "m.tflite"
    report = export_litert(stacked(), path, sample=sequences(1))
    assert report.route == "float32"
    has_loops = keras.backend.backend() == "tensorflow"
    assert kinds(path).count(OPERATOR) == (0 if has_loops else 2)
    assert kinds(path).count("WHILE") == (2 if has_loops else 0)


@pytest.mark.jax_only
def test_without_placeholders_the_steps_are_written_one_by_one(
    tmp_path, monkeypatch
):
    from keras_sparse_ortho.export import _tracing

    def failing(model, calls):
        raise RuntimeError("no placeholders")

    monkeypatch.setattr(_tracing, "placeholders", failing)
    path = tmp_path / "m.tflite"
    report = export_litert(stacked(), path, sample=sequences(1))
    assert OPERATOR not in kinds(path)
    assert report.kept == {}
    with pytest.raises(ExportConversionError, match="no placeholders"):
        export_litert(stacked(), path, mode="float32+lstm")


# --- LiteRT Micro --------------------------------------------------------------------------------


def without_record(path):
    """The file as another tool would have written it."""
    model = read_model(path.read_bytes())
    model.metadata = None
    path.write_bytes(write_model(model))
    return path


def test_arrays_for_micro_have_the_operator(tmp_path):
    path = tmp_path / "m.tflite"
    rows = sequences(48)
    export_litert(
        stacked(),
        path,
        mode="int8+lstm",
        representative_data=rows,
        sample=rows[:1],
    )
    operators = c_array(path, tmp_path / "m.h")
    # One converter slices the last step in one way, one in another.
    assert {*operators} - {"Slice", "StridedSlice"} == {
        *("Dequantize", "FullyConnected", "Quantize", "Reshape"),
        "UnidirectionalSequenceLSTM",
    }


def test_lstms_in_dynamic_int8_are_refused_for_micro(tmp_path):
    path = tmp_path / "m.tflite"
    model = network(layers.LSTM(24))
    export_litert(model, path, mode="dynamic_int8+lstm", sample=sequences(1))
    with pytest.raises(ExportRouteError, match="of route 'dynamic_int8"):
        c_array(path, tmp_path / "m.h")
    with pytest.raises(ExportRouteError, match=r"NaN\. .*mode='int8\+lstm'"):
        c_array(without_record(path), tmp_path / "m.h")
    assert not (tmp_path / "m.h").exists()


@pytest.mark.tensorflow_only
def test_two_loops_are_refused_for_micro(tmp_path):
    path = tmp_path / "m.tflite"
    for unroll in (False, True):
        made = [
            layers.GRU(4, return_sequences=True, unroll=unroll),
            layers.GRU(4, unroll=unroll),
        ]
        export_litert(network(*made), path)
        if unroll:
            assert "While" not in c_array(path, tmp_path / "m.h")
            continue
        with pytest.raises(
            ExportRouteError,
            match=r"unroll=True.*with 2 WHILE operations",
        ):
            c_array(path, tmp_path / "m.h")
    export_litert(network(layers.GRU(4)), path)
    assert "While" in c_array(path, tmp_path / "m.h")


# --- states that outlive a call ------------------------------------------------------------------


class Ring(layers.Layer):
    """The last three inputs, in a variable."""

    def build(self, shape):
        self.buffer = self.add_weight(
            shape=(1, 3, shape[-1]),
            trainable=False,
            initializer="ones",
            name="buffer",
        )

    def call(self, x):
        newest = keras.ops.concatenate([self.buffer[:, 1:], x[:, None]], axis=1)
        self.buffer.assign(newest)
        return keras.ops.reshape(newest, (1, -1))


def streaming():
    keras.utils.set_random_seed(0)
    x = keras.Input((FEATURES,), batch_size=1, name="x")
    return keras.Model(x, layers.Dense(4)(Ring(name="ring")(x)))


def stateful():
    keras.utils.set_random_seed(0)
    x = keras.Input((STEPS, FEATURES), batch_size=1, name="x")
    return keras.Model(x, layers.LSTM(4, stateful=True, name="rnn")(x))


@pytest.mark.tensorflow_only
@pytest.mark.parametrize("mode", ["float32", "dynamic_int8", "int8"])
@pytest.mark.parametrize("make", [streaming, stateful])
def test_files_have_the_states_of_their_models(make, mode, tmp_path):
    model = make()
    rng = np.random.default_rng(0)
    shape = (40, *model.input_shape[1:])
    rows = rng.standard_normal(shape).astype("float32")
    before = [np.array(array(value)) for value in model.get_weights()]
    data = {"representative_data": rows} if mode == "int8" else {}
    path = tmp_path / "m.tflite"
    exported(model, path, mode, sample=rows[:6], **data)
    assert_same(before, model.get_weights())
    run = interpreter_of(path).get_signature_runner()

    def answer(row):
        (output,) = run(x=row[None]).values()
        return output

    found = np.concatenate([*map(answer, rows[:6])])
    want = np.concatenate([array(model(x[None])) for x in rows[:6]])
    assert rms(found, want) < (1e-5 if mode == "float32" else 0.05)
    # The first row would be answered in another way now.
    assert np.abs(answer(rows[0]) - found[0]).max() > 0.01


@pytest.mark.tensorflow_only
def test_trained_ranges_leave_assignments_in_the_file(tmp_path):
    model = kso.quantize_aware(streaming())
    rows = np.random.default_rng(0).standard_normal((20, FEATURES))
    for row in rows.astype("float32"):
        model(row[None], training=True)
    path = tmp_path / "m.tflite"
    exported(model, path, sample=rows[:8])
    assert kinds(path).count("ASSIGN_VARIABLE") == 2  # one sets the start


@pytest.mark.not_tensorflow
@pytest.mark.parametrize("make", [streaming, stateful])
def test_states_that_would_be_constants_are_refused(make, tmp_path):
    model = make()
    with pytest.raises(
        ExportConversionError,
        match=r"assigns variables.*Received: .*(ring|rnn)",
    ):
        export_litert(model, tmp_path / "m.tflite", mode="float32")


def test_states_left_over_are_refused(tmp_path):
    model = stateful()
    model(sequences(1))
    with pytest.raises(ValueError, match=r"reset_states\(\).*rnn/rnn_state"):
        export_litert(model, tmp_path / "m.tflite", mode="float32")
    model.get_layer("rnn").reset_states()
    if keras.backend.backend() == "tensorflow":
        report = export_litert(model, tmp_path / "m.tflite", mode="float32")
        assert report.error < 1e-5
