"""Crafted `.keras` files: every registered class of the package, with wrong things in its places.

The classes come from Keras' registry and their arguments from their signatures, so that a new one
is tried as soon as it is there; one that no specimen holds is an error.
"""

import copy
import dataclasses
import inspect
import io
import json
import random
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho.quantization import FakeQuantize

PACKAGE = "keras_sparse_ortho>"
TFMOT = f"{PACKAGE}TfmotSchedule"
L, init, P, S = (
    keras.layers,
    kso.initializers,
    kso.parametrizations,
    kso.schedules,
)


def deep(levels: int, within: Callable[[Any], Any]) -> Any:
    """A value in so many containers."""
    value: Any = 1
    for _ in range(levels):
        value = within(value)
    return value


def menu(folder: Path) -> dict[str, Any]:
    """What is put into the places, by a name."""
    mark, outside = str(folder / "MARK"), str(folder / "outside" / "x")

    def object_of(module: str, name: str, config: Any) -> dict[str, Any]:
        return {"module": module, "class_name": name, "config": config}

    def function(module: str, name: str) -> dict[str, Any]:
        return object_of(module, "function", name) | {"registered_name": name}

    code = {"code": "4wEAAAA="}
    lists = {
        f"list {k}": v
        for k, v in enumerate([[], [1], [0.5, 0.5], [-1, 2**40], [[]], [None]])
    }
    numbers = [0, -1, 1, 3, 7, 10**9, 2**31, 2**40, 2**63, 10**30, 10**400]
    numbers += [
        0.5,
        1.5,
        -0.5,
        1e308,
        1e-320,
        float("nan"),
        float("inf"),
        -float("inf"),
    ]
    texts = [
        "",
        "a",
        "0.5",
        ".*",
        "(a+)+$",
        "%s%n{0}{x.y}",
        "a/b",
        "\x00",
        "\ud800",
        "x" * 10**5,
    ]
    texts += [
        "../../outside/x",
        outside,
        f"file://{outside}",
        "float64",
        "channels_first",
        "ReLU",
    ]
    return {
        **{f"number {number!r:.20}": number for number in numbers},
        **{f"text {text!r:.20}": text for text in texts},
        **lists,
        "none": None,
        "true": True,
        "false": False,
        "dict": {},
        "dict of dict": {"a": {"b": 1}, "kernel": None},
        "200 lists": deep(200, lambda value: [value]),
        "900 lists": deep(900, lambda value: [value]),
        "900 dicts": deep(900, lambda value: {"a": value}),
        "900 objects": deep(
            300, lambda value: object_of("keras.layers", "Dense", value)
        ),
        "long list": [0] * 10**5,
        "os.system": object_of("os", "system", f"touch {mark}"),
        "function of os": function("os", "system"),
        "Popen": object_of("subprocess", "Popen", {"args": ["touch", mark]}),
        "eval": object_of(
            "builtins", "eval", {"source": f"open({mark!r}, 'w')"}
        ),
        "a module": object_of("evil", "Evil", {}),
        "a lambda": {
            "class_name": "__lambda__",
            "config": {"value": f"open({mark!r}, 'w')"},
        },
        "a Lambda": object_of(
            "keras.layers",
            "Lambda",
            {"function": {"class_name": "__lambda__", "config": code}},
        ),
        "get_file": function("keras.utils", "get_file"),
        "load_model": function("keras.saving", "load_model"),
        "a relu": function("keras.activations", "relu"),
        "a tensor": {
            "class_name": "__tensor__",
            "config": {"value": [1.0], "dtype": "float32"},
        },
        "objects": {
            "class_name": "__numpy__",
            "config": {"value": [1, "a"], "dtype": "object"},
        },
        "bytes": {"class_name": "__bytes__", "config": {"value": "a"}},
        "a slice": {"class_name": "__slice__", "config": {"value": [1, 2, 3]}},
        "no class": {"class_name": None, "config": {}},
        "no config": {"class_name": "Dense", "module": "keras.layers"},
        "a Dense": object_of("keras.layers", "Dense", {"units": 3}),
    }


