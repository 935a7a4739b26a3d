"""Sparse training in two processes of torch's DistributedDataParallel, on this machine.

    python examples/scale/torch_ddp.py --methods rigl blocks

DDP averages the gradients of the step. The custom training loop calls the callbacks, which change
the masks: RigL averages its dense gradients over the processes, so each may pass its own shard,
and all callbacks compare the masks after every update.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import recipe
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel


def begin(place):
    torch.set_num_threads(1)
    if place.processes > 1:
        address = f"tcp://127.0.0.1:{place.ports[0]}"
        distributed.init_process_group(
            "gloo",
            init_method=address,
            rank=place.rank,
            world_size=place.processes,
        )


def train(method, place):
    model = recipe.sparse_model(method)
    network = model if place.processes == 1 else DistributedDataParallel(model)
    x, y = recipe.shard(place.rank, place.processes)
    size = recipe.BATCH // place.processes
    optimizer, weights = model.optimizer, model.trainable_variables
    optimizer.build(weights)
    hooks = keras.callbacks.CallbackList(
        recipe.callbacks(method, place.rank, place.processes),
        model=model,
        epochs=recipe.EPOCHS,
        steps=recipe.BATCHES,
    )
    hooks.on_train_begin()
    for epoch in range(recipe.first_epoch(model), recipe.EPOCHS):
        hooks.on_epoch_begin(epoch)
        for batch in range(recipe.BATCHES):
            hooks.on_train_batch_begin(batch)
            rows = slice(batch * size, (batch + 1) * size)
            model.zero_grad()
            y_pred = network(torch.tensor(x[rows]))
            loss = model.compute_loss(
                x=None, y=torch.tensor(y[rows]), y_pred=y_pred
            )
            loss.backward()
            with torch.no_grad():
                optimizer.apply(
                    [weight.value.grad for weight in weights], weights
                )
            hooks.on_train_batch_end(batch)
        hooks.on_epoch_end(epoch, {})
    hooks.on_train_end()
    return model


if __name__ == "__main__":
    recipe.main(
        [recipe.Way("one process"), recipe.Way("two processes", 2)],
        train,
        begin,
    )
