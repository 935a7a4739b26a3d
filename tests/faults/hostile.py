"""Crafted files of every kind that is read: they load as what they are, or are refused by name.

Many cases run in one forked process with an audit hook, which is told of every file that is written
and every program that is started, and with a watchdog in the parent.
"""

import contextlib
import copy
import gzip
import json
import os
import random
import resource
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError, LiteRTFileError
from keras_sparse_ortho.export import c_array, load_litert
from tests.faults import crafted, graphs
from tests.faults.counting import Count, ended, started, status_of, timed

SLOW = 10.0  # CPU seconds of one case
LATE = 60.0  # seconds without an answer, on a machine that is busy
GROWTH = 2**30  # bytes
ROOM = 6 * 2**30  # address space of a child, beyond what it has

Judge = Callable[[int, Path], str]
"""Makes and reads a case in a folder: how it ended, "loaded", "refused" or "wrong ..."."""


class Raw(Exception):
    """An error of the package that is none of the promised ones."""


def judged(
    part: str, folder: Path, labels: Sequence[str], judge: Judge, **ready: Any
) -> Count:
    """Judges all cases in children; one that crashes or hangs is counted, and the next goes on."""
    folder.mkdir(parents=True)
    done = folder / "done.txt"
    tally = {"loaded": 0, "refused": 0, "keras": 0}
    with timed(part) as count:
        while count.runs < len(labels):
            first = count.runs
            done.write_text("")

            def work(first: int = first) -> None:
                place = _prepared(folder, **ready)
                with done.open("a", buffering=1) as answers:
                    for k in range(first, len(labels)):
                        answers.write(f"{_answer(k, judge, place)}\n")

            child = started(work, folder / "log")
            status = ended(child, LATE, done)
            for answer in done.read_text().splitlines():
                label = labels[count.runs]
                count.runs += 1
                kind = answer.partition(" ")[0]
                tally[kind] = tally.get(kind, 0) + 1
                count.wrong += kind == "wrong"
                count.foreign += kind == "raw"
                count.hangs += kind == "hang"
                if kind in ("wrong", "raw", "hang", "keras"):
                    print(f"{part}, {label}: {answer}", flush=True)
            if status != 0:
                label = (
                    labels[count.runs]
                    if count.runs < len(labels)
                    else "at the end"
                )
                print(f"{part}, {label}: status {status}", flush=True)
                count.runs += 1
                count.hangs += status is None
                count.crashes += status is not None
        count.notes.append(
            f"{tally['loaded']} loaded, {tally['refused']} refused"
        )
        if tally["keras"]:
            count.notes.append(f"{tally['keras']} ended in raw errors of Keras")
    return count


# --- in the child ---------------------------------------------------------------------------------

_events: list[str] = []


def _prepared(folder: Path, tfmot: bool = False) -> Path:
    """The folder to work in, with a decoy module, and a secret beside it that nobody may read."""
    place = folder / "work"
    for name in (place / "inside", folder / "work" / "outside"):
        name.mkdir(parents=True, exist_ok=True)
    (place / "outside" / "secret.h5").write_bytes(b"\x89HDF\r\n\x1a\n" * 1000)
    (place / "inside" / "evil.py").write_text(
        f"open({str(place / 'MARK')!r}, 'w')\nclass Evil: 0"
    )
    os.chdir(place / "inside")
    sys.path.insert(0, "")
    tempfile.tempdir = str(place / "inside")
    if tfmot:
        import tensorflow_model_optimization  # noqa: F401 - not in the time of the first case
    sys.setrecursionlimit(1000)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (status_of("VmSize") + ROOM, most))
    sys.addaudithook(_hook(str(place)))
    return place


def _hook(place: str) -> Callable[[str, tuple[Any, ...]], None]:
    changes = (
        "os.mkdir",
        "os.rename",
        "os.remove",
        "os.rmdir",
        "os.link",
        "os.symlink",
    )
    programs = (
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "socket.connect",
        "urllib.Request",
    )
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def inside(path: Any) -> bool:
        text = (
            os.path.abspath(os.fsdecode(path))
            if isinstance(path, str | bytes)
            else ""
        )
        return not text or (
            text.startswith(place) and not text.startswith(f"{place}/outside")
        )

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = given
            own = str(path).startswith(("/dev/null", "/proc/self/", "/dev/shm"))
            caches = "__pycache__" in str(path)
            secret = isinstance(path, str) and "/outside/" in path
            if (
                not own
                and not caches
                and (secret or (flags & writes and not inside(path)))
            ):
                _events.append(f"open {path!r}")
            return
        elsewhere = event in changes and not all(
            inside(o) for o in given if isinstance(o, str)
        )
        program = event == "subprocess.Popen" and "_worker.py" not in str(
            given[1]
        )
        if elsewhere or program or event in programs:
            _events.append(f"{event} {given!r:.100}")

    return hook