@dataclasses.dataclass
class Specimen:
    """A sound file: its parts, and its weights."""

    name: str
    config: dict[str, Any]
    parts: dict[str, bytes]
    weights: list[np.ndarray]

    def write(
        self, path: Path, config: Any, weights: bytes | None = None
    ) -> None:
        """A file with another configuration, or other weights."""
        limit = sys.getrecursionlimit()
        # To write it; it is read with the usual one.
        sys.setrecursionlimit(20_000)
        parts = {**self.parts, "config.json": json.dumps(config).encode()}
        sys.setrecursionlimit(limit)
        if weights is not None:
            parts["model.weights.h5"] = weights
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in parts.items():
                archive.writestr(name, content)


# --- sound models that hold every class -----------------------------------------------------------


@keras.saving.register_keras_serializable("faults")
class Graph(keras.Model):
    """A functional model that makes its layers itself."""

    def __init__(self, **kwargs: Any) -> None:
        x = keras.Input((8,))
        super().__init__(x, L.Dense(4, name="inside")(x), **kwargs)

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name}


@keras.saving.register_keras_serializable("faults")
class Pair(L.Layer):
    """A layer that makes its layers itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.inner = L.Dense(8, name="inside")

    def build(self, input_shape: Any) -> None:
        self.inner.build(input_shape)

    def call(self, inputs: Any) -> Any:
        return self.inner(inputs)


def _plain(*layers: Any, shape: tuple[int, ...] = (8,)) -> keras.Model:
    return keras.Sequential([keras.Input(shape), *layers])


RING = ("1100", "0110", "0011", "1001")


def _models() -> Iterator[tuple[str, keras.Model]]:
    B = kso.layers

    def dense(name: str, **kwargs: Any) -> Any:
        return L.Dense(8, name=name, **kwargs)

    exact = init.ExactOrthogonal
    drawn = {
        "a": exact(0.5, structure=kso.orthogonal.Block(2, 2), seed=0),
        "b": exact(0.5, structure=kso.orthogonal.NByM(2, 4), seed=0),
        "c": exact(0.5, structure=kso.orthogonal.NByM(1, 2), seed=0),
        "d": init.RandomSparse(0.5, seed=0),
        "e": init.ApproximateIsometry(0.5, seed=0, max_iterations=20),
        "f": init.RamanujanOrthogonal(4, seed=0),
        "h": exact(
            0.5, structure=kso.orthogonal.GivenBlocks(2, 2, RING), seed=0
        ),
        "g": exact(
            0.5, seed=0, layout=init.KernelLayout(inputs=(0,), outputs=(1, 2))
        ),
    }
    layers = [dense(name, kernel_initializer=drawn[name]) for name in "abcdefh"]
    yield "initializers", kso.apply_masks(_plain(*layers))
    heads = L.EinsumDense("ab,bcd->acd", (2, 4), kernel_initializer=drawn["g"])
    yield "attention", kso.apply_masks(_plain(heads))
    yield (
        "compact",
        kso.sparsify(
            _plain(dense("a"), dense("b")), 0.5, seed=0, storage="compact"
        ),
    )
    block = {"density": 0.5, "block": 2, "seed": 0}
    yield (
        "block dense",
        _plain(
            B.BlockSparseDense(8, **block),
            B.BlockSparseEinsumDense("ab,bc->ac", 8, **block),
        ),
    )
    for rank, kind in enumerate(
        (B.BlockSparseConv1D, B.BlockSparseConv2D, B.BlockSparseConv3D)
    ):
        yield (
            f"block conv {rank + 1}",
            _plain(kind(4, 3, **block), shape=(5,) * (rank + 1) + (4,)),
        )
    yield (
        "padding",
        kso.sparsify(
            _plain(B.CircularPadding(), L.Conv2D(4, 3), shape=(4, 4, 2)), 0.5
        ),
    )
    schedules = [
        S.Constant(0.5),
        S.OneShot(0.5, 3),
        S.Polynomial(0.5, 0, 8),
        S.Cubic(0.5, 0, 8),
    ]
    for schedule in [*schedules, S.Linear(0.5, 0, 8)]:
        name = type(schedule).__name__
        yield (
            name,
            kso.parametrize(_plain(dense("a")), P.MagnitudeMask(schedule, 2)),
        )
    yield (
        "top k",
        kso.parametrize(_plain(dense("a")), P.StraightThroughTopK(0.5)),
    )
    yield "feather", kso.parametrize(_plain(dense("a")), P.Feather(0.5))
    for learnt in (
        P.SoftThreshold(),
        P.ChannelSoftThreshold(),
        P.LowRankSoftThreshold(1),
    ):
        yield type(learnt).__name__, kso.parametrize(_plain(dense("a")), learnt)
    yield (
        "rounded",
        kso.quantize_aware(kso.sparsify(_plain(dense("a")), 0.5, seed=0)),
    )
    for cell in (B.BlockSparseLSTMCell, B.BlockSparseGRUCell):
        cells = cell(
            8,
            density=0.5,
            recurrent_density=0.5,
            block=4,
            recurrent_block=4,
            seed=0,
        )
        recurrent = L.Reshape((1, 8)), B.BlockSparseRNN(cells, name="rnn")
        yield cell.__name__, _plain(dense("a"), *recurrent)
    yield "range", _plain(FakeQuantize(name="range"), dense("a"))
    inputs = keras.Input((4, 8))
    attended = L.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    yield "rounded inside", kso.quantize_aware(keras.Model(inputs, attended))
    yield "rebuilt", kso.sparsify(Graph(), 0.5, seed=0)
    yield "rewrapped", kso.sparsify(_plain(Pair(name="pair")), 0.5, seed=0)


def specimens(folder: Path, with_tfmot: bool) -> list[Specimen]:
    """A file for each model; and one with TFMOT's schedule, without loading TensorFlow for it."""
    keras.utils.set_random_seed(0)
    found = []
    for name, model in _models():
        path = folder / "sound.keras"
        model.save(path)
        with zipfile.ZipFile(path) as archive:
            parts = {part: archive.read(part) for part in archive.namelist()}
        weights = [np.array(value) for value in model.get_weights()]
        found.append(
            Specimen(name, json.loads(parts["config.json"]), parts, weights)
        )
    if with_tfmot:
        constant = next(one for one in found if one.name == "Constant")
        other = copy.deepcopy(constant)
        (node,) = (
            n
            for n in nodes(other.config)
            if n["registered_name"] == f"{PACKAGE}Constant"
        )
        inner = {
            "target_sparsity": 0.5,
            "begin_step": 0,
            "end_step": -1,
            "frequency": 2,
        }
        module = "tensorflow_model_optimization.python.core.sparsity.keras.pruning_schedule"
        schedule = {
            "module": module,
            "name": "ConstantSparsity",
            "config": inner,
        }
        node.update(class_name="TfmotSchedule", registered_name=TFMOT)
        node["config"] = {"schedule": schedule}
        other.name = "TFMOT"
        found.append(other)
    return found


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """The objects of the package in a configuration."""
    if isinstance(value, dict):
        if str(value.get("registered_name")).startswith(PACKAGE):
            yield value
        for inner in value.values():
            yield from nodes(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from nodes(inner)


def arguments(name: str, node: dict[str, Any]) -> list[str]:
    """The arguments of a class, those that it passes on, and the keys of its configuration."""
    kind = keras.saving.get_custom_objects()[name]
    found = set(node["config"])
    for base in kind.__mro__:
        if base.__module__.startswith(
            ("keras_sparse_ortho", "keras")
        ) and "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()
            found |= {
                p.name
                for p in parameters
                if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
            }
    return sorted(found - {"self"})


# --- cases ----------------------------------------------------------------------------------------


def _changed(
    specimen: Specimen, at: int, key: str, choice: str, values: dict[str, Any]
) -> Any:
    """A configuration with a change in one object of the package: an argument, or the object."""
    config = copy.deepcopy(specimen.config)
    node, value = list(nodes(config))[at], values.get(choice)
    if key == "(class)":  # another one of the package, with this configuration
        node.update(
            class_name=choice.removeprefix(PACKAGE), registered_name=choice
        )
    elif key == "(object)":
        node.clear()
        node.update(value if isinstance(value, dict) else {"config": value})
    elif key == "(config)":
        node["config"] = value
    elif key == "(build_config)":
        node["build_config"] = {"input_shape": value, "drawn_digest": "a"}
    elif choice == "(left out)":
        node["config"].pop(key, None)
    else:
        node["config"][key] = value
    return config


def config_cases(
    found: list[Specimen],
    values: dict[str, Any],
    number: int,
    rng: random.Random,
) -> list[tuple[str, Specimen, Any]]:
    """Names, specimens and configurations: each argument of each class in turn, with other values.

    Raises:
        LookupError: A registered class that is in no specimen.
    """
    holders: dict[str, list[tuple[Specimen, int]]] = {}
    for specimen in found:
        for at, node in enumerate(nodes(specimen.config)):
            holders.setdefault(node["registered_name"], []).append(
                (specimen, at)
            )
    # A class may have an older name as well.
    ours = keras.saving.get_custom_objects().items()
    classes = {
        keras.saving.get_registered_name(c)
        for name, c in ours
        if name.startswith(PACKAGE)
    }
    without_tfmot = all(specimen.name != "TFMOT" for specimen in found)
    if (
        missing := classes
        - set(holders)
        - ({TFMOT} if without_tfmot else set())
    ):
        raise LookupError(f"no specimen holds {sorted(missing)}")
    kinds = sorted(holders)
    every = []
    for name, places in sorted(holders.items()):
        own = list(nodes(places[0][0].config))[places[0][1]]
        for key in [
            *arguments(name, own),
            "(class)",
            "(object)",
            "(config)",
            "(build_config)",
        ]:
            choices = kinds if key == "(class)" else [*values]
            choices = (
                [*choices, "(left out)"] if not key.startswith("(") else choices
            )
            every.append((name, key, places, rng.sample(choices, len(choices))))
    rng.shuffle(every)
    cases: list[tuple[str, Specimen, Any]] = []
    for turn in range(-(-number // len(every))):
        for name, key, places, choices in every[: number - len(cases)]:
            specimen, at = rng.choice(places)
            choice = choices[turn % len(choices)]
            label = f"{specimen.name}: {name}.{key} = {choice}"
            cases.append(
                (label, specimen, _changed(specimen, at, key, choice, values))
            )
    return cases


def changed_weights(content: bytes, seed: int, folder: Path) -> bytes:
    """An HDF5 file with one dataset that is another, or none."""
    import h5py

    rng = random.Random(seed)
    stream = io.BytesIO(content)
    with h5py.File(stream, "r+") as file:
        found: list[str] = []
        file.visititems(
            lambda name, item: (
                found.append(name) if isinstance(item, h5py.Dataset) else None
            )
        )
        # Indices and masks are the package's own; kernels are Keras'.
        whole = [name for name in found if file[name].dtype.kind in "iub"]
        name = rng.choice(whole if whole and rng.random() < 0.7 else found)
        value = file[name][()]
        numbers = np.random.default_rng(seed)
        others: list[Any] = [
            value.astype("float64") * np.nan,
            np.full_like(value, 1) * -1 if value.dtype.kind in "if" else ~value,
            numbers.integers(-3, 100, value.shape),
            np.zeros_like(value),
            np.sort(value.reshape(-1))[::-1].reshape(value.shape),
            np.roll(value.reshape(-1), 1).reshape(value.shape),
            value.astype("uint64") + np.uint64(2**63),
            value.astype("S9"),
            value[..., :-1] if value.ndim else value[None],
            np.concatenate([value[None], value[None]]),
            value[None],
            np.float32(1),
            np.zeros((0, *value.shape), value.dtype),
            "text",
            np.array(["a", "b"], dtype=h5py.string_dtype()),
            np.zeros(3, np.dtype([("a", "i4"), ("b", "f8")])),
        ]
        kind = rng.randrange(len(others) + 7)
        del file[name]
        if kind < len(others):
            file[name] = others[kind]
        elif kind == len(others):
            file.create_dataset(
                name, (2**34,), "i4", chunks=(2**20,), compression="gzip"
            )
        elif kind == len(others) + 1:
            file[name] = h5py.ExternalLink(
                str(folder / "outside" / "secret.h5"), "a"
            )
        elif kind == len(others) + 2:
            file[name] = h5py.SoftLink(name)
        elif kind == len(others) + 3:
            file.create_group(name)
        elif kind == len(others) + 4:
            secret = str(folder / "outside" / "secret.h5")
            file.create_dataset(
                name, value.shape, "u1", external=[(secret, 0, value.size)]
            )
        elif kind == len(others) + 5:
            file[f"{name}x"] = value
        # else: left out
    return stream.getvalue()
