"""Jobs of two processes of which one is killed, and that are started again; and jobs left alone.

`killed_jobs.py FOLDER CASE ...` trains as a recipe of `examples/scale` does, with Adam and a
`BackupAndRestore` in each process. A case is `METHOD:BACKUP:MOMENT`: Keras' callback or ours
(`keras`, `ours`), and when a process is killed (SIGKILL): in the midst of an epoch (`training`), or
half way through an epoch's backup, when the other one has made its own (`saving`). For each there
are two jobs: one that nobody disturbs, and one that is killed and run again with the same
arguments. Every process is one of its own, forked before Keras computes anything. Prints a line of
JSON for each case: how processes have ended, which epochs they have begun, how many entries had
moved when one was killed, and which variables differ in the end.
"""

import contextlib
import functools
import json
import os
import pathlib
import signal
import sys
import time

import keras
import numpy as np
import recipe

import keras_sparse_ortho as kso
from tests.distributed.recipes import recipe_of_two
from tests.faults.counting import ended, started

# Epoch and batch: masks move before the steps 4, 8, 12, 16 and, in it, 20.
KILLED_AT = (
    2,
    5,
)
SECONDS = 300  # for a process that has lost the other one, or that trains
ALONE = "str alone"  # learnt thresholds that nobody steers


def main(folder, *cases):
    module = recipe_of_two()
    made = recipe.sparse_model

    def sparse_model(method):
        model = made("str" if method == ALONE else method)
        model.compile(
            keras.optimizers.Adam(0.01),
            model.loss,
            jit_compile=model.jit_compile,
        )
        return model

    recipe.sparse_model = sparse_model
    for number, case in enumerate(cases):
        at, begun = pathlib.Path(folder) / case, time.monotonic()
        # The one that coordinates the others, and the other one, by turns.
        victim = number % 2
        told = {"case": case, "victim": victim}
        told["whole"] = job(module, case, at / "whole", None)
        told["killed"] = job(module, case, at / "killed", victim)
        told["again"] = job(module, case, at / "killed", None)
        for part in ("epochs", "moved"):
            notes = (at / "killed" / f"{rank}.{part}" for rank in range(2))
            told[part] = [
                note.read_text() if note.exists() else "" for note in notes
            ]
        if told["whole"] == told["again"] == [0, 0]:
            told |= compared(at)
        print(
            json.dumps({**told, "seconds": round(time.monotonic() - begun)}),
            flush=True,
        )


def job(module, case, folder, victim):
    """The exit statuses of both processes; `None` for one that hung."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = recipe.free_ports(2)
    places = [
        recipe.Place("two processes", rank, 2, ports) for rank in range(2)
    ]
    until = time.monotonic() + SECONDS
    children = [
        started(
            functools.partial(run, module, case, folder, place, victim),
            folder / f"{place.rank}.log",
        )
        for place in places
    ]
    # A moment for each, whatever the other one has taken: it may have ended long ago.
    return [
        ended(child, max(1, until - time.monotonic())) for child in children
    ]


def run(module, case, folder, place, victim):
    method, kind, moment = case.split(":")
    made, own = recipe.callbacks, folder / f"backup_{place.rank}"

    def callbacks(*arguments):
        used = [] if method == ALONE else made(*arguments)
        if kind == "keras":
            backup = keras.callbacks.BackupAndRestore(str(own))
        else:
            # Of both processes.
            backup = kso.callbacks.BackupAndRestore(folder / "backup")
        watch = Watch(
            folder, place.rank, moment if place.rank == victim else None
        )
        return [*used, watch, backup]

    recipe.callbacks = callbacks
    module.begin(place)
    model = module.train(method, place)
    variables = [*model.variables, *model.optimizer.variables]
    found = {
        f"{k} {v.path}": keras.ops.convert_to_numpy(v)
        for k, v in enumerate(variables)
    }
    names = {name.replace("/", "|"): value for name, value in found.items()}
    np.savez(folder / f"{place.rank}.npz", **names)


class Watch(keras.callbacks.Callback):
    """Notes epochs that begin; and kills the process, if it is to be killed."""

    def __init__(self, folder, rank, moment):
        super().__init__()
        self.folder, self.rank, self.moment = folder, rank, moment

    def on_train_begin(self, logs=None):
        self.first = self.masks()

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        with (self.folder / f"{self.rank}.epochs").open("a") as notes:
            notes.write(str(epoch))
        if self.moment and epoch == KILLED_AT[0]:
            moved = [
                (a != b).sum()
                for a, b in zip(self.first, self.masks(), strict=True)
            ]
            (self.folder / f"{self.rank}.moved").write_text(str(sum(moved)))
            if self.moment == "saving":
                vars(self.model)["save_weights"] = self.die_half_way

    def on_train_batch_end(self, batch, logs=None):
        if self.moment == "training" and (self.epoch, batch) == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    def die_half_way(self, filepath, **options):
        """Saves, as processes do that together, and dies where half of the file is written."""
        type(self.model).save_weights(self.model, filepath, **options)
        while self.epoch + 1 not in self.saved_by(1 - self.rank):
            time.sleep(0.05)
        os.truncate(filepath, os.path.getsize(filepath) // 2)
        os.kill(os.getpid(), signal.SIGKILL)

    def saved_by(self, rank):
        """The epoch of the other process' backup, of either kind, if it can be read just now."""
        found = []
        for name in (
            f"backup_{rank}/training_metadata.json",
            f"backup/worker_{rank}/latest.json",
        ):
            with contextlib.suppress(OSError, ValueError):
                found.append(
                    json.loads((self.folder / name).read_text())["epoch"]
                )
        return found

    def masks(self):
        state = recipe.state(self.model)
        return [state[name] for name in state if name.startswith("mask")]


def compared(folder):
    differing, count = set(), 0
    for rank in range(2):
        one, other = (
            np.load(folder / job / f"{rank}.npz") for job in ("whole", "killed")
        )
        assert one.files == other.files
        count += len(one.files)
        differing |= {
            k for k in one.files if one[k].tobytes() != other[k].tobytes()
        }
    return {"variables": count, "differing": sorted(differing)}


if __name__ == "__main__":
    main(*sys.argv[1:])
