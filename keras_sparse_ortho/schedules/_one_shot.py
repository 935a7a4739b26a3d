"""`OneShot`: prune once."""

from typing import Any

import keras

from keras_sparse_ortho.schedules._schedule import Schedule


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class OneShot(Schedule):
    """`d(t) = 1` before `step`, and `final_density` from then on; one renewal, at `step`.

    Args:
        final_density: Live fraction, in (0, 1].
        step: When to prune.

    Example:

    >>> schedule = OneShot(0.1, step=500)
    >>> schedule.density(499), schedule.density(500), schedule.due(500), schedule.due(501)
    (1.0, 0.1, True, False)
    """

    def __init__(self, final_density: float, step: int = 0) -> None:
        super().__init__(final_density, step, step, 1)

    def density(self, step: int) -> float:
        """1 before the step, `final_density` from it on."""
        return self.final_density if step >= self.begin_step else 1.0

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {"final_density": self.final_density, "step": self.begin_step}