def _answer(k: int, judge: Judge, place: Path) -> str:
    """How a case ends, in one line."""
    _events.clear()
    Path("/proc/self/clear_refs").write_text("5")
    before, start = status_of("VmRSS"), time.process_time()
    try:
        answer = judge(k, place)
    except Raw as error:
        answer = f"raw {error}"
    except Exception:
        answer = f"wrong suite {traceback.format_exc()[-1500:]!r}"
    took, grown = time.process_time() - start, status_of("VmHWM") - before
    if _events or (place / "MARK").exists():
        answer = f"wrong did {_events[:3]}"
        (place / "MARK").unlink(missing_ok=True)
    elif len(list((place / "outside").iterdir())) != 1:
        answer = "wrong wrote outside"
    elif took > SLOW:
        answer = f"hang {took:.0f} s, {answer}"
    elif grown > GROWTH:
        answer = f"wrong {grown / 2**30:.1f} GiB, {answer}"
    return answer.replace("\n", " ")


def refused(error: Exception, promised: tuple[type[Exception], ...]) -> str:
    """How an error counts: refused, Keras' own, or raw.

    Keras wraps what constructors raise, so the error within is looked at as well.
    """
    inner = error.__context__
    wrapped = (
        _is_from(error, "keras")
        and error.__cause__ is None
        and isinstance(inner, Exception)
    )
    raw = wrapped and not isinstance(inner, ValueError | TypeError)
    if raw and _is_from(inner, "keras_sparse_ortho"):
        raise Raw(_shown(inner)) from error
    if isinstance(error, promised) and str(error):
        return "refused"
    if _is_from(error, "keras_sparse_ortho") or promised != (
        ValueError,
        TypeError,
    ):
        raise Raw(_shown(error)) from error
    return f"keras {_shown(error)}"


def _is_from(error: BaseException, package: str) -> bool:
    """Whether the innermost frame of Keras or of the package is of one of them."""
    owner = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        parts = Path(frame.f_code.co_filename).parts
        owner = next(
            (one for one in ("keras_sparse_ortho", "keras") if one in parts),
            owner,
        )
    return owner == package


