"""What is said where a schedule would begin anew, because the optimizer has lost its steps."""

from typing import Any

from keras_sparse_ortho._keras_internals import applied_batches, counter_of_batches

_WAYS = (
    "Build the optimizer before weights are loaded, "
    "`model.optimizer.build(model.trainable_variables)`, so that its state is loaded, too; load "
    "the whole model with `keras.models.load_model`; or, if it was compiled again on purpose, tell "
    "the optimizer where the run stands"
)
_ANEW = "To begin a run of its own call `fit` without `initial_epoch`. "


def restart_error(callback: Any, step: int, found: str, *, can_begin: bool = False) -> ValueError:
    """An error for a run that goes on, with an optimizer that counts from the start.

    Args:
        callback: A `StepCallback` whose schedule would begin anew.
        step: The optimizer's step.
        found: What shows that the run has begun before.
        can_begin: Whether it may begin anew on this model, if that is what is wanted.
    """
    optimizer, lost = callback._watched.optimizer, callback.lost_batches
    seen, accumulated = applied_batches(optimizer)
    stands = lost + seen if lost else ("step" if accumulated == 1 else "batches")
    way = f"`model.optimizer.{counter_of_batches(optimizer)}.assign({stands})`"
    return ValueError(
        f"{type(callback).__name__} follows the steps of the optimizer, and these were lost: its "
        f"schedule would begin anew. {_WAYS}, {way}. {_ANEW if can_begin else ''}"
        f"Received: the optimizer at step {step}, {found}"
    )


def run_position(step: int, start: int, in_steps: bool) -> int:
    """The step of a run at which a schedule stands when training begins.

    Args:
        step: Updates of the optimizer so far.
        start: Updates before the run; below 0 where the optimizer does not count what was made of
            it already (`initial_epoch`), which schedules in parts of a run make up for.
        in_steps: Whether the schedule is in steps.
    """
    return step if in_steps else step - min(start, 0)
