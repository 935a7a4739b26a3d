"""Mutated files of every kind that is read, and crafted configurations."""

import contextlib
import copy
import gzip
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho.cli import InputFileError, read_keras, read_rows
from keras_sparse_ortho.errors import BudgetError, LiteRTFileError
from keras_sparse_ortho.export import export_litert, load_litert
from tests.faults.counting import Count
from tests.faults.crafted import menu, specimens
from tests.faults.hostile import judged, refused

TOKENS = [
    b"NaN",
    b"Infinity",
    b"1e400",
    b"-1",
    b"0",
    b"null",
    b"[]",
    b"{}",
    b'"',
    b",",
    b"\n",
]
TOKENS += [
    b"\r",
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"9" * 5000,
    b"[" * 2000,
    b"1e-320",
]
TOKENS += [
    b"0x10",
    b"1_000",
    b"\xe2\x88\x9e",
    b"0,5",
    b"TFL3",
    b"\x28\xb5\x2f\xfd",
    b"PK\x03\x04",
]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, put in, taken out, cut off or repeated."""
    found = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 3, 8])):
        kind, at = rng.randrange(6), rng.randrange(len(found) + 1)
        if kind == 0 and found:
            found[at % len(found)] = rng.randrange(256)
        elif kind == 1:
            found[at:at] = rng.choice(TOKENS)
        elif kind == 2:
            del found[at : at + rng.randrange(1, 60)]
        elif kind == 3:
            del found[at:]
        elif kind == 4:
            other = rng.randrange(len(found) + 1)
            found[at:at] = found[other : other + 80]
        else:
            found[at : at + rng.randrange(1, 10)] = rng.choice(TOKENS)
    return bytes(found)


def read_mutants(
    name: str,
    folder: Path,
    read: Callable[[Path], Any],
    promised: type[Exception],
    is_right: Callable[[Any, bytes], bool],
    number: int,
    rng: random.Random,
) -> Count:
    """Reads mutants of a file: each is refused as promised, or what was read is right."""
    content = (folder / name).read_bytes()
    seeds = [rng.randrange(2**32) for _ in range(number)]

    def judge(k: int, place: Path) -> str:
        changed = mutated(content, random.Random(seeds[k]))
        file = place / "inside" / name
        file.write_bytes(changed)
        try:
            got = read(file)
        except Exception as error:
            return refused(error, (promised,))
        return (
            "loaded"
            if changed == content or is_right(got, changed)
            else "wrong content"
        )

    return judged(
        name,
        folder / f"mutants of {name}",
        [f"seed {seed}" for seed in seeds],
        judge,
    )


def damaged(folder: Path, rng: random.Random, share: float) -> list[Count]:
    """A thousand mutants of every kind of file."""
    number = max(20, round(1000 * share))
    densities = {f"layer_{k}/kernel": (k + 1) / 12 for k in range(10)}
    budget = kso.Budget(
        densities, {p: 100 * (k + 1) for k, p in enumerate(densities)}
    )
    budget.save(folder / "b.json")
    keras.utils.set_random_seed(0)
    dense = keras.Sequential(
        [keras.Input((16,), name="x"), keras.layers.Dense(8, name="d")]
    )
    model = kso.sparsify(dense, 0.5, seed=0)
    model.save(folder / "m.keras")
    report = export_litert(model, folder / "m.tflite")
    content = (folder / "m.tflite").read_bytes()
    (folder / "g.tflite.gz").write_bytes(gzip.compress(content))
    rows = np.random.default_rng(0).normal(size=(5, 16)).astype("float32")
    np.save(folder / "rows.npy", rows)
    np.savez(folder / "rows.npz", x=rows)
    wanted = load_litert(folder / "m.tflite").predict(rows)
    kernel = keras.ops.convert_to_numpy(model.weights[0].value)

    def budget_is_right(found: Any, changed: bytes) -> bool:
        # A digit that was changed is another budget; a part of a file must not pass.
        valid = all(0 < density <= 1 for density in found.values())
        whole = not budget_file.startswith(changed)
        return valid and (whole or len(found) == len(budget))

    def same_outputs(found: Any, _: bytes) -> bool:
        # Ours, whole and right; or another's file, which says so.
        return found.route is None or np.allclose(
            found.predict(rows), wanted, atol=1e-5
        )

    def same_kernel(found: Any, _: bytes) -> bool:
        return np.array_equal(
            keras.ops.convert_to_numpy(found.weights[0].value), kernel
        )

    def any_rows(*_: Any) -> bool:  # they have no digest
        return True

    budget_file = (folder / "b.json").read_bytes()
    assert report.bytes

    jobs = {
        "b.json": (kso.Budget.load, BudgetError, budget_is_right),
        "m.tflite": (load_litert, LiteRTFileError, same_outputs),
        "g.tflite.gz": (load_litert, LiteRTFileError, same_outputs),
        "m.keras": (
            lambda path: read_keras(str(path)),
            InputFileError,
            same_kernel,
        ),
        "rows.npy": (
            lambda path: read_rows(str(path)),
            InputFileError,
            any_rows,
        ),
        "rows.npz": (
            lambda path: read_rows(str(path)),
            InputFileError,
            any_rows,
        ),
    }
    return [
        read_mutants(name, folder, *how, number, rng)
        for name, how in jobs.items()
    ]


def elsewhere(folder: Path, rng: random.Random, share: float) -> Count:
    """Configurations with other things in any of their places, those of Keras' own layers, too."""
    values = menu(folder / "work")
    folder.with_name("sound").mkdir()
    found = specimens(folder.with_name("sound"), with_tfmot=False)
    number = max(20, int(200 * share))
    cases = [
        (rng.randrange(2**32), rng.choice([*values])) for _ in range(number)
    ]

    def judge(k: int, place: Path) -> str:
        path, (seed, name), specimen = (
            place / "inside" / "m.keras",
            cases[k],
            found[k % len(found)],
        )
        config, own = copy.deepcopy(specimen.config), random.Random(seed)
        holder, key = own.choice([*_places(config)])
        if own.random() < 0.25 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = values[name]
        specimen.write(path, config)
        try:
            model = read_keras(str(path))
        except Exception as error:
            return refused(error, (InputFileError,))
        with contextlib.suppress(ValueError):  # of a model that cannot compute
            kso.report(model)
        return "loaded"

    return judged(
        "crafted configurations", folder, [name for _, name in cases], judge
    )


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    for key, child in (
        node.items() if isinstance(node, dict) else enumerate(node)
    ):
        yield node, key
        if isinstance(child, dict | list):
            yield from _places(child)


def run(folder: Path, rng: random.Random, share: float) -> list[Count]:
    """All of them."""
    (folder / "damaged").mkdir(parents=True)
    return [
        *damaged(folder / "damaged", rng, share),
        elsewhere(folder / "crafted", rng, share),
    ]
