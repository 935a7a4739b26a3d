"""`update(step)` in custom training loops, on models that are not compiled."""

import functools
import pathlib
import re

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import SET, RigL, TargetDensity, UpdateMasks
from keras_sparse_ortho.schedules import Cubic
from tests.callbacks.runs import live
from tests.helpers import array, assert_same, optimizer_slots

pytestmark = pytest.mark.each_backend
BACKEND = keras.backend.backend()
SIZE = 32 * 64 + 64 * 4
FALL = Cubic(0.25, begin_step=0, end_step=16, frequency=2)


def page(*replaced, end="## Every method"):
    """What docs/custom_loops.md defines: data, a network, and a loop for each backend."""
    text = (
        pathlib.Path(__file__).parents[2] / "docs/custom_loops.md"
    ).read_text(encoding="utf-8")
    names, blocks = (
        {},
        re.findall(r"```python\n(.*?)```", text.partition(end)[0], re.DOTALL),
    )
    exec("\n".join(blocks).replace(*(replaced or ("", ""))), names)
    return names


PAGE = page()
LOSS, DATA = PAGE["loss_fn"], (PAGE["x"], PAGE["y"])


def network():
    keras.utils.clear_session()  # what SET and RigL draw follows from the names of layers
    return PAGE["make"]()


def keras_on_torch(model, callback, optimizer=None):
    """Keras' guide on loops in torch, with a Keras optimizer."""
    import torch

    optimizer = optimizer or keras.optimizers.Adam(0.01)
    callback.set_model(model)
    for step in range(PAGE["steps"]):
        x, y = PAGE["batches"][step % len(PAGE["batches"])]
        callback.update(step, optimizer)
        loss = LOSS(torch.from_numpy(y), model(x, training=True))
        model.zero_grad()
        trainable_weights = list(model.trainable_weights)
        loss.backward()
        with torch.no_grad():
            optimizer.apply(
                [v.value.grad for v in trainable_weights], trainable_weights
            )
    callback.update(step + 1, optimizer)


LOOPS = [
    PAGE[f"{BACKEND}_loop"],
    *([keras_on_torch] if BACKEND == "torch" else []),
]
METHODS = {
    "UpdateMasks": (lambda: pruned(), UpdateMasks),
    "TargetDensity": (
        lambda: kso.parametrize(network(), kso.SoftThreshold()),
        lambda: TargetDensity(0.25, FALL),
    ),
    "SET": (lambda: sparse(), lambda: SET(frequency=2, end_step=16)),
    "RigL": (
        lambda: sparse(),
        lambda: RigL(DATA, 8, frequency=2, end_step=16, loss=LOSS),
    ),
}


def sparse():
    return kso.sparsify(network(), 0.25, seed=0)


def began(callback, model):
    callback.set_model(model)
    return callback


def pruned():
    return kso.parametrize(network(), kso.MagnitudeMask(FALL))


def untrained(callback, model, steps):
    """The steps at which something was due, in a loop that trains nothing."""
    began(callback, model)
    due = []
    for step in steps:
        first = model.trainable_variables[0]
        # What JAX takes for a step of training: other arrays.
        first.assign(first.value + 0)
        due += [step] * callback.update(step)
    return due


@pytest.mark.core
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("method", METHODS)
def test_a_loop_as_in_the_guides(method, loop):
    make, callback = METHODS[method]
    model, callback = make(), callback()
    before = [weight.mask for weight in kso.prunable_weights(model)]
    start = model.get_weights()[0]
    loop(model, callback)
    assert live(model) == round(0.25 * SIZE)
    assert (model.get_weights()[0] != start).any()
    kinds = 0
    for weight, mask in zip(kso.prunable_weights(model), before, strict=True):
        now = weight.mask
        assert (now != mask).any()
        assert not weight.raw_value()[~now].any()
        for slot, *_ in optimizer_slots(callback.optimizer, weight.variable):
            kinds += 1
            assert array(slot)[now].any()
            assert not array(slot)[~now].any()
    assert kinds == 4  # two moments of two weights
    kso.strip(model)


