"""Jobs of two processes of which one is killed, and that are started again; and jobs left alone.

`killed_jobs.py RECIPE FOLDER METHOD ...` trains as a recipe of `examples/scale` does, with Adam and
a `BackupAndRestore` in each process. For each method there are two jobs: one that nobody disturbs,
and one of which a process is killed (SIGKILL) in the midst of an epoch, and that is run again with
the same arguments. Every process is one of its own, forked before Keras computes anything. Prints a
line of JSON for each method: how processes have ended, which epochs they have begun, how many
entries had moved when one was killed, and which variables differ in the end.
"""

import importlib
import json
import os
import pathlib
import signal
import sys
import time
import traceback

import keras
import numpy as np

import keras_sparse_ortho as kso

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "scale"))
import recipe

KILLED_AT = 2, 5  # epoch and batch: masks move before the steps 4, 8, 12, 16 and, in it, 20
SECONDS = 300  # for a process that has lost the other one, or that trains
ALONE = "str alone"  # learnt thresholds that nobody steers


def main(name, folder, *methods):
    module = importlib.import_module(name)
    made = recipe.sparse_model

    def sparse_model(method):
        model = made("str" if method == ALONE else method)
        model.compile(keras.optimizers.Adam(0.01), model.loss, jit_compile=model.jit_compile)
        return model

    recipe.sparse_model = sparse_model
    for number, method in enumerate(methods):
        at, begun = pathlib.Path(folder) / method, time.monotonic()
        victim = number % 2  # the one that coordinates the others, and the other one, by turns
        told = {"method": method, "victim": victim}
        told["whole"] = job(module, method, at / "whole", None)
        told["killed"] = job(module, method, at / "killed", victim)
        told["again"] = job(module, method, at / "killed", None)
        for part in ("epochs", "moved"):
            notes = (at / "killed" / f"{rank}.{part}" for rank in range(2))
            told[part] = [note.read_text() if note.exists() else "" for note in notes]
        if told["whole"] == told["again"] == [0, 0]:
            told |= compared(at)
        print(json.dumps({**told, "seconds": round(time.monotonic() - begun)}), flush=True)


def job(module, method, folder, victim):
    """The exit statuses of both processes; `None` for one that hung."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = recipe.free_ports(2)
    places = [recipe.Place("two processes", rank, 2, ports) for rank in range(2)]
    children = [forked(module, method, folder, place, victim) for place in places]
    end, ended = time.monotonic() + SECONDS, {}
    while len(ended) < 2 and time.monotonic() < end:
        for child in set(children) - set(ended):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                ended[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    for child in set(children) - set(ended):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return [ended.get(child) for child in children]


def forked(module, method, folder, place, victim):
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with (folder / f"{place.rank}.log").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        run(module, method, folder, place, victim)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(module, method, folder, place, victim):
    made = recipe.callbacks

    def callbacks(*arguments):
        used = [kso.callbacks.CheckWorkers()] if method == ALONE else made(*arguments)
        watch = Watch(folder, place.rank, place.rank == victim)
        backup = keras.callbacks.BackupAndRestore(str(folder / f"backup_{place.rank}"))
        return [*used, watch, backup]

    recipe.callbacks = callbacks
    module.begin(place)
    model = module.train(method, place)
    variables = [*model.variables, *model.optimizer.variables]
    found = {f"{k} {v.path}": keras.ops.convert_to_numpy(v) for k, v in enumerate(variables)}
    names = {name.replace("/", "|"): value for name, value in found.items()}
    np.savez(folder / f"{place.rank}.npz", **names)


class Watch(keras.callbacks.Callback):
    """Notes epochs that begin; and kills the process, if it is to be killed."""

    def __init__(self, folder, rank, kills):
        super().__init__()
        self.folder, self.rank, self.kills = folder, rank, kills

    def on_train_begin(self, logs=None):
        self.first = self.masks()

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        with (self.folder / f"{self.rank}.epochs").open("a") as notes:
            notes.write(str(epoch))
        if self.kills and epoch == KILLED_AT[0]:
            moved = [(a != b).sum() for a, b in zip(self.first, self.masks(), strict=True)]
            (self.folder / f"{self.rank}.moved").write_text(str(sum(moved)))

    def on_train_batch_end(self, batch, logs=None):
        if self.kills and (self.epoch, batch) == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    def masks(self):
        state = recipe.state(self.model)
        return [state[name] for name in state if name.startswith("mask")]


def compared(folder):
    differing, count = set(), 0
    for rank in range(2):
        one, other = (np.load(folder / job / f"{rank}.npz") for job in ("whole", "killed"))
        assert one.files == other.files
        count += len(one.files)
        differing |= {k for k in one.files if one[k].tobytes() != other[k].tobytes()}
    return {"variables": count, "differing": sorted(differing)}


if __name__ == "__main__":
    main(*sys.argv[1:])
