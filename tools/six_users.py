"""Reach six users' goals from README.md alone: ``six_users.py [USER ...] [--python PATH]``.

Each user copies the blocks below some titles of README.md and nothing else, into one program that
runs in an empty folder. A few lines behind them look whether the goal is reached. ``--python``
names the interpreter of a bare environment, made by the command below *Install*.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)

TRAINED = "You have a trained model"
SCRATCH = "You train from scratch"
COMING = "You come from TFMOT, torch or jaxpruner"

SMALL_FILE = """
import os
assert os.path.getsize("small.tflite") < 4 * model.count_params() / 3
assert (answers == labels[1400:]).mean() > 0.85
"""
GRADUAL = """
import numpy as np
kernels = [w.numpy() for w in plain.weights if w.ndim == 2]
live = sum(np.count_nonzero(kernel) for kernel in kernels)
assert abs(live / sum(kernel.size for kernel in kernels) - 0.1) < 0.01
kso.export_litert(plain, "pruned.tflite")
"""


@dataclasses.dataclass(frozen=True)
class User:
    """Whom README.md speaks to.

    Args:
        goal: The user's goal.
        blocks: Titles of README.md, each with the numbers of the blocks below it that are copied.
        check: Code behind the blocks. It fails where the goal is not reached.
        backend: The backend of Keras.
    """

    goal: str
    blocks: tuple[tuple[str, tuple[int, ...]], ...]
    check: str
    backend: str = "tensorflow"


USERS = {
    "trained": User(
        "a small file of a trained model", ((TRAINED, (0,)),), SMALL_FILE
    ),
    "scratch": User(
        "a network that trains on live blocks",
        ((TRAINED, (0,)), (SCRATCH, (0,))),
        """
import os
assert kso.report(sparse).density < 0.3
assert os.path.getsize("blocks.tflite") < 4 * model.count_params() / 3
assert kso.load_litert("blocks.tflite").predict(x[:7]).shape == (7, 10)
""",
    ),
    "researcher": User(
        "an orthogonal kernel, a mask that stays and STR in layers of their own",
        ((TRAINED, (0,)), (SCRATCH, (0, 1))),
        """
import numpy as np
network.build((None, 64))
network.compile("adam", "sparse_categorical_crossentropy")
kernel = np.array(kso.prunable_weights(network)[0].value)
wide, tall = sorted(kernel.shape)
np.testing.assert_allclose(kernel.T @ kernel, np.eye(64), atol=1e-5)
network.fit(x, y, verbose=0)
first_weight, learnt_weight, _ = kso.prunable_weights(network)
assert abs(first_weight.density - 0.1) < 0.001
assert learnt_weight.parametrization.__class__.__name__ == "SoftThreshold"
assert abs(kso.report(whole).density - 0.1) < 0.001
""",
    ),
    "tfmot": User(
        "TFMOT's pipeline on tf_keras, sparse from the first step",
        ((TRAINED, (0,)), (COMING, (1,))),
        """
import numpy as np
(kernel, _), = [layer.get_weights() for layer in plain.layers]
assert round(0.2 * kernel.size) == np.count_nonzero(kernel)
assert "Prune" not in type(plain.layers[0]).__name__
""",
    ),
    "torch": User(
        "gradual pruning with Keras on torch",
        ((TRAINED, (0,)), (COMING, (0,))),
        SMALL_FILE + GRADUAL,
        "torch",
    ),
    "jax": User(
        "gradual pruning with Keras on JAX",
        ((TRAINED, (0,)), (COMING, (0,))),
        SMALL_FILE + GRADUAL,
        "jax",
    ),
}


def sections(page: str) -> dict[str, list[str]]:
    """The blocks of Python below each title of a page."""
    parts = re.split(r"^## (.*)$", page, flags=re.MULTILINE)
    return {
        title: BLOCK.findall(text)
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def program(user: User, page: str) -> str:
    """The program of a user: copied blocks, then the check."""
    below = sections(page)
    copied = [
        below[title][number]
        for title, numbers in user.blocks
        for number in numbers
    ]
    return "\n".join([*copied, user.check])


def reaches_goal(user: User, python: str) -> bool:
    """Whether the program of a user runs and reaches the goal, in an empty folder."""
    environment = os.environ | {
        "KERAS_BACKEND": user.backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    text = program(user, README.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "program.py"
        path.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [python, str(path)], cwd=folder, env=environment, check=False
        )
    return done.returncode == 0


def main() -> int:
    """Run the programs; 0 if each user reaches the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "users", nargs="*", metavar="USER", help=", ".join(USERS)
    )
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    lost = []
    for name in arguments.users or USERS:
        print(f"--- {name}: {USERS[name].goal}", flush=True)
        if not reaches_goal(USERS[name], arguments.python):
            lost.append(name)
    print(f"not reached: {', '.join(lost)}" if lost else "all goals reached")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
