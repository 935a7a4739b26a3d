"""What is said where a schedule would begin anew, because the optimizer has lost its steps."""

from typing import Any

_WAYS = (
    "Build the optimizer before weights are loaded, "
    "`model.optimizer.build(model.trainable_variables)`, so that its state is loaded, too; load "
    "the whole model with `keras.models.load_model`; or, if it was compiled again on purpose, tell "
    "the optimizer where the run stands, `model.optimizer.iterations.assign(step)`"
)


def restart_error(callback: Any, step: int, found: str) -> ValueError:
    """An error for a run that goes on, with an optimizer that counts from the start.

    Args:
        callback: Whose schedule would begin anew.
        step: The optimizer's step.
        found: What shows that the run has begun before.
    """
    return ValueError(
        f"{type(callback).__name__} follows the steps of the optimizer, and these were lost: its "
        f"schedule would begin anew. {_WAYS}. Received: the optimizer at step {step}, {found}"
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
