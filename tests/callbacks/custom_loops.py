"""Custom training loops as Keras' guides write them, with a callback that changes masks."""

import keras
import numpy as np

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BATCH, BATCHES = 8, 4


def data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * BATCHES, 16)).astype("float32")
    return x, (np.arange(len(x)) % 4).astype("int32")


def batches():
    x, y = data()
    for start in range(0, len(x), BATCH):
        yield x[start : start + BATCH], y[start : start + BATCH]


def gradient_tape(model, callback, optimizer, epochs=5):
    """https://keras.io/guides/writing_a_custom_training_loop_in_tensorflow"""
    import tensorflow as tf

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss_value = LOSS(y, logits)
        grads = tape.gradient(loss_value, model.trainable_weights)
        optimizer.apply(grads, model.trainable_weights)
        return loss_value

    callback.set_model(model)
    step = 0
    for _ in range(epochs):
        for x, y in batches():
            callback.update(step, optimizer)
            train_step(tf.constant(x), tf.constant(y))
            step += 1
    callback.update(step, optimizer)


def native_torch(model, callback, optimizer, epochs=5):
    """https://keras.io/guides/writing_a_custom_training_loop_in_torch, with a torch optimizer."""
    import torch

    loss_fn = torch.nn.CrossEntropyLoss()
    callback.set_model(model)
    step = 0
    for _ in range(epochs):
        for inputs, targets in batches():
            callback.update(step, optimizer)
            logits = model(torch.from_numpy(inputs), training=True)
            loss = loss_fn(logits, torch.from_numpy(targets).long())
            model.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    callback.update(step, optimizer)


def keras_on_torch(model, callback, optimizer, epochs=5):
    """The same guide, with a Keras optimizer."""
    import torch

    callback.set_model(model)
    step = 0
    for _ in range(epochs):
        for inputs, targets in batches():
            callback.update(step, optimizer)
            loss = LOSS(torch.from_numpy(targets), model(inputs, training=True))
            model.zero_grad()
            trainable_weights = list(model.trainable_weights)
            loss.backward()
            gradients = [v.value.grad for v in trainable_weights]
            with torch.no_grad():
                optimizer.apply(gradients, trainable_weights)
            step += 1
    callback.update(step, optimizer)


def stateless_jax(model, callback, optimizer, epochs=5):
    """https://keras.io/guides/writing_a_custom_training_loop_in_jax"""
    import jax

    def compute_loss_and_updates(trainable_variables, non_trainable_variables, x, y):
        y_pred, non_trainable_variables = model.stateless_call(
            trainable_variables, non_trainable_variables, x, training=True
        )
        return LOSS(y, y_pred), non_trainable_variables

    grad_fn = jax.value_and_grad(compute_loss_and_updates, has_aux=True)

    @jax.jit
    def train_step(state, data):
        trainable_variables, non_trainable_variables, optimizer_variables = state
        x, y = data
        (loss, non_trainable_variables), grads = grad_fn(
            trainable_variables, non_trainable_variables, x, y
        )
        trainable_variables, optimizer_variables = optimizer.stateless_apply(
            optimizer_variables, grads, trainable_variables
        )
        return loss, (trainable_variables, non_trainable_variables, optimizer_variables)

    optimizer.build(model.trainable_variables)
    state = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    callback.set_model(model)
    step = 0
    for _ in range(epochs):
        for batch in batches():
            state = callback.update_stateless(step, state, optimizer)
            _, state = train_step(state, batch)
            step += 1
    state = callback.update_stateless(step, state, optimizer)
    kept = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    for variables, values in zip(kept, state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


LOOPS = {
    "tensorflow": [gradient_tape],
    "jax": [stateless_jax],
    "torch": [native_torch, keras_on_torch],
}[keras.backend.backend()]


def optimizer_for(loop, model):
    if loop is native_torch:
        import torch

        return torch.optim.Adam(model.parameters(), lr=0.01)
    return keras.optimizers.Adam(0.01)
