"""What torch itself sees of the models that public functions return: parameters and state."""

import copy
import io

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array
from tests.models.returned import CASES, RETURNED, x

pytestmark = pytest.mark.torch_only


def same(first, second):
    np.testing.assert_allclose(array(first(x)), array(second(x)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_all_weights_are_in_the_state_and_come_back(name):
    import torch

    model = RETURNED[name]()
    keras.utils.set_random_seed(0)
    other = RETURNED[name]()
    for tensor in other.state_dict().values():
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            tensor.zero_()
    held = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    assert {id(v.value) for v in model.weights} <= held
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    values = list(torch.load(file).values())
    assert len(values) == len(other.state_dict())
    other.load_state_dict(dict(zip(other.state_dict(), values, strict=True)))
    same(model, other)


@pytest.mark.parametrize("name", CASES)
def test_a_module_around_it_has_its_parameters(name):
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = RETURNED[name]()

    net = Net()
    trained = {id(tensor) for tensor in net.parameters() if tensor.requires_grad}
    assert trained == {id(v.value) for v in net.inner.trainable_variables}
    torch.nn.functional.mse_loss(net.inner(x), torch.zeros(8, 8)).backward()
    without = [v.path for v in net.inner.trainable_variables if v.value.grad is None]
    assert not without


@pytest.mark.parametrize("name", CASES)
def test_a_deep_copy_computes_the_same_and_shares_nothing(name):
    model = RETURNED[name]()
    twin = copy.deepcopy(model)
    same(model, twin)
    assert not {id(v.value) for v in model.weights} & {id(v.value) for v in twin.weights}
    if any(weight.storage for weight in kso.prunable_weights(model)):
        assert len(twin.state_dict()) == len(model.state_dict())


def test_a_refusal_leaves_the_parameters():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    before = model.state_dict(keep_vars=True)
    with pytest.raises(kso.errors.BudgetError):
        kso.sparsify(model, 1e-3)
    after = model.state_dict(keep_vars=True)
    assert list(map(id, before.values())) == list(map(id, after.values()))
