"""tf_keras and TFMOT's pruning, imported on use: other backends collect these files, too."""

import pytest

import keras_sparse_ortho as kso


@pytest.fixture(scope="module")
def tf_keras():
    return kso.tfmot.register_initializers()


@pytest.fixture(scope="module")
def sparsity(tf_keras):
    from tensorflow_model_optimization.sparsity import keras as sparsity

    return sparsity
