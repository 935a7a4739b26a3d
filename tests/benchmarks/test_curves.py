"""Accuracy from step to step, and which of several measurements stands in a table."""

import pytest

pytestmark = pytest.mark.numpy_only


def test_windows_are_taken_out_of_a_running_mean(training):
    progress = training.Progress(window=2)
    for _ in range(2):  # epochs
        progress.on_epoch_begin(0)
        right, seen = 0.0, 0
        for step, accuracy in enumerate([1.0, 0.5, 0.0, 0.5, 1.0]):
            right, seen = right + accuracy, seen + 1
            progress.on_train_batch_end(step, {"accuracy": right / seen})
    assert progress.points == [
        (step, pytest.approx(value)) for _ in range(2) for step, value in ((2, 0.75), (4, 0.25))
    ]


def test_of_several_processes_the_median_counts(record):
    def line(kind, ratio, date=None, commit="a"):
        made = {"made": {"date": date, "commit": commit}} if date else {}
        return {"kind": kind, "ratio": ratio} | made

    lines = [line("x", 9.0, "1"), line("x", 1.0, "2", "b"), line("x", 3.0, "2"), line("y", 5.0)]
    lines += [line("x", 1.0, "2", "a+"), line("y", 4.0), line("x", 2.0, "2")]
    found = record.middle_of_processes(lines, lambda line: line["kind"], "ratio")
    assert {kind: (line["ratio"], line["processes"]) for kind, line in found.items()} == {
        "x": (2.0, 3),  # those of the last day and commit
        "y": (4.0, 1),  # not known when: the last
    }
    found = record.middle_of_processes(lines[:3] + lines[4:5], lambda line: line["kind"], "ratio")
    assert found["x"]["ratio"] == 3.0  # of two the larger one


def test_epochs_and_seconds_on_live_blocks(faster):
    run = {"curve": [0.85, 0.881, 0.87, 0.89]}
    assert faster.epochs_to_goal(run) == 2
    # The last tenth is not trained on, and the last part of a batch is dropped.
    assert faster.steps_of({"samples": 20000, "batch_size": 128}) == 140
    assert faster.epochs_to_goal({"curve": [0.8]}) is None
