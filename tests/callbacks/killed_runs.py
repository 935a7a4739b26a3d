"""A run that is killed again and again, and one that is not.

`python killed_runs.py METHOD MORE DIR`, with `more` for random layers. Every run is a process of
its own, forked before Keras computes anything; it kills itself (SIGKILL) at a moment that it was
given, within epochs, between them and while files are written. Prints the number of kills and the
names of variables that differ in the end.
"""

import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import _backup_and_restore as ours

L = keras.layers
STEPS, BATCH, EPOCHS = 5, 4, 4
DENSITY = 0.3
# Before there is a backup, within an epoch, between two, and when all epochs are done;
MOMENTS = [("step", 0, 2), ("step", 2, STEPS - 1), ("between", 3), ("end", 3)]
# and while the backup is written, which Keras' own does not survive.
WHILE_WRITING = [("weights", 1), ("record", 2)]


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH, 6, 6, 1)).astype("float32")
    return x, rng.integers(0, 3, len(x))


def network(method, more):
    keras.utils.set_random_seed(0)
    augmented = (
        [L.RandomFlip(), L.RandomTranslation(0.2, 0.2), L.GaussianNoise(0.1)] if more else []
    )
    dropout = [L.Dropout(0.3), L.SpatialDropout2D(0.2)] if more else []
    layers = [L.Conv2D(4, 3, name="conv"), L.BatchNormalization(), L.ReLU(), *dropout[1:]]
    head = [L.Flatten(), *dropout[:1], L.Dense(3, name="head")]
    dense = keras.Sequential([keras.Input((6, 6, 1)), *augmented, *layers, *head])
    if method in ("FixedMask", "SET", "RigL"):
        model = kso.sparsify(dense, DENSITY, seed=0)
    else:
        ramp = kso.schedules.Cubic(DENSITY, frequency=2)
        straight = kso.parametrizations.StraightThroughTopK
        model = kso.parametrize(
            dense,
            {
                "STR": lambda: kso.SoftThreshold(),
                "GMP": lambda: kso.MagnitudeMask(ramp),
                "DNW": lambda: straight(ramp),
                "DNW constant": lambda: straight(DENSITY, frequency=3),
            }[method](),
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=keras.backend.backend() == "jax")
    return model


def callbacks(method):
    moving = {"frequency": 3, "fraction": 0.8}
    return {
        "FixedMask": lambda: [],
        "STR": lambda: [kso.callbacks.TargetDensity(DENSITY, frequency=2)],
        "GMP": lambda: [kso.callbacks.UpdateMasks()],
        "DNW": lambda: [kso.callbacks.UpdateMasks()],
        "DNW constant": lambda: [kso.callbacks.UpdateMasks()],
        "SET": lambda: [kso.callbacks.SET(**moving)],
        "RigL": lambda: [kso.callbacks.RigL(data(), 8, **moving)],
    }[method]()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Kill(keras.callbacks.Callback):
    """Kills the process at a moment; for files, while `BackupAndRestore` writes them."""

    def __init__(self, moment):
        super().__init__()
        self.moment, self.epoch = moment, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        if self.moment == ("between", epoch):
            die()
        if self.moment == ("weights", epoch):
            save = self.model.save_weights

            def save_a_half(path, **options):
                save(path, **options)
                os.truncate(path, os.path.getsize(path) // 2)
                die()

            vars(self.model)["save_weights"] = save_a_half
        if self.moment == ("record", epoch):

            def write_a_part(record, stream):
                stream.write(json.dumps(record)[:9])
                stream.flush()
                die()

            ours.json.dump = write_a_part

    def on_train_batch_end(self, batch, logs=None):
        if self.moment == ("step", self.epoch, batch):
            die()

    def on_train_end(self, logs=None):
        if self.moment[0] == "end":
            die()


def state(model):
    found = [*model.variables, *model.optimizer.variables]
    return {f"{k} {v.path}": keras.ops.convert_to_numpy(v) for k, v in enumerate(found)}


def run(method, more, folder, moment):
    backup = (ours.BackupAndRestore if more else keras.callbacks.BackupAndRestore)(
        folder / "backup"
    )
    model = network(method, more)
    x, y = data()
    # Kept until the last: a callback may kill before the backup is deleted, but not after.
    around = [*callbacks(method), Kill(moment), backup]
    model.fit(x, y, BATCH, EPOCHS, verbose=0, shuffle=False, callbacks=around)
    np.savez(folder / "final.npz", **{k.replace("/", "|"): v for k, v in state(model).items()})


def forked(*arguments):
    """Whether the run was killed."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(*arguments)
            code = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return True
    assert os.WEXITSTATUS(status) == 0, "a run has failed"
    return False


def main(method, more, folder):
    more, folder = more == "more", pathlib.Path(folder)
    finals = []
    moments = MOMENTS + (WHILE_WRITING if more else [])
    # Later kills strike runs that were resumed: in the order in which a run comes to them.
    order = ("between", "step", "weights", "record", "end")
    moments.sort(key=lambda moment: (moment[1], order.index(moment[0])))
    for name, planned in (("whole", []), ("killed", moments)):
        at = folder / name
        at.mkdir(parents=True)
        kills = [forked(method, more, at, moment) for moment in planned]
        assert all(kills), kills
        assert not forked(method, more, at, ("never",))
        finals.append(dict(np.load(at / "final.npz")))
    whole, killed = finals
    assert whole.keys() == killed.keys()
    differing = [k for k in whole if not np.array_equal(whole[k], killed[k])]
    print(json.dumps({"kills": len(moments), "variables": len(whole), "differing": differing}))


if __name__ == "__main__":
    main(*sys.argv[1:])
