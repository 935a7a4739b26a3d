"""The comparison of live blocks: what its table is made of."""

import json

import pytest

pytestmark = pytest.mark.tensorflow_only


def test_epochs_and_seconds(faster):
    run = {"curve": [0.85, 0.881, 0.87, 0.89]}
    assert faster.epochs_to_goal(run) == 2
    # The last tenth is not trained on, and the last part of a batch is dropped.
    assert faster.steps_of({"samples": 20000, "batch_size": 128}) == 140
    assert faster.epochs_to_goal({"curve": [0.8]}) is None


def test_shorter_schedules_have_rows(faster, tmp_path):
    lines = tmp_path / "faster.jsonl"
    with lines.open("w") as stream:
        for epochs, method, seed in ((6, "dense", 0), (6, "dense", 1), (3, "dense", 0)):
            run = {"net": "wide_mlp", "method": method, "density": 0.1, "seed": seed}
            run |= {"epochs": epochs, "accuracy": 0.9, "learning_rate": 0.001, "backend": "jax"}
            run |= {"curve": [0.8] + [0.89] * (epochs - 1)}
            stream.write(json.dumps(run) + "\n")
            for rate in (0.0005, 0.001):
                tried = {key: run[key] for key in ("net", "method", "density", "seed", "epochs")}
                tried |= {"learning_rate": rate, "validation": 0.5 + rate}
                stream.write(json.dumps(tried) + "\n")
    steps = {
        "wide_mlp": {"0.1": {"dense": 2 / faster.steps_of(faster.settings("faster")["wide_mlp"])}}
    }
    (tmp_path / "faster_time.json").write_text(json.dumps(steps))
    rows = [row for row in faster.summarize(lines).splitlines() if "| dense" in row]
    assert rows == [
        "| 1 | dense | 90.00 +- 0.00 | 2 | 2 of 2 | 2.0 | 2.00 | 4.0 | 0.001 | 2 x 2 | high |",
        "| 1 | dense, 3 epochs | 90.00 | 1 | 1 of 1 | 2.0 | 2.00 | 4.0 | 0.001 | 2 x 1 | high |",
    ]
    (tmp_path / "faster_time.json").unlink()
    rows = [row for row in faster.summarize(lines).splitlines() if "| dense |" in row]
    assert rows[0].endswith("| 2 of 2 | 2.0 | - | - | 0.001 | 2 x 2 | high |")  # not timed
