"""Models that the tests of this folder share, and what a plain interpreter says of their files."""

import warnings

import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import FloatOperationsWarning
from keras_sparse_ortho.export import export_litert

layers = L = keras.layers


def thin_out(model, density=0.1, seed=0):
    """Zero all but round(density * size) entries of each kernel; give the rest some spread."""
    rng = np.random.default_rng(seed)
    for variable in model.trainable_weights:
        value = np.array(keras.ops.convert_to_numpy(variable.value))
        if "kernel" in variable.name or "embeddings" in variable.name:
            dead = rng.permutation(value.size)[round(density * value.size) :]
            value = value / np.sqrt(density)
            value.flat[dead] = 0.0
        else:
            value = value + 0.1 * rng.standard_normal(value.shape)
        variable.assign(value)
    return model


def kernel_zeros(model):
    kernels = [
        v for v in model.weights if "kernel" in v.name or "embeddings" in v.name
    ]
    return sum(
        int(np.sum(keras.ops.convert_to_numpy(v.value) == 0)) for v in kernels
    )


def mlp(inputs=32, hidden=(64, 64), outputs=10, activation="relu"):
    """Layers named "hidden" (and "hidden_1"), and a "head"."""
    names = ["hidden", *(f"hidden_{k}" for k in range(1, len(hidden)))]
    made = [
        L.Dense(n, activation, name=name)
        for n, name in zip(hidden, names, strict=True)
    ]
    return keras.Sequential(
        [keras.Input((inputs,), name="x"), *made, L.Dense(outputs, name="head")]
    )


def cnn():
    """A normalization behind each convolution, a depthwise one, and a sum."""
    inputs = keras.Input((10, 10, 3), name="image")
    x = L.Conv2D(12, 3, use_bias=False, name="first")(inputs)
    x = L.ReLU()(L.BatchNormalization(momentum=0.8, name="first_norm")(x))
    y = L.DepthwiseConv2D(3, padding="same", name="depthwise")(x)
    y = L.ReLU(6.0)(L.BatchNormalization(momentum=0.8)(y))
    y = L.BatchNormalization(momentum=0.8)(L.Conv2D(12, 1, name="pointwise")(y))
    x = L.MaxPooling2D()(L.ReLU()(L.Add()([x, y])))
    return keras.Model(inputs, L.Dense(6, name="head")(L.Flatten()(x)))


def encoder():
    inputs = keras.Input((6, 16))
    y = L.LayerNormalization(name="first_norm")(inputs)
    x = L.Add()([inputs, L.MultiHeadAttention(2, 8, name="attention")(y, y)])
    y = L.LayerNormalization(name="second_norm")(x)
    y = L.Dense(32, activation="gelu", name="wide")(y)
    x = L.Add()([x, L.Dense(16, name="narrow")(y)])
    x = L.GlobalAveragePooling1D()(L.LayerNormalization(name="last_norm")(x))
    return keras.Model(inputs, L.Dense(6, name="head")(x))


def tiny():
    return keras.Sequential([keras.Input((4,), name="x"), layers.Dense(3)])


def rms(got, want):
    return np.sqrt(np.mean((got - want) ** 2)) / np.sqrt(np.mean(want**2))


def exported(model, path, mode="int8", **data):
    """The report of an export; a warning exactly where integers have operations in floats."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = export_litert(model, path, mode=mode, **data)
    kinds = [
        one.category for one in caught if issubclass(one.category, UserWarning)
    ]
    assert kinds == [FloatOperationsWarning] * bool(report.in_floats)
    return report


# --- files, as a user without this package sees them ---------------------------------------------


def interpreter_of(path, xnnpack=True):
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    resolver = OpResolverType.AUTO if xnnpack else plain
    return Interpreter(str(path), experimental_op_resolver_type=resolver)


def interpret(path, **inputs):
    """The outputs of a file, by name."""
    return interpreter_of(path).get_signature_runner()(**inputs)


def resized(path, x):
    """The output of a file of one input on another number of rows."""
    interpreter = interpreter_of(path)
    (given,), (made,) = (
        interpreter.get_input_details(),
        interpreter.get_output_details(),
    )
    interpreter.resize_tensor_input(given["index"], x.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], x)
    interpreter.invoke()
    return interpreter.get_tensor(made["index"])


def operations(path):
    """Names of the operations of a file, and what they give, in order."""
    run = interpreter_of(path, xnnpack=False)
    run.allocate_tensors()
    types = {
        about["index"]: about["dtype"] for about in run.get_tensor_details()
    }
    return [
        (one["op_name"], types[one["outputs"][0]])
        for one in run._get_ops_details()
    ]


X = np.random.default_rng(0).normal(size=(4, 8, 8, 16)).astype("float32")


def dense():
    """A convolution and two Dense made."""
    made = [
        L.Conv2D(32, 3, activation="relu", name="conv"),
        L.GlobalAveragePooling2D(),
    ]
    made += [
        L.Dense(64, activation="relu", name="hidden"),
        L.Dense(16, name="head"),
    ]
    return keras.Sequential([keras.Input((8, 8, 16), name="x"), *made])


def stored(storage):
    """The network at density 1/2; "stripped" is the masked one, stripped."""
    if storage == "blocks, to_masked":
        return kso.convert(stored("blocks"), "masked")
    if storage == "blocks":
        structure = kso.Block(8, 8, regular=True)
        model = kso.convert(
            kso.sparsify(dense(), 0.5, structure=structure, seed=0), "blocks"
        )
        assert (
            sum(
                type(layer).__name__.startswith("BlockSparse")
                for layer in model.layers
            )
            == 3
        )
        return model
    options = {"storage": "compact"} if storage == "compact" else {}
    model = kso.sparsify(dense(), 0.5, budget="uniform", seed=0, **options)
    return kso.strip(model) if storage == "stripped" else model
