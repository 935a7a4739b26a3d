"""A training step on a GPU: dense, masked and on live blocks, in float32 and bfloat16.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --backends torch --widths 8192 --batches 1024

JAX and torch train an MLP of four layers of one width, each in its own process, by Adam. All models
of a process train in turn, on one batch that is on the device already, and nothing is read back
within a sample: what is timed is the device. Rivals are the dense model, the same model again,
whose ratio to the first is the noise, the model with fixed masks, and the model on live blocks of
each size. `mixed_bfloat16` multiplies in bfloat16 and keeps weights and moments in float32;
`--policies bfloat16` has all of them in bfloat16. Products in float32 may use TF32 on both
backends. State is weights, masks, places of blocks, and moments.

Each rival is a line of `results/gpu.jsonl`; `results/gpu.md` is the table. Without a GPU nothing is
measured, but for `--quick`, which tries the script on any device.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from record import RESULTS, append, finished, markdown, parsed, wall_and_cpu, write

LINES = RESULTS / "gpu.jsonl"
KEYS = ("device", "backend", "policy", "width", "batch", "density", "rival")
FORMS = {"live": ".4f", "state_mib": ".1f", "ms": ".3f", "ratio": ".3f"}


def device() -> tuple[str, bool]:
    """The name of the device, and whether it is a GPU; sets how products in float32 are taken."""
    import keras

    if keras.backend.backend() == "torch":
        import torch

        torch.set_float32_matmul_precision("high")
        there = torch.cuda.is_available()
        return (torch.cuda.get_device_name() if there else "cpu"), there
    import jax

    jax.config.update("jax_default_matmul_precision", "tensorfloat32")
    found = jax.devices()[0]
    return found.device_kind, found.platform == "gpu"


def on_jax(model: Any, optimizer: Any, x: Any, y: Any, steps: int) -> Callable[[], None]:
    """A function that trains some steps, and waits for them."""
    import jax

    def loss(trainable: list, rest: list, x: Any, y: Any) -> tuple:
        outputs, rest = model.stateless_call(trainable, rest, x, training=True)
        return jax.numpy.mean((outputs.astype("float32") - y) ** 2), rest

    def step(state: tuple, x: Any, y: Any) -> tuple:
        trainable, rest, slots = state
        gradient = jax.grad(loss, has_aux=True)
        gradients, rest = gradient(trainable, rest, x, y)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return trainable, rest, slots

    step = jax.jit(step, donate_argnums=0)
    parts = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    state = tuple([variable.value for variable in part] for part in parts)

    def run() -> None:
        nonlocal state
        for _ in range(steps):
            state = step(state, x, y)
        jax.block_until_ready(state)

    return run


def on_torch(model: Any, optimizer: Any, x: Any, y: Any, steps: int) -> Callable[[], None]:
    """A function that trains some steps, and waits for them."""
    import torch

    variables = model.trainable_variables

    def run() -> None:
        for _ in range(steps):
            loss = torch.mean((model(x, training=True).float() - y) ** 2)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                optimizer.apply([variable.value.grad for variable in variables], variables)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


def measured(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each rival, on the backend of this process."""
    import keras
    import numpy as np
    from blocks import live, mebibytes, mlp

    import keras_sparse_ortho as kso

    backend = keras.backend.backend()
    name, is_gpu = device()
    if not is_gpu and not given.quick:
        print(f"{backend} sees no GPU, but {name}: nothing is measured", flush=True)
        return
    stepper = {"jax": on_jax, "torch": on_torch}[backend]
    rivals = {"dense": "dense", "dense again": "dense", "masked": "masked"}
    rivals |= {f"blocks {size}": size for size in given.blocks}
    rng = np.random.default_rng(0)
    for policy in given.policies:
        for width in given.widths:
            for batch in given.batches:
                keras.config.set_dtype_policy(policy)  # `clear_session` sets another
                x, y = (
                    keras.ops.convert_to_tensor(rng.standard_normal((batch, width), "float32"))
                    for _ in range(2)
                )
                states, lives, runs = {}, {}, {}
                for title, rival in rivals.items():
                    try:
                        model = mlp(width, rival, given.density)
                    except kso.errors.DensityError as error:
                        print(f"width {width}: no {title}: {error}", flush=True)
                        continue
                    optimizer = keras.optimizers.Adam(1e-4)
                    optimizer.build(model.trainable_variables)
                    lives[title] = live(model)
                    states[title] = mebibytes([*model.variables, *optimizer.variables])
                    runs[title] = stepper(model, optimizer, x, y, given.steps)
                times = wall_and_cpu(runs, given.rounds, warm_up=2)
                for title, (wall, _) in times.items():
                    case = name, backend, policy, width, batch, given.density, title
                    yield dict(zip(KEYS, case, strict=True)) | {
                        "live": lives[title] / lives["dense"],
                        "state_mib": states[title],
                        "ms": 1e3 * wall / given.steps,
                        "ratio": wall / times["dense"][0],
                    }
                del runs
                keras.utils.clear_session()


def summarize() -> None:
    """Writes the table: the last line of each kind."""
    lines = {tuple(line[key] for key in KEYS): line for line in finished(LINES)}
    if not lines:
        return
    rows = [
        [*map(str, case), *(f"{line[key]:{form}}" for key, form in FORMS.items())]
        for case, line in lines.items()
    ]
    header = ["device", "backend", "dtypes", "width", "batch", "density", "kernels", "live"]
    text = (
        "# A training step on a GPU\n\nMLP of four layers of one width, Adam, on one batch that is "
        "on the device. Medians of samples in turn; ratios to the dense model. `dense again` is "
        "the noise. Products in float32 may use TF32. State: weights, masks, places of blocks, and "
        "moments.\n\n"
    )
    write("gpu", text + markdown([*header, "state [MiB]", "step [ms]", "ratio"], rows))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", choices=["jax", "torch"], default=["jax", "torch"])
    parser.add_argument("--policies", nargs="+", default=["float32", "mixed_bfloat16"])
    parser.add_argument("--widths", nargs="+", type=int, default=[4096])
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--blocks", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=20, help="training steps in one sample")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    parser.add_argument("--summary", action="store_true", help="only write the table")
    quick = {"widths": [512], "batches": [8], "density": 0.25, "rounds": 1, "steps": 1}
    given = parsed(parser, quick)
    if given.here:
        for line in measured(given):
            print(line, flush=True)
            append(LINES, line)
        return 0
    failed = 0
    for backend in [] if given.summary else given.backends:
        command = [sys.executable, __file__, "--here", *sys.argv[1:]]
        environment = os.environ | {"KERAS_BACKEND": backend}
        failed += subprocess.run(command, env=environment, check=False).returncode != 0
    summarize()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
