"""Latency of live blocks in ONNX Runtime and OpenVINO, as `model.export` of Keras writes them.

    KERAS_BACKEND=tensorflow python benchmarks/bench_runtimes.py

It needs the extra `formats`. An MLP 4 x 1024, dense and with one in eight blocks of 32 or 64
(`storage="blocks"`: a gather and a batched product for each layer), in float32: OpenVINO would
otherwise take bfloat16 where the processor has AMX. Each file is compared with Keras; then all of
one batch, number of threads and runtime are timed in turn.
"""

import argparse
import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from timing import interleaved, machine, markdown, parsed, write

import keras_sparse_ortho as kso

L = keras.layers
NEEDED = ("onnxruntime", "openvino", "tf2onnx")
DENSITY = 1 / 8


def networks(width: int, blocks: list[int]) -> dict[str, keras.Model]:
    """The dense MLP, and that of each size of blocks."""
    keras.utils.set_random_seed(0)
    hidden = [L.Dense(width, activation="relu", name=f"dense_{k}") for k in range(4)]
    dense = keras.Sequential([keras.Input((width,), name="x"), *hidden])
    found = {"dense": dense}
    for side in blocks:
        structure = kso.Block(side, side, regular=True)
        options = {"structure": structure, "storage": "blocks", "seed": 0}
        found[f"blocks of {side}"] = kso.sparsify(dense, DENSITY, **options)
    return found


def onnx_runtime(model: keras.Model, x: np.ndarray, threads: int, folder: Path) -> Callable:
    import onnxruntime

    path = str(folder / "model.onnx")
    spec = [keras.InputSpec(shape=x.shape, dtype="float32")]
    model.export(path, format="onnx", input_signature=spec, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options)
    given = {session.get_inputs()[0].name: x}
    return lambda: session.run(None, given)[0]


def openvino(model: keras.Model, x: np.ndarray, threads: int, folder: Path) -> Callable:
    import openvino

    path = str(folder / "model.xml")
    spec = [keras.InputSpec(shape=x.shape, dtype="float32")]
    model.export(path, format="openvino", input_signature=spec, verbose=False)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    return lambda: request.infer([x])[0]


RUNTIMES = {"ONNX Runtime": onnx_runtime, "OpenVINO": openvino}


def measured(
    models: dict[str, keras.Model], runtime: str, batch: int, threads: int, rounds: int
) -> list[list[str]]:
    """A line of the table for each network."""
    width = models["dense"].input_shape[-1]
    x = np.random.default_rng(0).standard_normal((batch, width)).astype("float32")
    cases = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in models.items():
            place = Path(folder, name)
            place.mkdir()
            cases[name] = RUNTIMES[runtime](model, x, threads, place)
            want = keras.ops.convert_to_numpy(model(x))
            np.testing.assert_allclose(cases[name](), want, atol=1e-5)
        times = interleaved(cases, rounds, warm_up=20)
    return [
        [runtime, str(batch), str(threads), name, f"{1e3 * t:.3f}", f"{times['dense'] / t:.2f}"]
        for name, t in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--rounds", type=int, default=1000)
    options = parsed(parser, {"width": 256, "blocks": [32], "rounds": 20})
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"Nothing measured: {', '.join(missing)} missing; install the extra `formats`.")
        return
    models, rows = networks(options.width, options.blocks), []
    for runtime in RUNTIMES:
        for batch in (1, 8):
            for threads in (1, 2):
                rows += measured(models, runtime, batch, threads, options.rounds)
    text = "# ONNX Runtime and OpenVINO: live blocks against dense float32\n\n"
    text += f"{machine()}, Keras {keras.__version__}. MLP of four layers of {options.width}, one "
    text += "in eight blocks, as `model.export` of Keras writes it: a gather and a batched product "
    text += "for each layer. Float32 throughout; medians of calls in turn; every file agreed with "
    text += "Keras before. `x dense`: times as fast as the dense file.\n\n"
    header = ["runtime", "batch", "threads", "network", "ms", "x dense"]
    write("runtimes", text + markdown(header, rows))


if __name__ == "__main__":
    main()
