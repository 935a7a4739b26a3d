"""kill -9 at random moments, and what is found afterwards."""

import contextlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError
from tests.faults.counting import Count, ended, kill, started, timed, watched

EPOCHS, ROWS = 8, 256
METHODS = ("fixed", "str", "rigl")


def in_fit(folder: Path, rng: random.Random, share: float) -> Count:
    """Runs that are killed and resumed must end as one that was not."""
    with timed("fit, resumed from its checkpoint") as count:
        after = 0
        for method in METHODS:
            kills = max(2, round(12 * share))
            (folder / method).mkdir(parents=True)
            whole = folder / method / "whole"
            start = time.monotonic()
            assert (
                watched(
                    lambda m=method, w=whole: _fit(m, w, 0.0),
                    folder / "log",
                    600,
                )
                == 0
            )
            took = time.monotonic() - start
            cut = folder / method / "cut"
            backup = cut / "backup" / "latest.json"
            for _ in range(kills):
                child = started(
                    lambda m=method, c=cut: _fit(m, c, 0.02), folder / "log"
                )
                # Most after a checkpoint of this run, some at any time.
                seen, until = _age(backup), time.monotonic() + 60 + 10 * took
                waits = rng.random() < 0.8
                while (
                    waits and _age(backup) == seen and time.monotonic() < until
                ):
                    if ended_already(child):
                        break
                    time.sleep(0.01)
                time.sleep(rng.uniform(0, 0.3))
                if ended_already(child):
                    break
                kill(child)
                count.runs += 1
                after += backup.exists()
            status = watched(
                lambda m=method, c=cut: _fit(m, c, 0.0), folder / "log", 600
            )
            if status is None:
                count.hangs += 1
            elif status != 0:
                count.foreign += 1
            elif not _equal(whole / "final.npz", cut / "final.npz"):
                count.wrong += 1
        count.notes.append(f"{after} of the kills after a checkpoint")
        if 2 * after < count.runs:
            count.wrong += 1  # the suite did not test what it says
    return count


def ended_already(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _fit(method: str, folder: Path, pause: float) -> None:
    keras.utils.set_random_seed(0)
    L = keras.layers
    hidden = [
        L.Dense(48, activation="relu", name="a"),
        L.BatchNormalization(),
        L.Dropout(0.2),
    ]
    dense = keras.Sequential(
        [keras.Input((16,)), *hidden, L.Dense(4, name="b")]
    )
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(ROWS, 16)).astype("float32"),
        rng.normal(size=(ROWS, 4)),
    )
    C, used = kso.callbacks, []
    if method == "str":
        model = kso.parametrize(dense, kso.parametrizations.SoftThreshold())
        used = [
            C.TargetDensity(0.2, kso.schedules.Cubic(0.2, 0, 40, frequency=3))
        ]
    else:
        model = kso.sparsify(dense, 0.3, seed=0)
        if method == "rigl":
            used = [C.RigL((x, y), batch_size=32, frequency=5, end_step=40)]
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    wait = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(pause)
    )
    backup = C.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    options = {
        "batch_size": 32,
        "epochs": EPOCHS,
        "shuffle": False,
        "verbose": 0,
    }
    model.fit(x, y, callbacks=[*used, backup, wait], **options)
    values = [keras.ops.convert_to_numpy(v.value) for v in model.weights]
    values += [
        keras.ops.convert_to_numpy(v.value) for v in model.optimizer.variables
    ]
    np.savez(folder / "aside.npz", *values)
    (folder / "aside.npz").replace(folder / "final.npz")


def _equal(one: Path, other: Path) -> bool:
    with np.load(one) as a, np.load(other) as b:
        return a.files == b.files and all(
            np.array_equal(a[k], b[k]) for k in a.files
        )


