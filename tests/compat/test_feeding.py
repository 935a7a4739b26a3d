"""Every way to feed `fit`: the same batches, and so the same weights."""

import grain
import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import SET, RigL, TargetDensity, UpdateMasks
from tests.helpers import array, assert_same, jit, jit_if_quicker

pytestmark = [
    pytest.mark.core,
    # Keras', at the end of every epoch whose length it does not know.
    pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # grain's
]

L = keras.layers
BATCH, BATCHES = 4, 5
RNG = np.random.default_rng(0)
X, Y = (
    RNG.normal(size=(BATCH * BATCHES, n)).astype("float32") for n in (12, 4)
)


class Samples:
    """A source of samples with random access."""

    def __len__(self):
        return len(X)

    def __getitem__(self, k):
        return X[k], Y[k]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return BATCHES

    def __getitem__(self, k):
        part = slice(k * BATCH, (k + 1) * BATCH)
        return X[part], Y[part]


def tf_data():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def loader():
    import torch

    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(data, batch_size=BATCH)


FEEDS = {
    "PyDataset": Batches,
    "tf.data": tf_data,
    "DataLoader": loader,
    "grain": lambda: grain.MapDataset.source(Samples()).batch(BATCH),
    "grain, iterated": lambda: FEEDS["grain"]().repeat().to_iter_dataset(),
}
P = kso.parametrizations
METHODS = {
    "GMP": lambda dense, data: (
        kso.parametrize(dense, kso.MagnitudeMask(kso.schedules.Cubic(0.25))),
        UpdateMasks(),
    ),
    "DNW": lambda dense, data: (
        kso.parametrize(dense, P.StraightThroughTopK(0.25)),
        UpdateMasks(),
    ),
    "STR": lambda dense, data: (
        kso.parametrize(dense, kso.SoftThreshold()),
        TargetDensity(0.25),
    ),
    "SET": lambda dense, data: (
        kso.sparsify(dense, 0.25, seed=0),
        SET(frequency=2),
    ),
    "RigL": lambda dense, data: (
        kso.sparsify(dense, 0.25, seed=0),
        RigL(data, frequency=2),
    ),
}
# Those whose schedule is in parts of the run.
NEED_LENGTH = ("GMP", "STR", "SET", "RigL")


def trained(method, feed, jit_compile, **options):
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    dense = keras.Sequential(
        [keras.Input((12,)), L.Dense(16, activation="relu"), L.Dense(4)]
    )
    model, callback = METHODS[method](dense, feed)
    model.compile("adam", "mse", jit_compile=jit_compile)
    model.fit(
        feed,
        epochs=4,
        shuffle=False,
        verbose=0,
        callbacks=[callback],
        **options,
    )
    return [array(v) for v in model.weights]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("feed", FEEDS)
def test_the_same_weights_from_every_feed(feed, method):
    # Without XLA Keras counts on TensorFlow a step too many in an epoch of unknown length.
    jit_compile = jit(always=True) if feed == "grain" else jit_if_quicker()
    expected = trained(method, Batches(), jit_compile)
    iterated = feed == "grain, iterated"
    if iterated and method in NEED_LENGTH:
        once = FEEDS["grain"]().to_iter_dataset()  # which has no length
        with pytest.raises(
            ValueError, match=r"a `schedule`|`end_step` must|a number of steps"
        ):
            trained(method, once, jit_compile)
    options = {"steps_per_epoch": BATCHES} if iterated else {}
    found = trained(method, FEEDS[feed](), jit_compile, **options)
    assert_same(expected, found)
