"""Loads the stripped and the sparse file of a model in a fresh process: `fresh.py JOB`.

JOB is a pickle: the two files, the inputs, the modules that the model's classes need, and where
the outputs go. The stripped file comes first, while importing this package is an error; then,
where Keras' automatic numbers have moved on, the sparse one.
"""

import importlib
import pickle
import sys
import warnings
from pathlib import Path

PACKAGE = "keras_sparse_ortho"


def in_a_fresh_process(folder, x, modules=()):
    """The outputs of `plain.keras`, loaded without the package, and of `sparse.keras`."""
    from tests.helpers import run_python

    files = {
        name: str(folder / f"{name}.keras") for name in ("plain", "sparse")
    }
    job = {
        "inputs": x,
        "modules": modules,
        "outputs": str(folder / "outputs.pickle"),
        **files,
    }
    (folder / "job.pickle").write_bytes(pickle.dumps(job))
    run_python(
        __file__,
        folder / "job.pickle",
        PYTHONPATH=str(Path(__file__).parents[2]),
    )
    return pickle.loads((folder / "outputs.pickle").read_bytes())


def main(job):
    import keras

    for name in job["modules"]:
        importlib.import_module(name)

    def outputs(path):
        model = keras.saving.load_model(path, compile=False)
        answers = keras.tree.flatten(model(job["inputs"]))
        return [keras.ops.convert_to_numpy(answer) for answer in answers]

    assert PACKAGE not in sys.modules
    sys.modules[PACKAGE] = None  # importing it is an error now
    plain = outputs(job["plain"])
    del sys.modules[PACKAGE]
    importlib.import_module(PACKAGE)
    sparse = outputs(job["sparse"])
    Path(job["outputs"]).write_bytes(pickle.dumps((plain, sparse)))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # other packages', of what they load
    main(pickle.loads(Path(sys.argv[1]).read_bytes()))
