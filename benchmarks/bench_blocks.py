r"""Time of a training step on live blocks against the dense model and the masked one, interleaved.

    KERAS_BACKEND=jax        python benchmarks/bench_blocks.py
    KERAS_BACKEND=tensorflow python benchmarks/bench_blocks.py --models mlp4096 --batches 128
    KERAS_BACKEND=tensorflow python benchmarks/bench_blocks.py --no-xla
    KERAS_BACKEND=torch      python benchmarks/bench_blocks.py --models mlp1024
    python benchmarks/bench_blocks.py --name one_word --one-word --models mlp2048
    python benchmarks/bench_blocks.py --name one_word --models gpt2 llama --batches 8 --steps 1
    python benchmarks/bench_blocks.py --name one_word --models hub_gpt2 hub_llama --batches 8 \
        --steps 1  # with keras-hub
    python benchmarks/bench_blocks.py --name one_word --models vit256 vgg --batches 32 --steps 1
    python benchmarks/bench_blocks.py --name one_word --models lstm512 lstm1024 --batches 32

Appends a line for each rival to `results/blocks.jsonl` and writes `results/blocks.md` from all of
them: the last of each kind, or the median over several processes of one day. Rivals are the dense
model, a second dense model, whose ratio to the first is the noise of the measurement, the model
with fixed masks of the same density in masked and in compact storage, the model on blocks of each
size, and "one word", `sparsify(model, density, storage="blocks")`; for convolutions also plain ones
over a part of the channels each. Whole networks (`block_networks.py`), and every model with
`--one-word`, have the dense rivals and that one. All train in turn in one process, with Adam;
medians of wall-clock and CPU time. JAX and torch train with `fit`, TensorFlow with the train
function of `fit`, because repeated short calls of `fit` sometimes wait.

Wall-clock times need an idle machine.
"""

import argparse
import json
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from block_networks import NETWORKS, TOKENS, VOCABULARY
from timing import (
    RESULTS,
    append,
    finished,
    machine,
    markdown,
    middle_of_processes,
    parsed,
    wall_and_cpu,
    write,
)

import keras_sparse_ortho as kso
from keras_sparse_ortho._gathers import divisor_near
from keras_sparse_ortho.layers import BlockSparseConv2D, BlockSparseDense

L = keras.layers
SEQUENCE = 128  # tokens in a sample of the Transformer's block
BYTES = {"bool": 1, "int32": 4, "int64": 8, "uint32": 4, "float32": 4}
SPLIT = "split"
WORD = "one word"
MASKS = {"masked": kso.FixedMask, "compact": kso.parametrizations.CompactMask}


def dense_layer(units, activation, name, rival, **options):
    """A Dense layer: plain, masked, compact, or of live blocks."""
    plain = {"activation": activation, "name": name}
    if isinstance(rival, int):
        return BlockSparseDense(units, block=rival, seed=0, **options, **plain)
    layer = L.Dense(units, kernel_initializer="lecun_normal", **plain)
    return wrapped(layer, rival, options["density"])


def wrapped(layer, rival, density):
    """A layer as it is, or in a wrapper that masks it."""
    if rival not in MASKS:
        return layer
    return kso.PrunableLayer(layer, MASKS[rival](density))


def mlp(width, rival, density):
    """Four layers of one width."""
    layers = [
        dense_layer(width, "relu" if k < 3 else None, f"d{k}", rival, density=density)
        for k in range(4)
    ]
    return keras.Sequential([keras.Input((width,)), *layers])


def transformer(rival, density):
    """The feed-forward block of a Transformer, 768-3072-768, at each of 128 tokens."""
    inputs = keras.Input((SEQUENCE, 768))
    x = L.LayerNormalization()(inputs)
    x = dense_layer(3072, "gelu", "up", rival, density=density)(x)
    x = dense_layer(768, None, "down", rival, density=density)(x)
    return keras.Model(inputs, L.Add()([inputs, x]))


def in_parts(channels, parts, name, **options):
    """Plain convolutions of parts of the channels, with as many entries as live blocks have.

    Without gathers: the time of the backend's own convolutions of so few channels.
    """
    width = channels // parts
    layers = [L.Conv2D(width, 3, **options, name=f"{name}_{k}") for k in range(parts)]

    def call(x):
        found = [layer(x[..., k * width : (k + 1) * width]) for k, layer in enumerate(layers)]
        return L.Concatenate()(found)

    return call