def _shown(error: BaseException) -> str:
    trace: list[types.FrameType] = [
        frame for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    where = [
        f"{Path(f.f_code.co_filename).name}:{f.f_code.co_name}:{f.f_lineno}"
        for f in trace
    ]
    return (
        f"{type(error).__name__} {str(error)[:200]!r} in {' '.join(where[-4:])}"
    )


# --- .keras ---------------------------------------------------------------------------------------


def keras_files(
    folder: Path, rng: random.Random, number: int, tfmot: bool
) -> list[Count]:
    """Crafted configurations, and crafted weights."""
    (folder / "sound").mkdir(parents=True)
    found = crafted.specimens(folder / "sound", tfmot)
    place = folder / "configurations" / "work"
    values = crafted.menu(place)
    configs = crafted.config_cases(found, values, number, rng)
    own = [one for one in found if any(True for _ in crafted.nodes(one.config))]
    weights = [
        (rng.choice(own), rng.randrange(2**32)) for _ in range(number // 5)
    ]

    def judge_config(k: int, place: Path) -> str:
        _, specimen, config = configs[k]
        specimen.write(place / "inside" / "m.keras", config)
        return _judge_model(place / "inside" / "m.keras", specimen.weights)

    def judge_weights(k: int, place: Path) -> str:
        specimen, seed = weights[k]
        content = specimen.parts["model.weights.h5"]
        changed = crafted.changed_weights(content, seed, place / "inside")
        specimen.write(place / "inside" / "m.keras", specimen.config, changed)
        return _judge_model(place / "inside" / "m.keras", None)

    counts = []
    for name, labels, judge in (
        ("configurations", [label for label, _, _ in configs], judge_config),
        (
            "weights",
            [f"{specimen.name}, seed {seed}" for specimen, seed in weights],
            judge_weights,
        ),
    ):
        counts.append(
            judged(
                f"hostile: .keras, {name}",
                folder / name,
                labels,
                judge,
                tfmot=tfmot,
            )
        )
    return counts


def _judge_model(path: Path, wanted: list[np.ndarray] | None) -> str:
    promised = (ValueError, TypeError)
    try:
        model = keras.saving.load_model(path)
    except Exception as error:
        return refused(error, promised)
    # What was loaded is whole: its weights are those of the file, it is reported and saved again.
    if wanted is not None and not _close(model.get_weights(), wanted):
        return "wrong weights"
    again = path.with_name("again.keras")
    try:
        kso.report(model)
        model.save(again)  # sets what a mask hides to zero
        other = keras.saving.load_model(again)
    except Exception as error:
        return f"{refused(error, promised)} after it was loaded"
    same = _close(other.get_weights(), model.get_weights())
    return "loaded" if same else "wrong when it was saved again"


def _close(these: list[Any], those: list[Any]) -> bool:
    """Whether values are equal, up to a float type that a configuration may choose."""
    options: dict[str, Any] = {"rtol": 1e-2, "atol": 1e-2, "equal_nan": True}
    return len(these) == len(those) and all(
        one.shape == other.shape
        and np.allclose(
            one.astype("float64"), other.astype("float64"), **options
        )
        for one, other in zip(these, those, strict=True)
    )


# --- .tflite --------------------------------------------------------------------------------------


def litert_files(folder: Path, rng: random.Random, number: int) -> Count:
    """Records and graphs that were changed, each with the right digest again."""
    sound = graphs.absolute()
    values = crafted.menu(folder / "work")
    made = [
        ("a loop without an end", graphs.sealed(graphs.forever())),
        ("the same without a record", graphs.forever()),
    ]
    for size in (2**26, 2**28, 2**30, 2**31 - 1):
        shape = {"name": "x", "shape": [1, size], "dtype": "float32"}
        record = graphs.RECORD | {"inputs": [shape]}
        made.append(
            (f"{size} entries", graphs.sealed(graphs.absolute(size), record))
        )
    for tensors in ([7], [-5], [2**31 - 1], [], [0] * 1000):
        content = graphs.sealed(graphs.with_tensors(tensors, [1]))
        made.append((f"tensors {tensors[:2]}", content))
    while len(made) < max(number, 30):
        if len(made) % 3:
            changed = bytearray(graphs.sealed(sound))
            for _ in range(rng.choice([1, 1, 2, 8])):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            content = bytes(changed)
            with contextlib.suppress(ValueError):
                content = graphs.with_digest(content)
            made.append((f"graph {len(made)}", content))
        else:
            name, within = (
                rng.choice([*values]),
                rng.choice([None, None, "inputs", "outputs"]),
            )
            record = copy.deepcopy(graphs.RECORD)
            held: Any = record if within is None else record[within][0]  # type: ignore[index]
            keys = [*graphs.RECORD, "format"]
            key = rng.choice(
                keys if within is None else ["name", "shape", "dtype"]
            )
            held[key] = values[name]
            made.append(
                (
                    f"record, {within}.{key} = {name}",
                    _sealed_anyhow(sound, record),
                )
            )
    made = rng.sample(made, number)

    def judge(k: int, place: Path) -> str:
        path = place / "inside" / "m.tflite"
        path.write_bytes(made[k][1])
        try:
            load_litert(path, timeout=4)
        except Exception as error:
            return refused(error, (LiteRTFileError,))
        return "loaded"

    return judged(
        "hostile: .tflite", folder, [label for label, _ in made], judge
    )


def _sealed_anyhow(content: bytes, record: dict[str, Any]) -> bytes:
    try:
        return graphs.sealed(content, record)
    except (LiteRTFileError, UnicodeEncodeError):
        return content


# --- budgets and backups --------------------------------------------------------------------------


def budgets(folder: Path, rng: random.Random, number: int) -> Count:
    """Rows with anything in their columns."""
    values = crafted.menu(folder / "work")
    columns = ["weight", "density", "size", "lifted_from", "other"]
    cases = [
        (rng.choice(columns), rng.choice([*values])) for _ in range(number)
    ]

    def judge(k: int, place: Path) -> str:
        column, name = cases[k]
        path = place / "inside" / "b.json"
        row = {
            "weight": "a/kernel",
            "density": 0.5,
            "size": 8,
            "lifted_from": 2,
        }
        rows = [row | {"weight": "b/kernel"}, row | {column: values[name]}]
        path.write_text(json.dumps({"budget": rows if k % 7 else values[name]}))
        try:
            found = kso.Budget.load(path)
        except Exception as error:
            return refused(error, (BudgetError,))
        try:
            again = path.with_name("again.json")
            found.save(again)
            same = kso.Budget.load(again)
            repr(found)
            if len(found.sizes) == len(found):
                assert 0 < found.density <= 1 or found.live == 0
        except Exception as error:
            return refused(error, (BudgetError,))
        return (
            "loaded"
            if same == found and same.sizes == found.sizes
            else "wrong budget"
        )

    labels = [" ".join(case) for case in cases]
    return judged("hostile: budgets", folder, labels, judge)


def backups(folder: Path, rng: random.Random, number: int) -> Count:
    """Records and weights of `BackupAndRestore`."""
    values = crafted.menu(folder / "work")
    keys = ["epoch", "seeds", "generators", "before", "other"]
    cases = [(rng.choice(keys), rng.choice([*values])) for _ in range(number)]

    def model() -> keras.Model:
        dense = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dropout(0.5), L.Dense(8)]
        )
        sparse = kso.sparsify(dense, 0.5, seed=0, storage="compact")
        sparse.compile("sgd", "mse")
        return sparse

    def judge(k: int, place: Path) -> str:
        key, name = cases[k]
        target = place / "inside" / "backup"
        backup = kso.callbacks.BackupAndRestore(target)
        backup.set_model(model())
        backup.on_epoch_end(0)
        record = target / "latest.json"
        known = json.loads(record.read_text())
        weights = target / "epoch_000001.weights.h5"
        if k % 4 == 0:
            weights.write_bytes(
                crafted.changed_weights(weights.read_bytes(), k, place)
            )
        elif k % 4 == 1:
            record.write_text(json.dumps(values[name]))
        elif k % 4 == 2:
            known[key] = values[name]
            record.write_text(json.dumps(known))
        else:
            before = copy.deepcopy(known)
            before[key] = values[name]
            record.write_text(json.dumps(known | {"before": before}))
        other = kso.callbacks.BackupAndRestore(target)
        other.set_model(model())
        try:
            other.on_train_begin()
        except Exception as error:
            return refused(error, (ValueError,))
        kso.report(other.model)
        return "loaded"

    labels = [
        f"{'weights' if k % 4 == 0 else case}" for k, case in enumerate(cases)
    ]
    return judged("hostile: backups", folder, labels, judge)


