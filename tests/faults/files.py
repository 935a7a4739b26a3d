"""Mutated files of every kind that is read, and crafted configurations."""

import contextlib
import gzip
import json
import random
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho.cli._files import InputFileError, read_keras, read_rows
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.export import LiteRTFileError, export_litert, load_litert
from tests.faults.counting import Count, ended, started, timed

TOKENS = [b"NaN", b"Infinity", b"1e400", b"-1", b"0", b"null", b"[]", b"{}", b'"', b",", b"\n"]
TOKENS += [b"\r", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"9" * 5000, b"[" * 2000, b"1e-320"]
TOKENS += [b"0x10", b"1_000", b"\xe2\x88\x9e", b"0,5", b"TFL3", b"\x28\xb5\x2f\xfd", b"PK\x03\x04"]
SLOW = 20.0


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
    part: str,
    path: Path,
    read: Callable[[Path], Any],
    promised: tuple[type[Exception], ...],
    is_right: Callable[[Any, bytes], bool],
    number: int,
    rng: random.Random,
) -> Count:
    """Reads mutants in children, so that a crash or a hang is counted and not suffered."""
    content = path.read_bytes()
    place = path.parent / "mutants"
    place.mkdir(exist_ok=True)
    with timed(part) as count:
        seeds = [rng.randrange(2**32) for _ in range(number)]
        done = path.parent / "done.txt"
        while count.runs < number:
            done.write_text("")

            def work(left: list[int] = seeds[count.runs :]) -> None:
                with done.open("a", buffering=1) as answers:
                    for seed in left:
                        answers.write(f"{_answer(seed)}\n")

            def _answer(seed: int) -> str:
                changed = mutated(content, random.Random(seed))
                file = place / path.name
                file.write_bytes(changed)
                start = time.monotonic()
                try:
                    got = read(file)
                except promised:
                    answer = "refused"
                except Exception as error:
                    (place / f"foreign-{seed}{path.suffix}").write_bytes(changed)
                    answer = f"foreign {type(error).__name__}: {str(error)[:100]!r}"
                else:
                    right = changed == content or is_right(got, changed)
                    answer = "loaded" if right else f"wrong {seed}"
                return answer if time.monotonic() - start < SLOW else "hang"

            child = started(work, path.parent / "log")
            before, still = 0, time.monotonic()
            status: int | None = None
            while status is None and time.monotonic() - still < 3 * SLOW:
                status = ended_soon(child)
                now = done.stat().st_size
                if now != before:
                    before, still = now, time.monotonic()
            if status is None:
                ended(child, 0)
            answers = done.read_text().splitlines()
            for answer in answers:
                count.runs += 1
                count.wrong += answer.startswith("wrong")
                count.foreign += answer.startswith("foreign")
                count.hangs += answer == "hang"
                if answer.startswith(("wrong", "foreign")) and len(count.notes) < 5:
                    count.notes.append(answer)
            if status != 0:  # the one that it was at
                count.runs += 1
                count.hangs += status is None
                count.crashes += status is not None
        return count


def ended_soon(child: int) -> int | None:
    """The status of a child, if it ends within a second."""
    import os

    for _ in range(100):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return None


def damaged(folder: Path, rng: random.Random, share: float) -> list[Count]:
    """A thousand mutants of every kind of file."""
    number = max(20, round(1000 * share))
    densities = {f"layer_{k}/kernel": (k + 1) / 12 for k in range(10)}
    budget = kso.Budget(densities, {p: 100 * (k + 1) for k, p in enumerate(densities)})
    budget.save(folder / "b.csv")
    budget.save(folder / "b.json")
    keras.utils.set_random_seed(0)
    dense = keras.Sequential([keras.Input((16,), name="x"), keras.layers.Dense(8, name="d")])
    model = kso.sparsify(dense, 0.5, seed=0)
    model.save(folder / "m.keras")
    report = export_litert(model, folder / "m.tflite")
    content = (folder / "m.tflite").read_bytes()
    (folder / "g.tflite.gz").write_bytes(gzip.compress(content))
    rows = np.random.default_rng(0).normal(size=(5, 16)).astype("float32")
    np.save(folder / "rows.npy", rows)
    np.savez(folder / "rows.npz", x=rows)
    import zstandard

    (folder / "z.tflite.zst").write_bytes(zstandard.ZstdCompressor().compress(content))
    wanted = load_litert(folder / "m.tflite").predict(rows)
    kernel = keras.ops.convert_to_numpy(model.weights[0].value)

    def budget_is_right(found: Any, changed: bytes) -> bool:
        # A digit that was changed is another budget; a part of a file must not pass.
        valid = all(0 < density <= 1 for density in found.values())
        whole = not budget_file.startswith(changed)
        return valid and (whole or len(found) == len(budget))

    budget_file = b""
    counts = []
    for name in ("b.csv", "b.json"):
        budget_file = (folder / name).read_bytes()
        promised = (BudgetError,)
        counts.append(
            read_mutants(
                name, folder / name, kso.Budget.load, promised, budget_is_right, number, rng
            )
        )
    for name in ("m.tflite", "g.tflite.gz", "z.tflite.zst"):
        counts.append(
            read_mutants(
                name,
                folder / name,
                load_litert,
                (LiteRTFileError,),
                # Ours, whole and right; or another's file, which says so.
                lambda f, _: f.route is None or np.allclose(f.predict(rows), wanted, atol=1e-5),
                number,
                rng,
            )
        )
    counts.append(
        read_mutants(
            "m.keras",
            folder / "m.keras",
            lambda path: read_keras(str(path)),
            (InputFileError,),
            lambda m, _: np.array_equal(keras.ops.convert_to_numpy(m.weights[0].value), kernel),
            number,
            rng,
        )
    )
    for name in ("rows.npy", "rows.npz"):
        counts.append(
            read_mutants(
                name,
                folder / name,
                lambda path: read_rows(str(path)),
                (InputFileError,),
                lambda *_: True,  # rows have no digest
                number,
                rng,
            )
        )
    assert report.bytes
    return counts


