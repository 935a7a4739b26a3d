"""What the examples refuse is told in one line."""

import pytest

pytestmark = pytest.mark.tensorflow_only

SMALL = {
    "quickstart": (),
    "transformer": ("--width", 16, "--heads", 2, "--depth", 1, "--batch", 32, "--epochs", 4),
    "faster": ("--width", 64, "--depth", 2, "--block", 8, "--batch", 32, "--epochs", 2),
}


@pytest.mark.parametrize(
    ("name", "arguments", "rule"),
    [
        ("quickstart", ["--epochs", 1], "--epochs must be 2 or more. Received: 1"),
        ("transformer", ["--epochs", 0], "--epochs must be 1 or more. Received: 0"),
        ("transformer", ["--heads", 3], "--width must be divisible by --heads. Received: 16, 3"),
        ("transformer", ["--density", 0.01], "The least global density"),
        ("faster", ["--epochs", 1], "--epochs must be 2 or more. Received: 1"),
        ("faster", ["--block", 48], "Received"),
        ("faster", ["--density", 1.5], "must be in (0, 1]. Received: density=1.5"),
    ],
)
def test_refusals_are_one_line(run_example, capsys, name, arguments, rule):
    status, folder = run_example(name, *SMALL[name], *arguments)
    assert status == 2
    errors = capsys.readouterr().err
    assert rule in errors
    assert "Traceback" not in errors
    assert not folder.exists() or not list(folder.glob("*.json"))