COMMANDS = (
    "\x1b]0;title\x07",
    "\x1b[2J",
    "\n#include <x>\n",
    "\r",
    "\x9b31m",
    "\u202e",
    "\x00",
)


def names(folder: Path, rng: random.Random, number: int) -> Count:
    """Names with commands, in files of both kinds: none reaches a report, an error or C code."""
    places = ("layer", "model", "tensor", "output")
    cases = [
        (rng.choice(places), rng.choice(COMMANDS), k) for k in range(number)
    ]

    def shown(place: str, name: str, folder: Path) -> str:
        if place in ("layer", "model"):
            layer = L.Dense(4, name=name if place == "layer" else "a")
            model = keras.Sequential([keras.Input((4,)), layer], name=name)
            text = f"{kso.report(model)}{kso.prunable_weights(model)}"
            try:
                kso.prune(model, 0.5, include="none of these")
            except ValueError as error:
                text += str(error)
            return text
        path = folder / "inside" / "m.tflite"
        content = graphs.absolute(name=name)
        record = graphs.RECORD | {"outputs": [{"name": name}]}
        path.write_bytes(
            graphs.sealed(content, record) if place == "output" else content
        )
        try:
            c_array(path, path.with_name("m.h"))
            text = path.with_name("m.h").read_text(encoding="utf-8")
            if "\n#include" in text.replace("#include <stdalign.h>", ""):
                return "\x1b"
            return text + repr(load_litert(path))
        except LiteRTFileError as error:
            return str(error)

    def judge(k: int, place: Path) -> str:
        where, command, _ = cases[k]
        try:
            text = shown(where, f"a{command}b", place)
        except Exception as error:
            return refused(error, ())
        printed = text.replace("\n", "").replace("\t", "")
        return "loaded" if printed.isprintable() else "wrong text"

    labels = [f"{where} {command!r}" for where, command, _ in cases]
    return judged("hostile: names", folder, labels, judge)


def packed(folder: Path, rng: random.Random, number: int) -> Count:
    """A few megabytes that stand for gigabytes: refused before they take the memory."""
    zeros = gzip.compress(bytes(1 << 24))
    sizes = [rng.choice((1 << 29, 3 << 29, 3 << 30)) for _ in range(number)]

    def judge(k: int, place: Path) -> str:
        path = place / "inside" / "m.tflite.gz"
        # A file of several members is what all of them hold.
        path.write_bytes(
            gzip.compress(graphs.absolute()) + zeros * (sizes[k] >> 24)
        )
        try:
            load_litert(path)
        except Exception as error:
            return refused(error, (LiteRTFileError,))
        return "wrong: loaded"

    return judged(
        "hostile: packed", folder, [f"{size} bytes" for size in sizes], judge
    )


L = keras.layers


def run(folder: Path, rng: random.Random, share: float) -> list[Count]:
    """All of them."""

    def of(number: int) -> int:
        return max(5, round(number * share))

    return [
        *keras_files(folder / "keras", rng, of(1400), tfmot=share >= 0.5),
        litert_files(folder / "litert", rng, of(120)),
        budgets(folder / "budgets", rng, of(300)),
        backups(folder / "backups", rng, of(150)),
        names(folder / "names", rng, of(100)),
        packed(folder / "packed", rng, of(40)),
    ]
