"""Two processes that do not agree: `bad_workers.py RANK PORT PORT OUTPUT CASE ...`.

For each case it notes what was raised here. Nothing is trained, so that what does not raise is
noted as well, and the next case finds both processes at the same place.
"""

import contextlib
import functools
import json
import sys

import keras
import numpy as np
import recipe

import keras_sparse_ortho as kso
from tests.distributed.recipes import BACKEND, model_parallel, recipe_of_two

RANK, PORTS, OUTPUT = (
    int(sys.argv[1]),
    [int(port) for port in sys.argv[2:4]],
    sys.argv[4],
)
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def dense(width=16):
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(width, name="a"),
            keras.layers.Dense(4, name="b"),
        ]
    )


def sparse(seed=0, width=16):
    keras.utils.set_random_seed(0)
    model = kso.sparsify(dense(width), 0.25, seed=seed)
    model.compile("sgd", "mse")
    return model


def started(model, callback):
    """A callback as at the first step of a `fit`."""
    callback.set_model(model)
    callback.set_params({"epochs": 2, "steps": 50})
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    return callback


def moving(**kwargs):
    return kso.callbacks.SET(frequency=4, end_step=80, **kwargs)


@case
def nothing_wrong():
    started(sparse(), moving()).move(4)
    rng = np.random.default_rng(RANK)
    batches = [(rng.normal(size=(4, 8)), rng.normal(size=(4, 4)))]
    started(
        sparse(), kso.callbacks.RigL(batches, frequency=4, end_step=80)
    ).move(4)


@case
def other_seeds():
    started(sparse(seed=RANK), moving())


@case
def other_weights():
    keras.utils.set_random_seed(RANK)
    model = kso.parametrize(dense(), kso.MagnitudeMask(0.25))
    model.compile("sgd", "mse")
    started(model, kso.callbacks.UpdateMasks())


@case
def other_widths():
    started(sparse(width=16 + 4 * RANK), moving())


@case
def other_callbacks():
    started(sparse(), moving(seed=RANK))


@case
def no_masks_on_one():
    model = sparse()
    if RANK == 1:
        model = dense()
        model.compile("sgd", "mse")
    started(model, moving())


@case
def no_data_on_one():
    def batches():
        if RANK == 1:
            raise OSError("the disk is gone")
        yield np.ones((4, 8)), np.ones((4, 4))

    started(
        sparse(), kso.callbacks.RigL(batches, frequency=4, end_step=80)
    ).move(4)


@case
def masks_came_apart():
    model = sparse()
    callback = started(model, moving())
    own = kso.prunable_weights(model)[0].parametrization
    # On JAX it raises here.
    own.assign_mask(np.roll(own.mask_value(), RANK, axis=0))
    callback.move(4)


@case
def other_weights_where_they_are_scored():
    keras.utils.set_random_seed(RANK)
    model = dense()
    model.compile("sgd", "mse")
    kso.prune(model, 0.5, score="snip", data=(np.ones((4, 8)), np.ones((4, 4))))


if BACKEND == "jax":

    @case
    def a_layout_that_does_not_fit():
        with mesh(".*a/kernel"):
            sparse(width=15)

    def sharded(storages, kind):
        """What public functions return, where each process has a half of each kernel."""
        from tests.models import returned

        with mesh(".*kernel$"):
            for number, storage in enumerate(storages):
                keras.utils.set_random_seed(number)
                model = returned.STORAGES[storage](returned.KINDS[kind]())
                model.compile("sgd", "mse")
                kso.report(model)

    SHARDED = {
        "sharded_masks": ("masked", "compact", "pruned", "adopted", "stripped"),
        "sharded_blocks": (
            "blocks",
            "to_blocks",
            "to_masked",
            "stripped, blocks",
        ),
        "sharded_thresholds": (
            "soft threshold",
            "magnitude",
            "feather",
            "quantized",
        ),
    }
    for name, storages in SHARDED.items():
        CASES[name] = functools.partial(sharded, storages, "attention")


def mesh(pattern):
    """Kernels whose path matches a pattern are cut along their outputs, half for each process."""
    devices = keras.distribution.list_devices()[::2]  # one of each process
    return model_parallel(devices, {pattern: (None, "model")})


def main():
    module, found = recipe_of_two(), {}
    module.begin(recipe.Place("two processes", RANK, 2, PORTS))
    scope = (
        module.strategy.scope
        if BACKEND == "tensorflow"
        else contextlib.nullcontext
    )
    for name in sys.argv[5:]:
        try:
            with scope():
                CASES[name]()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        with open(OUTPUT, "w") as stream:
            json.dump(found, stream)
        print(name, found[name], flush=True)


main()
