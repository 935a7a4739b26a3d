"""Bytes that two workers all-reduce in every training step, counted in the compiled program.

    python benchmarks/traffic.py
    python benchmarks/traffic.py --width 2048 --block 64

Writes `results/traffic.jsonl` and `results/traffic.md`. JAX, data parallel over two devices (of one
CPU: the program is that of two accelerators), Adam, float32. Counted are the operands of all
`all-reduce` and the results of all `all-gather` in the optimized program of one step: the gradients
of trained variables, and some scalars such as the loss.
"""

import argparse
import json
import os
import re

if __name__ == "__main__":  # before JAX starts
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import keras
import numpy as np

import keras_sparse_ortho as kso

FORMS = ("dense", "masked", "compact", "blocks")
LAYERS = 4
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8}
_COLLECTIVE = re.compile(
    r"= (?P<shape>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_SHAPE = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<sizes>[\d,]*)\]")


def network(form: str, width: int, density: float, block: int) -> keras.Model:
    """An MLP of square layers in one of the forms, compiled with Adam."""

    def layer(k: int) -> keras.layers.Layer:
        plain = {"use_bias": False, "activation": "relu", "name": f"hidden_{k}"}
        if form == "blocks":
            options = {"density": density, "block": block, "seed": k}
            return kso.layers.BlockSparseDense(width, **options, **plain)
        dense = keras.layers.Dense(width, **plain)
        masks = {"masked": kso.FixedMask, "compact": kso.CompactMask}
        return kso.PrunableLayer(dense, masks[form](density)) if form in masks else dense

    model = keras.Sequential([keras.Input((width,)), *(layer(k) for k in range(LAYERS))])
    model.compile("adam", "mse")
    return model


def compiled_step(model: keras.Model, x: np.ndarray, y: np.ndarray) -> str:
    """The optimized program of a step of `fit`, under the distribution that is set."""
    import jax

    layout = keras.distribution.distribution().get_data_layout(x.shape)
    batch = tuple(jax.device_put(part, layout.backend_layout) for part in (x, y))
    model._symbolic_build(data_batch=batch)
    model.optimizer.build(model.trainable_variables)
    state = tuple(
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.optimizer.variables,
            model.metrics_variables,
        )
    )
    step = jax.jit(lambda state, batch: model.train_step(state, batch), donate_argnums=0)
    # `make test` has XLA compile with the older emitters, which share work out in loops.
    older = "xla_cpu_use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", "")
    options = {"xla_cpu_use_fusion_emitters": True} if older else None
    return step.lower(state, batch).compile(options).as_text()


def collectives(program: str) -> dict[str, int]:
    """The bytes of the results of each kind of exchange in a program."""
    if " while(" in program:
        raise ValueError("What is exchanged in a loop cannot be counted. Received: a `while`")
    found: dict[str, int] = {}
    for match in _COLLECTIVE.finditer(program):
        sizes = [
            BYTES[part["dtype"]] * int(np.prod([int(n) for n in part["sizes"].split(",") if n]))
            for part in _SHAPE.finditer(match["shape"])
        ]
        found[match["kind"]] = found.get(match["kind"], 0) + sum(sizes)
    return found


def measure(form: str, width: int, density: float, block: int, batch: int) -> dict:
    """The exchanges of a step of one form, and the size of its weights."""
    model = network(form, width, density, block)
    x, y = np.zeros((2, batch, width), "float32")
    found = collectives(compiled_step(model, x, y))
    trained = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    return {"form": form, "width": width, "density": density, "trained": trained, **found}


def main() -> None:
    from timing import RESULTS, machine, markdown, parsed, write

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--density", type=float, default=0.1)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    arguments = vars(parsed(parser, {"width": 256}))
    del arguments["quick"]
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    lines = [measure(form, **arguments) for form in FORMS]
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / "traffic.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
    kinds = sorted({kind for line in lines for kind in line if "-" in kind})
    totals = {line["form"]: sum(line.get(kind, 0) for kind in kinds) for line in lines}
    rows = [
        [
            line["form"],
            f"{line['trained']:,}",
            *(f"{line.get(kind, 0):,}" for kind in kinds),
            f"{totals[line['form']] / totals['dense']:.4f}",
        ]
        for line in lines
    ]
    header = ["form", "trained [bytes]", *(f"{kind} [bytes]" for kind in kinds), "ratio to dense"]
    text = f"# Bytes that two workers exchange in a training step\n\n{machine()}, Keras "
    text += f"{keras.__version__}. JAX, `keras.distribution.DataParallel` over two devices, Adam, "
    text += f"float32. MLP of {LAYERS} layers of {arguments['width']}, density "
    text += f"{arguments['density']}, blocks of {arguments['block']}. Counted from the optimized "
    text += "program of one step.\n\n"
    write("traffic", text + markdown(header, rows))


if __name__ == "__main__":
    main()