@pytest.mark.core
@pytest.mark.parametrize("method", METHODS)
def test_a_loop_does_what_fit_does(method):
    make, callback = METHODS[method]
    whole, model = make(), make()
    whole.compile(
        keras.optimizers.SGD(0.05), LOSS, run_eagerly=BACKEND != "jax"
    )
    whole.fit(
        *DATA,
        batch_size=32,
        epochs=5,
        shuffle=False,
        verbose=0,
        callbacks=[callback()],
    )
    loop = functools.partial(
        keras_on_torch, optimizer=keras.optimizers.SGD(0.05)
    )
    if BACKEND != "torch":
        loop = page(
            "keras.optimizers.Adam(1e-2)", "keras.optimizers.SGD(0.05)"
        )[f"{BACKEND}_loop"]
    loop(model, callback())
    for theirs, ours in zip(whole.weights, model.weights, strict=True):
        np.testing.assert_allclose(
            array(ours), array(theirs), atol=1e-5, err_msg=ours.path
        )


def test_only_what_is_due_is_done():
    model, callback = sparse(), SET(frequency=4, end_step=12)
    assert untrained(callback, model, (*range(6), 7, 9, 10, 13, 16)) == [4, 9]
    assert not callback.update(16)


def test_steps_that_start_again_in_each_epoch_are_refused():
    model, callback = pruned(), UpdateMasks()
    assert untrained(callback, model, range(4)) == [0, 2]
    with pytest.raises(
        ValueError, match=r"over epochs.*Received: step=0, after step=3"
    ):
        callback.update(0)
    again = began(UpdateMasks(), model)
    with pytest.raises(
        ValueError, match=r"given to `update`.*Received: step=0, and the mask"
    ):
        again.update(0)
    again.update(4)  # a run that goes on
    assert live(model) < SIZE


def test_a_run_that_is_resumed_goes_on():
    whole, parts = pruned(), pruned()
    untrained(UpdateMasks(), whole, range(20))
    untrained(UpdateMasks(), parts, range(9))
    assert live(parts) > live(whole)
    untrained(UpdateMasks(), parts, range(9, 20))
    assert_same(whole.get_weights(), parts.get_weights())


def test_the_length_of_a_loop():
    model = kso.parametrize(network(), kso.SoftThreshold())
    with pytest.raises(
        ValueError, match=r"needs a `schedule`.*Received: schedule=None"
    ):
        began(TargetDensity(0.25), model).update(0)
    model = kso.parametrize(network(), kso.MagnitudeMask(Cubic(0.25)))
    callback = UpdateMasks()
    with pytest.raises(ValueError, match=r"known before training.*steps=None"):
        began(callback, model).update(0)
    callback.set_params({"epochs": 2, "steps": 10})
    assert untrained(callback, model, (0, 14)) == [0, 14]
    assert live(model) == round(0.25 * SIZE)
    with pytest.raises(ValueError, match="`end_step` must be given"):
        began(SET(), sparse()).update(0)


@pytest.mark.core
def test_optimizers_that_are_refused():
    callback = SET(frequency=1, end_step=9)
    with pytest.raises(
        ValueError, match=r"call `set_model\(model\)`.*Received: no model"
    ):
        callback.update(0)
    began(callback, sparse())
    with pytest.raises(
        TypeError, match=r"must be a Keras optimizer.*optimizer='adam'"
    ):
        callback.update(0, "adam")
    other = keras.optimizers.Adam()
    other.build(network().trainable_variables)
    with pytest.raises(
        ValueError, match=r"must train this model.*Received: a Adam that"
    ):
        callback.update(0, other)
    if BACKEND == "torch":
        import torch

        with pytest.raises(ValueError, match="must train this model"):
            callback.update(0, torch.optim.SGD(network().parameters(), lr=0.1))
    assert callback.optimizer is None
    with pytest.raises(
        ValueError,
        match=r"call `update\(step\)`.*Received: model=.*not compiled",
    ):
        callback.on_epoch_begin(0)


def test_the_end_of_a_loop_checks_the_density():
    model, callback = pruned(), UpdateMasks()
    untrained(callback, model, range(9))
    with pytest.warns(
        kso.errors.DensityWarning,
        match="ends at step 16, and the run at step 8",
    ):
        callback.on_train_end()
    with pytest.warns(kso.errors.DensityWarning):
        kso.strip(model)