def in_files(folder: Path, rng: random.Random, share: float) -> list[Count]:
    """Budgets and tables of reports are whole, old or new; a model file is known to be damaged."""
    names = [f"l{k}/kernel" for k in range(3000)]
    budgets = [
        kso.Budget(dict.fromkeys(names, d), dict.fromkeys(names, 10))
        for d in (0.5, 0.25)
    ]
    layers = [keras.layers.Dense(256), keras.layers.Dense(64)]
    model = kso.sparsify(
        keras.Sequential([keras.Input((64,)), *layers]), 0.2, seed=0
    )
    report = kso.report(model)
    wide = type(report)(report.rows * 1000, report.name)
    want, damaged = (
        [keras.ops.convert_to_numpy(w.value) for w in model.weights],
        [],
    )

    def lines(path: Path) -> None:
        if len(path.read_text().splitlines()) != 1 + len(wide.rows):
            raise BudgetError("half")

    def weights(path: Path) -> None:
        try:
            got = keras.saving.load_model(path).weights
        except Exception:
            damaged.append(path)
        else:
            assert all(
                np.array_equal(w, g.value)
                for w, g in zip(want, got, strict=True)
            )

    counts = []
    jobs: dict[
        str, tuple[str, Callable[[Path], Any], Callable[[Path], Any]]
    ] = {
        "Budget.save": (
            "b.json",
            lambda p: [b.save(p) for b in budgets],
            kso.Budget.load,
        ),
        "report.to_csv": ("r.csv", wide.to_csv, lines),
        "model.save (Keras writes in place)": ("m.keras", model.save, weights),
    }
    for part, (name, write, read) in jobs.items():
        with timed(part) as count:
            path = folder / name
            write(path)
            for _ in range(max(3, round(25 * share))):
                _killed_while(write, path, rng)
                count.runs += 1
                try:
                    read(path)
                except BudgetError:
                    count.lost += 1
                except AssertionError:
                    count.wrong += 1
                except Exception:
                    count.foreign += 1
            for left in folder.glob(f".*{name}.part"):
                left.unlink()
            if read is weights:
                old = f"{len(damaged)} old files gone"
                count.notes.append(
                    f"{old}, by Keras: refused when loaded, none wrong"
                )
        counts.append(count)
    return counts


def _killed_while(
    write: Callable[[Path], Any], path: Path, rng: random.Random
) -> None:
    """Kills a process that writes a file again and again."""

    def work() -> None:
        while True:
            write(path)

    child = started(work, path.with_name("log"))
    time.sleep(0.05 + rng.uniform(0, 0.4))
    kill(child)


def in_export(folder: Path, rng: random.Random, share: float) -> Count:
    """The old file or the new one; no process lives on, and the next export clears up."""
    from keras_sparse_ortho.export import export_litert, load_litert

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    target = folder / "m.tflite"
    with timed("export_litert") as count:
        start = time.monotonic()
        assert (
            watched(
                lambda: export_litert(model, target) and None,
                folder / "log",
                900,
            )
            == 0
        )
        took, old = time.monotonic() - start, target.read_bytes()
        for k in range(max(2, round(12 * share))):
            child = started(
                lambda: export_litert(model, target) and None, folder / "log"
            )
            time.sleep(took * (k + rng.random()) / max(2, round(12 * share)))
            kill(child)
            count.runs += 1
            if target.read_bytes() != old:
                try:
                    load_litert(target)
                    old = target.read_bytes()
                except Exception:
                    count.lost += 1
            until = time.monotonic() + 30
            while (alive := _workers_in(folder)) and time.monotonic() < until:
                time.sleep(0.2)
            if alive:
                count.hangs += 1
        status = ended(
            started(
                lambda: export_litert(model, target) and None, folder / "log"
            ),
            900,
        )
        left = [p.name for p in folder.iterdir() if "-kso-" in p.name]
        if status != 0 or left:
            count.wrong += 1
        count.notes.append(
            "no worker lives on; the next export removes the folders"
        )
    return count


def _workers_in(folder: Path) -> list[int]:
    """The worker processes of this run, whose parents are all gone."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            command = (entry / "cmdline").read_bytes()
            here = (
                str(folder.parent).encode() in (entry / "environ").read_bytes()
            )
            if b"_worker.py" in command and here:
                found.append(int(entry.name))
    return found


def run(folder: Path, rng: random.Random, share: float) -> list[Count]:
    """The kills in what writes files."""
    for name in ("files", "export"):
        (folder / name).mkdir(parents=True)
    # By which the workers of this run are known.
    os.environ["KSO_FAULTS"] = str(folder)
    return [
        *in_files(folder / "files", rng, share),
        in_export(folder / "export", rng, share),
    ]
