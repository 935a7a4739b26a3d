"""`examples/quickstart.py`, run as a user runs it."""

import json
import re
from pathlib import Path

import keras
import pytest


@pytest.mark.slow  # about 50 seconds: two networks, six exports
@pytest.mark.core
def test_all_the_way(tmp_path, run_process):
    options = ("--epochs", 2, "--density", 0.2, "--seed", 3, "--output", tmp_path / "out")
    done = run_process("quickstart", *options)
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-10:]

    backend = keras.backend.backend()
    assert last[0].startswith("Results: digits, 1347 training and 450 test images")
    assert f"backend {backend}" in last[0]
    for place, name in ((1, "MLP"), (5, "CNN")):
        found = re.fullmatch(
            rf"{name}: test accuracy ([\d.]+)% sparse, ([\d.]+)% dense; "
            r"([\d,]+) of ([\d,]+) kernel weights live \(density 0.2000\)",
            last[place],
        )
        assert found, last[place]
        live, size = (int(found[k].replace(",", "")) for k in (3, 4))
        assert live == round(0.2 * size)
        assert float(found[2]) > 60  # two epochs: it learns
        for line in last[place + 1 : place + 4]:
            assert re.match(rf"{name}: .* file [\d.,]+ KiB, gzip .* difference to Keras", line)

    out = tmp_path / "out"
    assert last[9] == f"Picture: {out / 'digits.png'}"
    assert (out / "digits.png").read_bytes().startswith(b"\x89PNG")
    figures = json.loads((out / "digits.json").read_text())
    for name in ("MLP", "CNN"):
        files = figures[name]["files"]
        assert files["sparse float32"]["max_abs_diff"] < 1e-4
        assert files["sparse float32"]["gzip_bytes"] < 0.5 * files["dense float32"]["gzip_bytes"]
        for file in files.values():
            assert Path(file["path"]).stat().st_size == file["bytes"]
        plain = keras.saving.load_model(out / f"{name.lower()}_plain.keras")
        assert "PrunableLayer" not in {type(layer).__name__ for layer in plain.layers}