@pytest.mark.jax_only
def test_a_stateless_loop_that_leaves_the_model_as_it_is():
    callback = began(UpdateMasks(), pruned())
    callback.update(0)
    with pytest.warns(
        UserWarning, match=r"update_stateless\(step.*after step=0"
    ):
        callback.update(2)
    callback.update(4)  # told once


@pytest.mark.jax_only
def test_state_that_is_no_state_of_the_model():
    model = pruned()
    callback = began(UpdateMasks(), model)
    state = (model.trainable_variables, model.non_trainable_variables)
    after = callback.update_stateless(0, (*state, "metrics"))
    assert after[2] == "metrics"
    assert callback.update_stateless(1, state) is state  # nothing was due
    with pytest.raises(
        ValueError, match=r"`state` must hold.*Received: \[4, 3\] values"
    ):
        callback.update_stateless(2, (state[0], state[1][:3]))


@pytest.mark.jax_only
def test_values_that_a_step_frees_are_not_read():
    import jax

    model = sparse()
    before = live(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax, "jit", functools.partial(jax.jit, donate_argnums=(0,))
        )
        LOOPS[0](model, SET(frequency=2, end_step=16))
    assert live(model) == before


@pytest.mark.torch_only
@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "options", "starts"),
    [
        ("AdamW", {"amsgrad": True}, [0.0, 0.0, 0.0]),
        ("SGD", {"momentum": 0.9}, [0.0]),
        ("Adagrad", {"initial_accumulator_value": 0.25}, [0.25]),
        ("Rprop", {}, [0.0, 0.01]),
        ("Adafactor", {}, []),
    ],
)
def test_the_state_of_torch_optimizers(name, options, starts):
    import torch

    model = sparse()
    optimizer = getattr(torch.optim, name)(
        model.parameters(), lr=0.01, **options
    )
    callback = began(SET(frequency=1, fraction=1.0, end_step=100), model)
    callback.update(0, optimizer)
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(4, 32)).square().sum().backward()
        optimizer.step()
    weight = kso.prunable_weights(model)[0]
    before = weight.mask
    callback.update(1)
    changed = before != weight.mask
    slots = optimizer_slots(optimizer, weight.variable)
    assert [slot.start for slot in slots] == starts
    for slot in slots:
        np.testing.assert_allclose(array(slot.tensor)[changed], slot.start)
        assert (array(slot.tensor)[before & ~changed] != slot.start).any()


@pytest.mark.core
@pytest.mark.parametrize(
    "loss", ["sparse_categorical_crossentropy", "function", "torch"]
)
def test_the_loss_of_rigl(loss):
    model, compiled, (x, y) = sparse(), sparse(), DATA
    compiled.compile(
        loss=LOSS if loss != "sparse_categorical_crossentropy" else loss
    )
    if loss == "torch" and BACKEND == "torch":
        import torch

        loss, y = torch.nn.CrossEntropyLoss(), y.astype("int64")
    elif loss in ("torch", "function"):
        loss = lambda y, y_pred: LOSS(y, y_pred)  # noqa: E731
    options = {"batch_size": 8, "frequency": 1, "end_step": 9}
    began(RigL((x, y), loss=loss, **options), model).update(1)
    began(RigL(DATA, **options), compiled).update(1)
    for a, b in zip(
        kso.prunable_weights(model), kso.prunable_weights(compiled), strict=True
    ):
        np.testing.assert_array_equal(a.mask, b.mask)


@pytest.mark.core
def test_what_rigl_refuses():
    with pytest.raises(ValueError, match=r"`loss` must be.*Received: loss=3"):
        RigL(DATA, loss=3)
    x, y = DATA
    for given, message in (
        ((x, y, np.ones(len(x))), "Sample weights need"),
        ([(x[:8],)], r"give `data` as `\(x, y\)`.*Received: y=None"),
    ):
        rigl = RigL(
            given,
            8,
            frequency=1,
            end_step=9,
            loss=lambda y, y_pred: LOSS(y, y_pred),
        )
        with pytest.raises(ValueError, match=message):
            began(rigl, sparse()).update(1)


@pytest.mark.torch_only
@pytest.mark.core
def test_the_page_on_torch():
    """On the other backends the tests of the pages run it."""
    assert kso.report(page(end="\0")["model"]).density == pytest.approx(
        0.1, abs=0.01
    )
