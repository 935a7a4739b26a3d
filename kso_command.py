"""The command `kso`: it loads no more than it needs, and prints no log lines of TensorFlow.

It stands outside the package, because importing that loads Keras and one of its backends: seconds
before `kso --help` could print. Nothing else is here; the commands are in `keras_sparse_ortho.cli`.
"""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator

_PACKAGE = "keras_sparse_ortho"
# Keras imports these where they are installed, for what no command uses: 1.5 seconds of CPU.
_NOT_NEEDED = ("IPython", "matplotlib", "pandas", "sklearn")
_OWN_BACKEND = "KSO_OWN_BACKEND"


def main() -> int:
    """Run the command line; the exit status."""
    # A module of this name without content: what stands below it can be imported, and it is
    # filled once the arguments are known to be right.
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = package
    from keras_sparse_ortho.cli import parsed, run

    options = parsed()
    if isinstance(options, int):
        return options
    quick = options.needs_no_backend and _numpy_will_do()
    if quick:
        os.environ["KERAS_BACKEND"] = "numpy"
    _load(spec, package)
    if quick and zipfile.is_zipfile(getattr(options, "model", "")):
        return run(options, otherwise=_again_on_the_own_backend)
    return run(options)


def _numpy_will_do() -> bool:
    """Whether to load models with Keras' NumPy backend, in a third of TensorFlow's time."""
    if os.environ.get("KERAS_BACKEND") or os.environ.get(_OWN_BACKEND):
        return False
    return importlib.util.find_spec("jax") is not None  # which that backend imports


def _again_on_the_own_backend() -> int:
    """A model may hold what only runs on the backend that it was made for."""
    del os.environ["KERAS_BACKEND"]
    os.environ[_OWN_BACKEND] = "1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", __file__, *sys.argv[1:]])


def _load(spec: importlib.machinery.ModuleSpec, package: types.ModuleType) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    hidden = [name for name in _NOT_NEEDED if name not in sys.modules]
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment] # so Python marks a blocked import
    assert spec.loader is not None
    try:
        with _muted():
            spec.loader.exec_module(package)
    finally:
        for name in hidden:
            del sys.modules[name]


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """Keeps back what libraries write to standard error, and shows it if something fails.

    TensorFlow writes some lines before it looks at `TF_CPP_MIN_LOG_LEVEL`.
    """
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        before = os.dup(2)
        os.dup2(kept.fileno(), 2)
        try:
            yield
        except BaseException:
            sys.stderr.flush()
            os.dup2(before, 2)
            kept.seek(0)
            sys.stderr.write(kept.read().decode(errors="replace"))
            raise
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)


if __name__ == "__main__":
    sys.exit(main())
