"""For test-compat and test-formats: `make test` does not install what these tests need."""

import importlib.util

MODELS = ("flax", "grain", "keras_hub", "keras_rs", "keras_tuner")
MICRO = ("tflite_micro",)
FORMATS = ("jax2onnx", "onnxruntime", "onnxscript", "openvino", "tf2onnx")


def lack(names):
    return not all(map(importlib.util.find_spec, names))


collect_ignore = ["test_formats.py"] if lack(FORMATS) else []
collect_ignore += ["test_micro.py"] if lack(MICRO) else []
if lack(MODELS):
    collect_ignore += ["test_feeding.py", "test_models.py", "test_packages.py"]
    # Which need Keras alone, and much time on JAX.
    collect_ignore += ["test_examples.py"]