def stage(size, channels, rival, density):
    """A residual pair of 3 x 3 convolutions at one resolution."""

    def convolution(name):
        options = {"padding": "same", "use_bias": False, "name": name}
        if isinstance(rival, int):
            return BlockSparseConv2D(channels, 3, density=density, block=rival, seed=0, **options)
        if rival == SPLIT:
            return in_parts(channels, divisor_near(channels, 1 / density), **options)
        return wrapped(L.Conv2D(channels, 3, **options), rival, density)

    inputs = keras.Input((size, size, channels))
    x = L.ReLU()(L.BatchNormalization()(convolution("c0")(inputs)))
    x = L.BatchNormalization()(convolution("c1")(x))
    return keras.Model(inputs, L.ReLU()(L.Add()([inputs, x])))


MODELS = {
    "mlp256": lambda *which: mlp(256, *which),
    "mlp1024": lambda *which: mlp(1024, *which),
    "mlp2048": lambda *which: mlp(2048, *which),
    "mlp4096": lambda *which: mlp(4096, *which),
    "transformer": transformer,
    "stage28x128": lambda *which: stage(28, 128, *which),
    "stage14x256": lambda *which: stage(14, 256, *which),
    "stage7x512": lambda *which: stage(7, 512, *which),
}


def made(name, rival, density):
    """A model for a rival."""
    if rival == WORD:
        return kso.sparsify(made(name, "dense", density), density, storage="blocks", seed=0)
    return NETWORKS[name]() if name in NETWORKS else MODELS[name](rival, density)


def stepper(model, xla, batch, steps):
    """A function that trains some steps on prepared data."""
    model.compile(keras.optimizers.Adam(1e-4), "mse", jit_compile=xla)
    rng = np.random.default_rng(0)
    x = given_to(model, steps * batch, rng)
    y = samples(model.outputs[0], steps * batch, rng)
    if keras.backend.backend() != "tensorflow":
        return lambda: model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, verbose=0)
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch, drop_remainder=True).cache()
    batches = iter(data.repeat())
    model.make_train_function()

    def run():
        for _ in range(steps):
            logs = model.train_function(batches)
        float(logs["loss"])  # waits for the device

    return run


def given_to(model, count, rng):
    """Random inputs, in a dict where the model takes one."""
    # A Sequential has no `input` before it is called.
    inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    return keras.tree.map_structure(lambda tensor: samples(tensor, count, rng), inputs)


def samples(tensor, count, rng):
    """Random data for an input or output of a model; integers are tokens, and none is padding."""
    shape = (count, *(TOKENS if size is None else size for size in tensor.shape[1:]))
    if "int" in tensor.dtype:
        return rng.integers(1, VOCABULARY, shape, dtype="int32")
    return rng.standard_normal(shape, dtype="float32")


def live(model):
    """Live entries of all kernels."""
    return sum(weight.live for weight in kso.prunable_weights(model))


def counts(model):
    """The report, with multiplications for one sample."""
    rng = np.random.default_rng(0)
    return kso.report(model, orthogonality=False, sample=given_to(model, 1, rng))


def state_mib(model):
    """The training state: weights, masks, indices, and the optimizer's moments."""
    # By their shapes: on JAX `fit` holds the values.
    variables = [*model.variables, *model.optimizer.variables]
    sizes = [np.prod(v.shape, dtype=np.int64) * BYTES[v.dtype] for v in variables]
    return float(sum(sizes)) / 2**20


