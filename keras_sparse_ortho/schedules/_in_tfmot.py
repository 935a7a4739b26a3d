"""Schedules inside TFMOT's pruning wrapper, which calls them with its own step."""

import sys
import traceback
import weakref
from typing import NamedTuple, Protocol

from keras_sparse_ortho._types import Config, Tensor


class _Schedule(Protocol):
    """The part of a `Schedule` that is needed here."""

    begin_step: int | float
    end_step: int | float | None
    frequency: int | None

    @property
    def is_resolved(self) -> bool: ...

    def resolved(self, steps: int | None, start: int = 0) -> "_Schedule": ...

    def at(self, step: int) -> float: ...


def answer_tfmot(schedule: _Schedule, step: Tensor) -> tuple[Tensor, Tensor]:
    """Whether TFMOT prunes at a step, and to which sparsity, as tensors of TensorFlow.

    TFMOT counts the update that is about to be made, from 1: its step `s` is `s - 1` here.
    """
    import tensorflow as tf

    answer = tf.autograph.experimental.do_not_convert(_answer)
    return answer(schedule, step)


def _answer(schedule: _Schedule, step: Tensor) -> tuple[Tensor, Tensor]:
    import tensorflow as tf

    plan = _in_steps(schedule)
    if plan is None:
        return tf.constant(False), tf.constant(0.0)
    begin = int(plan.begin_step)
    frequency = plan.frequency or 1
    step = tf.cast(step, tf.int64)
    executed = step - 1
    since = executed - begin
    is_regular = tf.equal(since % frequency, 0)
    is_due = (since >= 0) & is_regular
    if plan.end_step is None:
        sparsity = 1 - plan.at(begin)
        return is_due, tf.constant(sparsity, tf.float32)
    end = int(plan.end_step)
    moments = [*range(begin, end, frequency), end]
    sparsities = [1 - plan.at(moment) for moment in moments]
    # Rounded up, as the last interval may be shorter.
    number = (since + frequency - 1) // frequency
    number = tf.clip_by_value(number, 0, len(moments) - 1)
    is_due &= executed < end
    is_due |= tf.equal(executed, end)
    table = tf.constant(sparsities, tf.float32)
    return is_due, tf.gather(table, number)


class _Run(NamedTuple):
    """A run of `steps` updates, with `start` updates before it."""

    steps: int | None
    start: int


# Schedules in fractions of a run, and the same in the steps of their last `fit`.
_PLANS: weakref.WeakKeyDictionary[_Schedule, _Schedule] = (
    weakref.WeakKeyDictionary()
)


def _in_steps(schedule: _Schedule) -> _Schedule | None:
    """The schedule in steps; those of the running or last `fit` where it is in fractions of a run.

    `None` while tf_keras only infers shapes, in a graph that is thrown away.
    """
    if schedule.is_resolved:
        return schedule.resolved(None)
    run = _running_fit()
    if run.steps is not None:
        _PLANS[schedule] = schedule.resolved(run.steps, run.start)
    plan = _PLANS.get(schedule)
    if plan is None and not _infers_shapes():
        return schedule.resolved(None)  # which raises
    return plan


def _infers_shapes() -> bool:
    import tensorflow as tf

    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if getattr(graph, "name", "").endswith("_scratch_graph"):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def _running_fit() -> _Run:
    """The run of the `fit` of a tf_keras model that traces this call.

    Read from the stack: TFMOT hands a schedule nothing but the step.
    """
    import tensorflow as tf

    caller = sys._getframe(1)
    for frame, _ in traceback.walk_stack(caller):
        arguments = frame.f_locals
        callbacks = arguments.get("callbacks")
        params: Config = getattr(callbacks, "params", None) or {}
        steps = params.get("steps")
        if frame.f_code.co_name != "fit" or not steps:
            continue
        epochs = params["epochs"]
        epochs -= arguments.get("initial_epoch", 0)
        iterations = arguments["self"].optimizer.iterations
        with tf.init_scope():
            start = int(iterations.numpy())
        return _Run(epochs * steps, start)
    return _Run(None, 0)
