"""A Transformer layer on live blocks and its masked twin, trained on one device or several.

`block_twins.py RANK PORT FOLDER` trains both in a process of torch's DistributedDataParallel.
"""

import sys

import keras
import numpy as np

import keras_sparse_ortho as kso
from tests.helpers import array, classifier_loss, jit_if_quicker

L = keras.layers
BATCH, STEPS, CLASSES = 8, 6, 3
STORAGES = ("blocks", "masked")


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * STEPS, 5, 64)).astype("float32")
    return x, rng.integers(0, CLASSES, BATCH * STEPS).astype("int32")


def model_in(storage):
    """Attention and feed-forward layers by one word, or the same kernels with masks."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5, 64))
    x = inputs + L.MultiHeadAttention(4, 16, name="mix")(inputs, inputs)
    y = L.Dense(128, "gelu", name="wide")(L.LayerNormalization(name="norm")(x))
    x = L.GlobalAveragePooling1D()(x + L.Dense(64, name="narrow")(y))
    x = L.Dense(61, "tanh", name="padded")(x)
    dense = keras.Model(inputs, L.Dense(CLASSES, name="head")(x))
    options = {"budget": "uniform", "storage": "blocks", "exclude": "head", "seed": 0}
    blocks = kso.sparsify(dense, 0.5, **options)
    assert all(row.block for row in kso.report(blocks, orthogonality=False).rows[:-1])
    model = blocks if storage == "blocks" else kso.convert(blocks, "masked")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, classifier_loss(), jit_compile=jit_if_quicker())
    return model


def fitted(storage):
    """What is there after an epoch of `fit`."""
    model, (x, y) = model_in(storage), data()
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return state(model)


def state(model):
    """Dense kernels by path, and the other trained weights."""
    weights = kso.prunable_weights(model)
    own = {id(weight.variable) for weight in weights}
    others = [v for v in model.trainable_variables if id(v) not in own]
    return {w.path: w.value for w in weights} | {v.path: array(v) for v in others}


def moving(rows):
    """RigL with the samples of one worker."""
    x, y = data()
    batches = [(x[part], y[part]) for part in rows]
    return kso.callbacks.RigL(batches, frequency=2, end_step=100, fraction=0.6)


def trained_by_torch(storage, rank=0, workers=1):
    """A custom loop as in `examples/scale/torch_ddp.py`, with a share of each batch; with RigL."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model, (x, y) = model_in(storage), data()
    network = model if workers == 1 else DistributedDataParallel(model)
    rows = np.arange(len(x)).reshape(STEPS, workers, -1)[:, rank]
    optimizer, weights = model.optimizer, model.trainable_variables
    optimizer.build(weights)
    hooks = keras.callbacks.CallbackList([moving(rows)], model=model, epochs=1, steps=STEPS)
    hooks.on_train_begin()
    hooks.on_epoch_begin(0)
    for step, part in enumerate(rows):
        hooks.on_train_batch_begin(step)
        model.zero_grad()
        outputs = network(torch.tensor(x[part]))
        model.compute_loss(y=torch.tensor(y[part]), y_pred=outputs).backward()
        with torch.no_grad():
            optimizer.apply([weight.value.grad for weight in weights], weights)
        hooks.on_train_batch_end(step)
    hooks.on_epoch_end(0, {})
    hooks.on_train_end()
    return state(model)


def main(rank, port, folder):
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=int(rank), world_size=2)
    for storage in STORAGES:
        found = trained_by_torch(storage, int(rank), 2)
        names = {name.replace("/", "|"): value for name, value in found.items()}
        np.savez(f"{folder}/{storage}_{rank}.npz", **names)


if __name__ == "__main__":
    main(*sys.argv[1:])
