"""What every pytest run here shares: backend, devices, which tests run where, seeds.

It stands in the root, not in ``tests/``, because the docstrings of the package and the code blocks
of README.md and docs/ are run as well. Importing it imports no backend.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import importlib.util
import math
import os
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# Before anything imports Keras or a backend. An explicit setting of the user wins.
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault(
    "TF_CPP_MIN_LOG_LEVEL", "3"
)  # TensorFlow's C++ start-up messages
os.environ.setdefault(
    "TF_ENABLE_ONEDNN_OPTS", "0"
)  # the same rounding on every machine
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # the tests are for the CPU
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
_TWO_DEVICES = "--xla_force_host_platform_device_count=2"
if _TWO_DEVICES not in os.environ.get(
    "XLA_FLAGS", ""
):  # two JAX devices, for DataParallel
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} {_TWO_DEVICES}".strip()
    )

import hypothesis
import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

BACKEND = os.environ["KERAS_BACKEND"]

hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,  # the same examples in every run
    deadline=None,  # the first call of a compiled function is slow
    database=None,
    print_blob=True,
)
hypothesis.settings.load_profile("repeatable")


# --- which tests run where ----------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", action="store_true", help="run the tests marked slow, too"
    )
    parser.addoption(
        "--spread",
        metavar="DRAW",
        help="run half of the tests and a quarter of their cases, on one backend, by this text",
    )


# How often `--spread` draws each backend. A test takes twice as long on JAX, which compiles more.
_TICKETS = {"tensorflow": 2, "jax": 1, "torch": 2}


def _backends(item: pytest.Item) -> tuple[str, ...]:
    """Where ``item`` runs, by the markers that pyproject.toml explains."""
    if item.get_closest_marker("needs_kernels"):
        return tuple(
            backend
            for backend in _backends_by_name(item)
            if backend in _with_kernels()
        )
    return _backends_by_name(item)


@functools.cache
def _with_kernels() -> tuple[str, ...]:
    """The backends that have kernels for a GPU here: a new JAX, and torch with Triton."""
    backends = []
    if importlib.util.find_spec("jax"):
        release = importlib.metadata.version("jax").split(".")[:2]
        if tuple(map(int, release)) >= (0, 10):  # older ones are not tested
            backends.append("jax")
    if importlib.util.find_spec("triton"):
        backends.append("torch")
    return tuple(backends)


# Files with doctests are imported, these where their packages are.
collect_ignore = [
    f"keras_sparse_ortho/layers/{name}.py"
    for backend, name in (
        ("jax", "_pallas_products"),
        ("torch", "_triton_kernels"),
    )
    if backend not in _with_kernels()
]


def _backends_by_name(item: pytest.Item) -> tuple[str, ...]:
    """Where ``item`` runs, whatever is installed."""
    for backend in ("tensorflow", "jax", "torch"):
        if item.get_closest_marker(f"{backend}_only"):
            return (backend,)
    if item.get_closest_marker("numpy_only"):
        return ("tensorflow",)
    if item.get_closest_marker("not_tensorflow"):
        return ("jax", "torch")
    return (
        "tensorflow",
        "jax",
        *(("torch",) if item.get_closest_marker("core") else ()),
    )


def _backends_here(item: pytest.Item, config: pytest.Config) -> tuple[str, ...]:
    """Where ``item`` runs with the options of this run."""
    backends = _backends(item)
    if not config.getoption("--slow"):
        slow = {
            name for mark in item.iter_markers("slow_on") for name in mark.args
        }
        everywhere = item.get_closest_marker("slow") is not None
        backends = tuple(
            name for name in backends if not everywhere and name not in slow
        )
    return backends


def _draw_backend(backends: tuple[str, ...], ticket: int) -> str:
    """One of ``backends``, by the number of a case."""
    tickets = [name for name in backends for _ in range(_TICKETS[name])]
    return tickets[ticket % len(tickets)]


def _spread(
    items: list[pytest.Item], draw: str, config: pytest.Config
) -> list[pytest.Item]:
    """A quarter of the cases of each test, or one case of every other test; each on one backend.

    A case's number is a hash of its name and of ``draw``: each worker of xdist finds the same.
    """
    cases = defaultdict(list)
    chosen = []
    for item in items:
        backends = _backends_here(item, config)
        if item.get_closest_marker("each_backend"):
            if BACKEND in backends:
                chosen.append(item)
        elif backends:
            number = zlib.crc32(f"{draw} {item.nodeid}".encode())
            test = item.nodeid.partition("[")[0]
            cases[test].append((number, item, backends))
    for test, numbered in cases.items():
        numbered.sort(key=lambda case: case[0])
        expected_count = max(len(numbered) / 4, 1 / 2)
        lot = zlib.crc32(f"{test} {draw}".encode()) / 2**32
        count = math.floor(expected_count + lot)
        chosen += [
            item
            for number, item, backends in numbered[:count]
            if _draw_backend(backends, number) == BACKEND
        ]
    order = {item: place for place, item in enumerate(items)}
    return sorted(chosen, key=order.__getitem__)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    draw = config.getoption("--spread")
    if draw:
        chosen = _spread(items, draw, config)
    else:
        chosen = [
            item for item in items if BACKEND in _backends_here(item, config)
        ]
    deselected = set(items).difference(chosen)
    if deselected:
        config.hook.pytest_deselected(items=list(deselected))
        items[:] = chosen


def pytest_collection_finish() -> None:
    """Tracing makes objects by the million: looking for garbage took a tenth of all time."""
    gc.collect()
    gc.freeze()  # what has been imported stays
    gc.set_threshold(50_000, 50, 100)


def pytest_report_header(config: pytest.Config) -> str:
    draw = config.getoption("--spread")
    parts = [f"keras backend: {BACKEND}"]
    if draw:
        parts.append(f"drawn by {draw}")
    if BACKEND == "torch" and BACKEND not in _with_kernels():
        parts.append("kernels for a GPU are not tested: pip install triton")
    return "; ".join(parts)


# --- devices ------------------------------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Note `--slow`; split TensorFlow's CPU for MirroredStrategy before any module can start it."""
    if config.getoption("--slow"):
        os.environ["KSO_SLOW"] = (
            "1"  # for tests.helpers, and for the workers of xdist
        )
    starts_workers = getattr(
        config.option, "numprocesses", None
    )  # xdist: not in the parent
    if (
        BACKEND == "tensorflow"
        and not starts_workers
        and config.option.markexpr != "numpy_only"
    ):
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        halves = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, halves)


