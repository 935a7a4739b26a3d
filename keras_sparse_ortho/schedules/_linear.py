"""`Linear`: a density that falls evenly."""

from typing import Any

import keras

from keras_sparse_ortho.schedules._polynomial import Polynomial


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class Linear(Polynomial):
    """Density that falls evenly from `initial_density` to `final_density`.

    `d(t) = final + (initial - final) * (1 - u) ** 1`, where `u` in [0, 1] is the part of the
    way from `begin_step` to `end_step`; see `Polynomial`.

    Args:
        final_density: Live fraction at `end_step` and after it, in (0, 1].
        begin_step: First step at which a mask is renewed; nothing is pruned before it.
        end_step: Last one, after `begin_step`.
        initial_density: Live fraction at `begin_step`.
        frequency: Steps between renewals.

    Example:

    >>> schedule = Linear(0.1, begin_step=0, end_step=1000)
    >>> round(schedule.density(500), 4)
    0.55
    """

    def __init__(
        self,
        final_density: float,
        begin_step: int,
        end_step: int,
        initial_density: float = 1.0,
        frequency: int = 100,
    ) -> None:
        super().__init__(final_density, begin_step, end_step, initial_density, 1.0, frequency)

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        config = super().get_config()
        del config["power"]
        return config
