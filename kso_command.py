"""The command `kso`: it loads no more than it needs, and prints no log lines of TensorFlow.

It stands outside the package, because importing that loads Keras and one of its backends: seconds
before `kso --help` could print. Nothing else is here; the commands are in `keras_sparse_ortho.cli`.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pkgutil
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from typing import Any

_PACKAGE = "keras_sparse_ortho"
# Keras imports these where they are installed, for what no command uses: 1.5 seconds of CPU.
_NOT_NEEDED = ("IPython", "matplotlib", "pandas", "sklearn")
# Keras' NumPy backend imports these for convolutions and Fourier transforms only: 2 seconds of CPU,
# or an ImportError where JAX is not installed.
_LOADED_WHEN_CALLED = ("jax", "keras.src.backend.jax")
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
    quick = options.needs_no_backend and not (
        os.environ.get("KERAS_BACKEND") or os.environ.get(_OWN_BACKEND)
    )
    if not quick:
        _load(spec, package)
        return run(options)
    # Keras' NumPy backend is loaded in a sixth of TensorFlow's time.
    os.environ["KERAS_BACKEND"] = "numpy"
    try:
        with _stand_ins():
            _load(spec, package)
    except Exception:  # a Keras whose NumPy backend needs more
        return _again_on_the_own_backend()
    if zipfile.is_zipfile(getattr(options, "model", "")):
        return run(options, otherwise=_again_on_the_own_backend)
    return run(options)


def _again_on_the_own_backend() -> int:
    """A model may hold what only runs on the backend that it was made for."""
    del os.environ["KERAS_BACKEND"]
    os.environ[_OWN_BACKEND] = "1"
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", __file__, *sys.argv[1:]])


class _StandIn(types.ModuleType):
    """Stands in for a module, or something in it, and loads that when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # so that modules below it can be imported

    def __getattr__(self, name: str) -> "_StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandIn(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return pkgutil.resolve_name(self.__name__)(*args, **kwargs)


class _StandInFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives stand-ins for `_LOADED_WHEN_CALLED` and the modules below these."""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if f"{name}.".startswith(tuple(f"{one}." for one in _LOADED_WHEN_CALLED)):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Imports in this block get stand-ins, later ones the modules themselves."""
    finder = _StandInFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, one in sys.modules.items() if isinstance(one, _StandIn)]:
            del sys.modules[name]


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
