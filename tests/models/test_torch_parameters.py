"""What torch itself sees of the models that public functions return: parameters and state."""

import copy
import io

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.models import ResultChecks
from tests.helpers import Chain, array
from tests.models.returned import CASES, RETURNED, x

pytestmark = pytest.mark.torch_only


def same(first, second):
    np.testing.assert_allclose(
        array(first(x)), array(second(x)), rtol=1e-5, atol=1e-6
    )


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
    trained = {
        id(tensor) for tensor in net.parameters() if tensor.requires_grad
    }
    assert trained == {id(v.value) for v in net.inner.trainable_variables}
    torch.nn.functional.mse_loss(net.inner(x), torch.zeros(8, 8)).backward()
    without = [
        v.path for v in net.inner.trainable_variables if v.value.grad is None
    ]
    assert not without


@pytest.mark.parametrize("name", CASES)
def test_a_deep_copy_computes_the_same_and_shares_nothing(name):
    model = RETURNED[name]()
    twin = copy.deepcopy(model)
    same(model, twin)
    assert not {id(v.value) for v in model.weights} & {
        id(v.value) for v in twin.weights
    }
    if any(weight.storage for weight in kso.prunable_weights(model)):
        assert len(twin.state_dict()) == len(model.state_dict())


@pytest.mark.parametrize("storage", ["masked", "compact", "blocks"])
@pytest.mark.parametrize("made", ["Sequential", "subclassed"])
def test_what_fails_leaves_parameters_and_modules(made, storage, monkeypatch):
    def fails(checks, model):
        raise RuntimeError("late")

    def held():
        state = model.state_dict(keep_vars=True)
        return [
            (name, id(value))
            for name, value in (*state.items(), *model.named_modules())
        ]

    layers = [keras.layers.Dense(64, name=name) for name in "ab"]
    model = Chain(*layers) if made == "subclassed" else keras.Sequential(layers)
    model(np.zeros((1, 64), "float32"))
    before = held()
    structure = kso.Block(16, 16, regular=True) if storage == "blocks" else None
    with pytest.raises(kso.errors.BudgetError):
        kso.sparsify.in_place(model, 1e-3)
    monkeypatch.setattr(ResultChecks, "complete", fails)
    with pytest.raises(RuntimeError, match="late"):
        kso.sparsify.in_place(
            model, 0.25, storage=storage, structure=structure, seed=0
        )
    assert held() == before
    monkeypatch.undo()
    model = kso.sparsify(
        model, 0.25, structure=kso.Block(16, 16, regular=True), seed=0
    )
    before = held()
    monkeypatch.setattr(ResultChecks, "complete", fails)
    # Whose layers have records of their own.
    with pytest.raises(RuntimeError, match="late"):
        kso.convert.in_place(
            model, "compact" if storage == "masked" else storage
        )
    assert held() == before