EVIL = [
    {"module": "os", "class_name": "system", "config": "touch MARK"},
    {"module": "subprocess", "class_name": "Popen", "config": {"args": ["touch", "MARK"]}},
    {"module": "builtins", "class_name": "eval", "config": {"source": "open('MARK','w')"}},
    {"module": "keras.layers", "class_name": "Lambda", "config": {"function": "__import__('os')"}},
    {"class_name": "__lambda__", "config": {"value": "open('MARK','w')"}},
    {"class_name": "function", "config": "system", "module": "os", "registered_name": "system"},
    {"module": "evil", "class_name": "Evil", "config": {}},
    [], {}, None, 3, "x", [[[]]], {"class_name": None}, {"config": {}}, float("nan"), -1, [None],
]  # fmt: skip


def crafted(folder: Path, rng: random.Random, share: float) -> Count:
    """Configurations with other things in the place of parts of ours: no code runs."""
    mark = folder / "MARK"
    (folder / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: pass\n")
    evil = json.loads(json.dumps(EVIL).replace("MARK", str(mark)))
    models = []
    P, layers = kso.parametrizations, keras.layers

    def dense() -> keras.Model:
        return keras.Sequential([keras.Input((8,)), layers.Dense(8, name="d"), layers.Dense(4)])

    models = [
        kso.sparsify(dense(), 0.5, seed=0),
        kso.sparsify(dense(), 0.5, seed=0, storage="compact"),
        kso.parametrize(dense(), P.MagnitudeMask(kso.schedules.Cubic(0.5, 0, 8))),
        kso.parametrize(dense(), P.SoftThreshold()),
    ]
    with timed("crafted configurations") as count:
        number = max(20, round(200 * share))
        for k in range(number):
            path = folder / "m.keras"
            models[k % len(models)].save(path)
            with zipfile.ZipFile(path) as archive:
                parts = {name: archive.read(name) for name in archive.namelist()}
            config = json.loads(parts["config.json"])
            places = [
                (holder, key)
                for holder, key in _places(config)
                if "PrunableLayer" in json.dumps(holder) or rng.random() < 0.5
            ]
            holder, key = rng.choice(places)
            if rng.random() < 0.25 and isinstance(holder, dict):
                del holder[key]
            else:
                holder[key] = rng.choice(evil)
            parts["config.json"] = json.dumps(config).encode()
            with zipfile.ZipFile(path, "w") as archive:
                for name, content in parts.items():
                    archive.writestr(name, content)

            def work(path: Path = path) -> None:
                import os

                os.chdir(folder)
                try:
                    model = read_keras(str(path))
                except InputFileError:
                    return
                with contextlib.suppress(ValueError):  # of a model that cannot compute
                    kso.report(model)

            child = started(work, folder / "log")
            count.take(ended(child, 60))
            if mark.exists():
                count.wrong += 1
                mark.unlink()
    return count


def _places(node: Any) -> list[tuple[Any, Any]]:
    found = []
    if isinstance(node, dict):
        found += [(node, key) for key in node]
    elif isinstance(node, list):
        found += [(node, k) for k in range(len(node))]
    for child in node.values() if isinstance(node, dict) else node:
        if isinstance(child, dict | list):
            found += _places(child)
    return found


def run(folder: Path, rng: random.Random, share: float) -> list[Count]:
    """All of them."""
    for name in ("damaged", "crafted"):
        (folder / name).mkdir(parents=True)
    return [*damaged(folder / "damaged", rng, share), crafted(folder / "crafted", rng, share)]