def measure(name, batch, density, blocks, args):
    """Rows of the result file for one model, batch and density."""
    keras.utils.set_random_seed(0)
    rivals = {"dense": "dense", "dense again": "dense", WORD: WORD}
    if name in MODELS and not args.one_word:
        rivals.update({**{name: name for name in MASKS}, **{f"blocks {k}": k for k in blocks}})
    if name.startswith("stage"):
        rivals["plain, in parts"] = SPLIT
    models, steps = {}, {}
    for title, rival in rivals.items():
        try:
            models[title] = made(name, rival, density)
        except kso.errors.DensityError as error:
            print(f"{name}: no {title}: {error}", flush=True)
    # Before `fit`, which on JAX holds the variables.
    parts = {title: live(model) / live(models["dense"]) for title, model in models.items()}
    counted = None if WORD not in models else counts(models[WORD])
    steps = {title: stepper(model, args.xla, batch, args.steps) for title, model in models.items()}
    times = wall_and_cpu(steps, args.rounds, warm_up=2)
    wall, cpu = times["dense"]
    setting = keras.backend.backend() + (" XLA" if args.xla and args.tensorflow else "")
    for title, (its_wall, its_cpu) in times.items():
        yield {
            "setting": setting,
            "model": name,
            "batch": batch,
            "density": density,
            "rival": title,
            "live": parts[title],
            **({"flops": counted.sparse_flops / counted.flops} if title == WORD else {}),
            "state_mib": state_mib(models[title]),
            "wall_ms": 1e3 * its_wall / args.steps,
            "cpu_ms": 1e3 * its_cpu / args.steps,
            "wall_ratio": its_wall / wall,
            "cpu_ratio": its_cpu / cpu,
            "rounds": args.rounds,
            "machine": machine(),
            "keras": keras.__version__,
            "tunables": os.environ.get("GLIBC_TUNABLES", ""),
        }


def kind(line):
    """What was measured."""
    return tuple(line[k] for k in ("setting", "model", "batch", "density", "rival"))


def page(lines):
    """The Markdown page of what stands for each kind of result."""
    rows = [
        [
            *map(str, kind(line)),
            f"{line['live']:.4f}",
            f"{line['flops']:.4f}" if "flops" in line else "",
            f"{line['state_mib']:.1f}",
            *(f"{line[k]:.2f}" for k in ("wall_ms", "cpu_ms")),
            *(f"{line[k]:.3f}" for k in ("wall_ratio", "cpu_ratio")),
            str(line["processes"]),
        ]
        for line in middle_of_processes(lines, kind, "wall_ratio").values()
    ]
    places = "; ".join(sorted({f"{line['machine']}, Keras {line['keras']}" for line in lines}))
    header = ["setting", "model", "batch", "density", "rival", "live", "FLOPs", "state [MiB]"]
    header += ["step [ms]", "cores [ms]", "ratio", "ratio of cores", "processes"]
    text = f"# Training step on live blocks against the dense model\n\n{places}. Adam, float32. "
    text += "Medians of interleaved samples in one process; ratios to the dense model; of several "
    text += "processes on one day the one with the median ratio. "
    text += '"dense again" is the noise. "cores" is the time that all cores have worked, '
    text += '"state" is weights, masks, places and moments, '
    text += '"FLOPs" those of a forward pass, relative to dense, in products with kernels.\n\n'
    return text + markdown(header, rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["mlp1024", "mlp2048", "mlp4096"])
    parser.add_argument("--batches", nargs="+", type=int, default=[128])
    parser.add_argument("--densities", nargs="+", type=float, default=[0.1])
    parser.add_argument("--blocks", nargs="+", type=int, default=[16, 32, 64, 128])
    parser.add_argument("--one-word", action="store_true", help="only that rival beside dense")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=4, help="training steps in one sample")
    parser.add_argument("--no-xla", dest="xla", action="store_false")
    parser.add_argument("--name", default="blocks", help="of the files in results/")
    parser.add_argument("--summary", action="store_true", help="only write the table")
    quick = {"models": ["mlp256"], "blocks": [16, 32], "rounds": 3}
    args = parsed(parser, quick)
    args.tensorflow = keras.backend.backend() == "tensorflow"
    args.xla = args.xla and keras.backend.backend() != "torch"
    results = RESULTS / f"{args.name}.jsonl"
    for name in [] if args.summary else args.models:
        for batch in args.batches:
            for density in args.densities:
                for row in measure(name, batch, density, args.blocks, args):
                    print(json.dumps(row), flush=True)
                    append(results, row)
                keras.utils.clear_session()
    write(args.name, page(finished(results)))


if __name__ == "__main__":
    main()
