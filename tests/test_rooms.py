"""The house: which room imports which, read from the source."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

import keras_sparse_ortho as kso

pytestmark = pytest.mark.numpy_only

NAME = "keras_sparse_ortho"
ROOT = Path(kso.__file__).parent
# Each room imports only what stands before it; `docs/architecture.md` says what each is for.
ORDER = (
    *(
        "_text",
        "errors",
        "_types",
        "_foreign_names",
        "_checks",
        "_files",
        "_pictures",
        "_interception",
    ),
    *(
        "_keras_internals",
        "_workers",
        "_values",
        "_backend",
        "_gathers",
        "_optimizer_slots",
        "orthogonal",
    ),
    *(
        "kernels",
        "initializers",
        "schedules",
        "parametrizations",
        "layers",
        "storages",
        "models",
    ),
    *(
        "_data",
        "_checked_data",
        "budgets",
        "saliency",
        "calibration",
        "pruning",
        "quantization",
        "families",
    ),
    *(
        "export",
        "callbacks",
        "recovery",
        "analysis",
        "shrinking",
        "cli",
        "tfmot",
    ),
)


def imports():
    """Triples of a file, the room and the whole name of a module that it imports."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and node.level == 0
            ):
                names = [node.module]
                if node.module == NAME:
                    names = [f"{NAME}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                if name.startswith(f"{NAME}."):
                    yield path.relative_to(ROOT), name.split(".")[1], name


def room_of(path):
    return path.parts[0].removesuffix(".py")


def test_every_import_is_read():
    found = {(str(path), name) for path, _, name in imports()}
    assert ("layers/_prunable_layer.py", f"{NAME}.parametrizations") in found


def test_rooms_import_only_rooms_before_them():
    known = {room_of(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")}
    assert known - {"__init__", "__main__"} == set(ORDER)
    wrong = [
        f"{path} imports {name}"
        for path, room, name in imports()
        if room_of(path) in ORDER
        and ORDER.index(room) > ORDER.index(room_of(path))
    ]
    assert not wrong


def test_the_picture_of_the_rooms_is_that_of_the_package():
    """Drawn by `python benchmarks/pictures.py --only rooms`."""
    picture = Path(__file__).parents[1] / "docs" / "rooms.svg"
    drawn = re.findall(r"<text[^>]*>(\w+)</text>", picture.read_text("utf-8"))
    assert sorted(drawn) == sorted(ORDER)


def test_nothing_private_is_taken_from_another_room():
    wrong = [
        f"{path} imports {name}"
        for path, room, name in imports()
        if room != room_of(path)
        and any(part.startswith("_") for part in name.split(".")[2:])
    ]
    assert not wrong


def names_in_tests():
    """Pairs of a test's file and a dotted name of the package that it imports, or patches."""
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [node.value]
            for name in names:
                if name.startswith(f"{NAME}.") and " " not in name:
                    yield str(file), name


def test_tests_look_into_few_files():
    """A file of a room may be divided or renamed: tests take what the `__init__` has.

    What they replace for a while (a constant, a function that fails) they find in its file.
    """
    inside = set()
    for file, name in names_in_tests():
        parts = name.split(".")
        if any(part.startswith("_") for part in parts[2:]):
            inside.add((file, ".".join(parts[:3])))
    assert len(inside) <= 20, sorted(inside)


def test_no_import_circle_within_a_room():
    graph = {}
    for path, room, name in imports():
        if room == room_of(path) and path.name != "__init__.py":
            module = ".".join([NAME, *path.with_suffix("").parts]).removesuffix(
                ".__init__"
            )
            graph.setdefault(module, set()).add(name)
    # Raises an error that names the circle.
    graphlib.TopologicalSorter(graph).prepare()


def test_weights_are_read_and_written_in_one_place():
    """Arrays may lie on devices of several processes: `_values` gathers and lays them out."""
    # The last has tf_keras' own.
    free = {
        "_values",
        "_keras_internals",
        "tfmot",
    }
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(ROOT.rglob("*.py"))
        if room_of(path.relative_to(ROOT)) not in free
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and node.attr in ("convert_to_numpy", "assign")
    ]
    assert not wrong
