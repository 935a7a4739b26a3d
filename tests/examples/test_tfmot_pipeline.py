"""`examples/tfmot_pipeline.py`, all stages on digits with few epochs."""

import json

import pytest

pytestmark = pytest.mark.tensorflow_only


@pytest.mark.slow  # some 20 seconds: every stage to an int8 file
def test_no_stage_loses_a_zero(tmp_path, run_process):
    done = run_process("tfmot_pipeline", "--epochs", 8, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    stages = json.loads((tmp_path / "stages.json").read_text())
    assert [name.split(",")[0] for name in stages] == [
        "pruned",
        "trained with XLA",
        "stripped",
        "clustered",
        "quantization-aware",
        "int8 file",
    ]
    for name, stage in stages.items():
        assert (stage["zeros"], stage["lost"]) == (13584 - 2717, 0), name
        assert stage["accuracy"] > (0.05 if name.startswith("pruned") else 0.85), name
    assert f"zeros {13584 - 2717} of {13584 - 2717}" in done.stdout
    assert abs(stages["trained with XLA"]["accuracy"] - stages["stripped"]["accuracy"]) < 1e-9
    assert (tmp_path / "model.tflite").stat().st_size < 25_000
