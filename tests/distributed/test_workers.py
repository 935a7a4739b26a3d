"""Workers: what they compute together, and that all of them stop where they do not agree."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from examples.scale.recipe import free_ports
from keras_sparse_ortho._workers import AveragingWorkers, Workers, digest_of
from keras_sparse_ortho.errors import WorkerError
from keras_sparse_ortho.saliency import _loss_derivatives
from tests.distributed.recipes import ROOT, environment
from tests.helpers import slow_on_jax

# A strategy of TensorFlow hands out the first worker's initial values.
MADE_EQUAL = {
    "tensorflow": ["other_weights", "other_weights_where_they_are_scored"]
}


class Threads(AveragingWorkers):
    """Workers that are threads of this process."""

    def __init__(self, rank, count, barrier, board):
        super().__init__(count, rank)
        self._barrier, self._board = barrier, board

    def gather(self, numbers):
        self._board[self.rank] = numbers
        self._barrier.wait()
        found = np.stack([self._board[rank] for rank in range(self.count)])
        self._barrier.wait()
        return found

    def _sum(self, array):
        return self.gather(array).sum(axis=0)


def on_all(action, count=3):
    """What `action(workers)` gives or raises on each of them."""
    barrier, board = threading.Barrier(count, timeout=10), {}

    def run(rank):
        try:
            return action(Threads(rank, count, barrier, board))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


@pytest.mark.numpy_only
def test_what_fails_on_one_worker_stops_all():
    def action(workers):
        def change():
            if workers.rank == 1:
                raise KeyError("no such layer")
            return workers.rank

        return workers.together(change)

    zero, one, two = on_all(action)
    assert isinstance(one, KeyError)
    for error in (zero, two):
        assert isinstance(error, WorkerError)
        assert "Worker 1 of 3" in str(error)
        assert "no such layer" in str(error)
    assert on_all(lambda workers: workers.together(lambda: workers.rank)) == [
        0,
        1,
        2,
    ]


@pytest.mark.numpy_only
def test_facts_that_differ_are_named_on_all_workers():
    def action(workers):
        same = {"a/kernel": digest_of(np.eye(3)), "c": "1"}
        workers.compare("at first", same)
        workers.compare("at step 4", {**same, "b": str(workers.rank == 2)})

    for error in on_all(action):
        assert isinstance(error, WorkerError)
        assert "at step 4" in str(error)
        assert "{'b': ['False', 'False', 'True']}" in str(error)


RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, 12, 8)).astype("float32")
# Of other sizes: samples count, not workers.
SHARDS = [
    slice(0, 2),
    slice(2, 12),
]


@slow_on_jax
@pytest.mark.core
def test_rigl_with_a_shard_for_each_worker_has_the_masks_of_one_process():
    def update(workers, rows):
        dense = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(8, name="a")]
        )
        model = kso.sparsify(dense, 0.25, seed=0)
        model.compile("sgd", "mse", run_eagerly=True)
        rigl = kso.callbacks.RigL(
            [(X[rows], Y[rows])], frequency=1, end_step=9, fraction=0.9
        )
        rigl.set_model(model)
        rigl._workers = workers
        rigl.on_train_begin()
        assert rigl.move(1) > 0
        return kso.prunable_weights(model)[0].parametrization.mask_value()

    expected = update(None, slice(12))
    apart = [update(None, shard) for shard in SHARDS]
    assert all((mask != expected).any() for mask in apart)
    for found in on_all(
        lambda workers: update(workers, SHARDS[workers.rank]), count=2
    ):
        np.testing.assert_array_equal(found, expected)


@slow_on_jax
@pytest.mark.core
@pytest.mark.parametrize("score", ["snip", "grasp"])
def test_scores_of_shards_are_those_of_all_data(monkeypatch, score):
    kernel, of_thread = RNG.normal(size=(8, 8)), threading.local()
    monkeypatch.setattr(
        _loss_derivatives, "workers_of", lambda model: of_thread.workers
    )

    def scores(workers, rows, factor=1.0):
        of_thread.workers = workers
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(8, name="a", use_bias=False)]
        )
        model.set_weights([factor * kernel])
        model.compile("sgd", "mse", run_eagerly=True)
        ask = {"batch_size": 3, "batches": None}
        return getattr(kso.saliency, score)(
            model, 0.5, (X[rows], Y[rows]), **ask
        ).scores

    expected = scores(Workers(), slice(12))["a/kernel"]
    for found in on_all(
        lambda workers: scores(workers, SHARDS[workers.rank]), count=2
    ):
        np.testing.assert_allclose(
            found["a/kernel"], expected, rtol=1e-4, atol=1e-6
        )
    for error in on_all(
        lambda workers: scores(workers, slice(12), 1.0 + workers.rank), count=2
    ):
        assert isinstance(error, WorkerError)
        assert "where weights are scored" in str(error)


@pytest.mark.numpy_only
def test_digests_tell_shapes_types_and_bits_apart():
    zeros = np.zeros((2, 3))
    others = [zeros.T, zeros.astype("float32"), -zeros, np.full((2, 3), 1e-300)]
    assert len({digest_of(array) for array in [zeros, *others]}) == 5
    assert digest_of(zeros) == digest_of(zeros.copy(order="F"))


CASES = (
    *(
        "nothing_wrong",
        "other_seeds",
        "other_weights",
        "other_callbacks",
        "no_data_on_one",
    ),
    *("masks_came_apart", "other_weights_where_they_are_scored"),
)


@pytest.mark.slow
@pytest.mark.core
def test_workers_that_do_not_agree_all_stop_before_the_first_step(tmp_path):
    found = run_two(tmp_path, CASES)
    assert [said.pop("nothing_wrong") for said in found] == ["", ""]
    for name in CASES[1:]:
        texts = [said[name] for said in found]
        assert all(texts) or name in MADE_EQUAL.get(
            keras.backend.backend(), []
        ), f"{name}: {texts}"
    assert "OSError: the disk is gone" in found[1]["no_data_on_one"]
    assert "Worker 1 of 2 has failed" in found[0]["no_data_on_one"]
    assert "'seed'" in found[0]["other_callbacks"]


LAYOUT = pytest.param("a_layout_that_does_not_fit", marks=pytest.mark.jax_only)


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.parametrize("case", ["other_widths", "no_masks_on_one", LAYOUT])
def test_models_with_other_variables(tmp_path, case):
    """Engines that hand variables out notice it first, and end what cannot go on."""
    assert all(said[case] for said in run_two(tmp_path, [case]))


@pytest.mark.slow
@pytest.mark.jax_only
def test_processes_with_halves_of_kernels_read_them_in_one_order(tmp_path):
    cases = ["sharded_masks", "sharded_blocks", "sharded_thresholds"]
    nothing = dict.fromkeys(cases, "")
    assert run_two(tmp_path, cases) == [nothing, nothing]


def run_two(folder, cases, seconds=300):
    """What two processes of `bad_workers.py` have noted for each case; fails if they hang."""
    script = ROOT / "tests" / "distributed" / "bad_workers.py"
    ports = [str(port) for port in free_ports(2)]
    logs, outputs = (
        [folder / f"{rank}.{kind}" for rank in range(2)]
        for kind in ("log", "json")
    )
    running = []
    for rank in range(2):
        with logs[rank].open("w") as log:
            command = [
                sys.executable,
                script,
                str(rank),
                *ports,
                outputs[rank],
                *cases,
            ]
            # Sets have another order in each.
            own = environment(one_device=False, PYTHONHASHSEED=str(rank + 1))
            running.append(
                subprocess.Popen(
                    command, env=own, stdout=log, stderr=subprocess.STDOUT
                )
            )
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(
        process.poll() is None for process in running
    ):
        time.sleep(0.1)
    ended = [process.poll() for process in running]
    for process in running:
        process.kill()
        process.wait()
    told = "\n".join(log.read_text()[-4000:] for log in logs)
    assert None not in ended, told
    found = [json.loads(o.read_text()) if o.exists() else {} for o in outputs]
    # A process that the engine has ended has not noted why.
    ends = [f"ended with {end}" if end else "" for end in ended]
    found = [
        {**dict.fromkeys(cases, end), **said}
        for said, end in zip(found, ends, strict=True)
    ]
    print(told)
    return found
