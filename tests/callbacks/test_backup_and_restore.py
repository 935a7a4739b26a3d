"""`BackupAndRestore`: nothing is lost; and what Keras' own loses, with plain Keras models."""

import json
import os

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import (
    BackupAndRestore,
    TargetDensity,
    _backup_and_restore,
)
from tests.callbacks.runs import same, state
from tests.helpers import Workers, array, slow_on_jax

L = keras.layers
# Few steps of small networks: on TensorFlow tracing would take most of the time.
EAGERLY = keras.backend.backend() != "jax"
EPOCHS, STEPS, BATCH = 3, 3, 4


class Stop(keras.callbacks.Callback):
    """Fails at a step of an epoch, as if the process were gone."""

    def __init__(self, epoch, step=1):
        super().__init__()
        self.at, self.epoch = (epoch, step), None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at:
            raise KeyboardInterrupt


def plain(dropout):
    keras.utils.set_random_seed(0)
    random = [L.GaussianNoise(0.2), L.Dropout(0.4)] if dropout else []
    return keras.Sequential(
        [keras.Input((8,)), *random, L.Dense(6), L.Dense(2)]
    )


def fit(model, *callbacks):
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(STEPS * BATCH, 8)),
        rng.normal(size=(STEPS * BATCH, 2)),
    )
    model.compile(keras.optimizers.Adam(0.1), "mse", run_eagerly=EAGERLY)
    model.fit(
        x, y, BATCH, EPOCHS, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return state(model)


@pytest.mark.core
def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path):
    def made():  # in the process that resumes, everything is new
        model = kso.parametrize(plain(dropout=True), kso.SoftThreshold)
        return model, TargetDensity(0.25), BackupAndRestore(tmp_path)

    model, steering, _ = made()
    whole = fit(model, steering)
    model, steering, backup = made()
    with pytest.raises(KeyboardInterrupt):
        fit(model, steering, Stop(1), backup)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["epoch_000001.weights.h5", "latest.json"]
    model, steering, backup = made()
    with pytest.raises(KeyboardInterrupt):
        fit(model, backup, steering, Stop(2, 2))
    model, steering, backup = made()
    assert same(fit(model, steering, backup), whole)
    assert sum(w.live for w in kso.prunable_weights(model)) == round(0.25 * 60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_keras_loses_the_states_of_seed_generators(tmp_path):
    for dropout, kind in (
        (True, keras.callbacks),
        (False, keras.callbacks),
        (True, kso.callbacks),
    ):
        folder = str(tmp_path / f"{dropout}-{kind.__name__}")
        with pytest.raises(KeyboardInterrupt):
            fit(plain(dropout), Stop(1), kind.BackupAndRestore(folder))
        resumed = fit(plain(dropout), kind.BackupAndRestore(folder))
        lost = dropout and kind is keras.callbacks
        assert same(resumed, fit(plain(dropout))) == (not lost)


@pytest.mark.parametrize("moment", ["weights", "record"])
@slow_on_jax
def test_a_kill_while_files_are_written_loses_one_epoch_at_most(
    moment, tmp_path, monkeypatch
):
    whole = fit(plain(dropout=True))
    model, backup = plain(dropout=True), BackupAndRestore(tmp_path)

    def write_a_part(record, stream):
        stream.write(json.dumps(record)[:9])
        stream.flush()
        raise KeyboardInterrupt

    def save_a_half(path, **options):
        keras.Model.save_weights(model, path, **options)
        os.truncate(path, os.path.getsize(path) // 2)
        raise KeyboardInterrupt

    def prepare(epoch, logs):
        if epoch == 1 and moment == "record":
            monkeypatch.setattr(_backup_and_restore.json, "dump", write_a_part)
        elif epoch == 1:
            vars(model)["save_weights"] = save_a_half

    with pytest.raises(KeyboardInterrupt):
        fit(
            model,
            keras.callbacks.LambdaCallback(on_epoch_begin=prepare),
            backup,
        )
    monkeypatch.undo()
    assert same(fit(plain(dropout=True), BackupAndRestore(tmp_path)), whole)


def test_refusals(tmp_path):
    unbuilt = keras.Sequential([L.Dense(2)])
    backup = BackupAndRestore(tmp_path, delete_checkpoint=False)
    backup.set_model(unbuilt)
    with pytest.raises(
        ValueError, match=r"that is built.*Received: model='sequential"
    ):
        backup.on_train_begin()
    fit(plain(dropout=True), backup)
    assert (tmp_path / "epoch_000003.weights.h5").exists()
    other = plain(dropout=False)
    backup.set_model(other)
    with pytest.raises(
        ValueError,
        match=r"of another model.*Received: 2 seed generators, for 0",
    ):
        backup.on_train_begin()


class OneOfTwo(Workers):
    """This process as the second of two; the first says what it has."""

    def __init__(self, epoch):
        super().__init__(2, 1)
        # In turn: whether reading failed, its last epoch, whether restoring or training failed.
        self._said = iter([0, epoch, 0, 0])

    def gather(self, numbers):
        return np.stack([np.array([next(self._said)], np.int32), numbers])

    def gather_text(self, text):
        return ["", text]


@slow_on_jax
def test_processes_go_on_from_the_last_epoch_that_all_have(
    tmp_path, monkeypatch
):
    def begun(epoch):
        """The epoch with which this process begins where the other one has saved that."""
        monkeypatch.setattr(
            _backup_and_restore, "workers_of", lambda model: OneOfTwo(epoch)
        )
        model, backup = plain(dropout=True), BackupAndRestore(tmp_path)
        model.compile(keras.optimizers.Adam(0.1), "mse", run_eagerly=EAGERLY)
        backup.set_model(model)
        backup.on_train_begin()
        return model

    monkeypatch.setattr(
        _backup_and_restore, "workers_of", lambda model: OneOfTwo(0)
    )
    seen = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs=None: seen.append(
            array(model.weights[0])
        )
    )
    model = plain(dropout=True)
    with pytest.raises(KeyboardInterrupt):
        fit(model, note, BackupAndRestore(tmp_path), Stop(2))
    kept = sorted(path.name for path in (tmp_path / "worker_1").iterdir())
    assert kept == [
        "epoch_000001.weights.h5",
        "epoch_000002.weights.h5",
        "latest.json",
    ]
    assert list(tmp_path.iterdir()) == [tmp_path / "worker_1"]
    # Of the other process, which is one behind, level, or ahead.
    for epoch in (
        1,
        2,
        3,
    ):
        other = begun(epoch)
        assert other._initial_epoch == min(epoch, 2)
        np.testing.assert_array_equal(
            array(other.weights[0]), seen[min(epoch, 2) - 1]
        )
    fresh = begun(0)
    np.testing.assert_array_equal(
        array(fresh.weights[0]), array(plain(dropout=True).weights[0])
    )
    record = tmp_path / "worker_1" / "latest.json"
    record.write_text(
        json.dumps(json.loads(record.read_text()) | {"before": None})
    )
    with pytest.raises(
        ValueError, match=r"another process has only 1. Received: .* with \[2\]"
    ):
        begun(1)


def with_part(name, value):
    return lambda text: json.dumps(json.loads(text) | {name: value}).encode()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("latest.json", lambda text: text[: len(text) // 2]),
        ("latest.json", lambda text: b"[" * 100_000),
        ("latest.json", lambda text: b"\xff"),
        ("latest.json", lambda text: b"[]"),
        *(
            ("latest.json", with_part(*change))
            for change in (
                *(
                    ("epoch", "../../1"),
                    ("epoch", -1),
                    ("epoch", 7),
                    ("before", {}),
                ),
                *(
                    ("seeds", {"a": 1}),
                    ("seeds", [[0.5, 1]]),
                    ("seeds", [[1, 2, 3]]),
                ),
                *(
                    ("seeds", [[2**200, 0]]),
                    ("generators", [1]),
                    ("generators", None),
                ),
            )
        ),
        ("epoch_000001.weights.h5", lambda data: data[:500]),
    ],
)
@pytest.mark.core
def test_a_damaged_backup_is_told_with_the_remedy(name, change, tmp_path):
    model = keras.Sequential([keras.Input((2,)), L.Dropout(0.5), L.Dense(2)])
    model.compile("sgd", "mse")
    backup = BackupAndRestore(tmp_path)
    backup.set_model(model)
    backup.on_epoch_end(0)
    file = tmp_path / name
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(
        ValueError, match=r"(?s)is damaged.*Delete this folder.*Received: "
    ):
        backup.on_train_begin()
