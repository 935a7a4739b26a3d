"""`examples/edge.py`."""

import json
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.tensorflow_only


@pytest.fixture
def edge(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import edge

    return edge


def test_spectrograms_are_repeatable_and_balanced(edge):
    x, y = edge.spectrograms(600, seed=4)
    again, _ = edge.spectrograms(600, seed=4)
    np.testing.assert_array_equal(x, again)
    assert x.shape == (600, edge.FRAMES, edge.BANDS)
    assert np.bincount(y).min() > 20
    assert len(np.bincount(y)) == edge.KEYWORDS


@pytest.mark.slow
def test_example_end_to_end(run_example):
    status, folder = run_example("edge", "--epochs", "1", "--only", "speech")
    assert status == 0
    lines = json.loads((folder / "edge.json").read_text())["speech"]
    assert (lines["dense"]["route"], lines["blocks"]["route"]) == ("int8", "int8+blocks")
    for kind in ("dense", "blocks"):
        line = lines[kind]
        assert line["keras_accuracy"] > 0.6
        assert abs(line["file_accuracy"] - line["keras_accuracy"]) < 0.02
        assert (folder / f"speech_{kind}.tflite").stat().st_size == line["bytes"]
    assert lines["blocks"]["bytes"] < lines["dense"]["bytes"] / 3