# --- global state -------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _fresh_keras_state() -> Iterator[None]:
    """Start each test with fixed seeds, no used-up layer names, and the float32 policy."""
    keras = sys.modules.get("keras")
    if keras is not None:  # a pure NumPy run need not pay for the import
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        keras.config.set_dtype_policy("float32")
    yield
    if (
        keras is not None
    ):  # fixtures of the next module are made before this one runs again
        keras.config.set_dtype_policy("float32")


# --- README.md and docs/ ------------------------------------------------------------------------


def _enter_scratch(namespace: dict) -> None:
    scratch = namespace["_scratch"] = tempfile.TemporaryDirectory()
    namespace["_home"] = Path.cwd()
    os.chdir(scratch.name)


def _leave_scratch(namespace: dict) -> None:
    os.chdir(namespace["_home"])
    namespace["_scratch"].cleanup()


# Each ```python block is a test; the blocks of one file share a namespace and a scratch directory.
# `<!--- skip: next -->` before a block leaves it out.
pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/tutorials/*.md"],
    # What needs a package that .venv has not is run by `make test-compat`.
    excludes=[]
    if importlib.util.find_spec("keras_hub")
    else ["docs/tutorials/keras_hub.md"],
    setup=_enter_scratch,
    teardown=_leave_scratch,
).pytest()
