"""`Constant` and `OneShot`: one density from a step on."""

from typing import Any

import keras

from keras_sparse_ortho._checks import explains_density
from keras_sparse_ortho.schedules._schedule import Schedule


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class Constant(Schedule):
    """`d(t) = final_density`, with masks renewed from `begin_step` on.

    Args:
        final_density: Live fraction, in (0, 1].
        begin_step: First step at which a mask is renewed, or a part of the run (a float in
            [0, 1]). Before it, nothing is pruned.
        end_step: Last one, or a part of the run; `None` (default) if there is none.
        frequency: Steps between renewals. Default: a hundredth of the run, but 100 at most.

    Example:

    >>> schedule = Constant(0.1, begin_step=100, frequency=50)
    >>> [schedule.due(step) for step in (0, 100, 120, 150)]
    [False, True, False, True]
    """

    @explains_density
    def __init__(
        self,
        final_density: float,
        begin_step: int | float = 0,
        end_step: int | float | None = None,
        frequency: int | None = None,
    ) -> None:
        super().__init__(final_density, begin_step, end_step, frequency)

    def density(self, step: int) -> float:
        """`final_density` from `begin_step` on, and 1 before."""
        return self.final_density if step >= self._steps()[0] else 1.0

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {
            "final_density": self.final_density,
            "begin_step": self.begin_step,
            "end_step": self.end_step,
            "frequency": self.frequency,
        }


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class OneShot(Schedule):
    """`d(t) = 1` before `step`, and `final_density` from then on; one renewal, at `step`.

    Args:
        final_density: Live fraction, in (0, 1].
        step: When to prune: a step, or a part of the run (a float in [0, 1]).

    Example:

    >>> schedule = OneShot(0.1, step=500)
    >>> schedule.density(499), schedule.density(500), schedule.due(500), schedule.due(501)
    (1.0, 0.1, True, False)
    """

    @explains_density
    def __init__(self, final_density: float, step: int | float = 0) -> None:
        super().__init__(final_density, step, step, 1)

    def density(self, step: int) -> float:
        """1 before the step, `final_density` from it on."""
        return self.final_density if step >= self._steps()[0] else 1.0

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        return {"final_density": self.final_density, "step": self.begin_step}
