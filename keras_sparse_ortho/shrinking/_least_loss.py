"""The goal of `shrink(target="micro")`: the array of least loss within the limits of a device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_sparse_ortho.export import assigned_variables
from keras_sparse_ortho.models import input_specs
from keras_sparse_ortho.shrinking._examples import Examples
from keras_sparse_ortho.shrinking._max_drop import MaxDrop
from keras_sparse_ortho.shrinking._micro_report import MicroReport, least_loss
from keras_sparse_ortho.shrinking._micro_search import MicroSearch, MicroTrials
from keras_sparse_ortho.shrinking._microcontroller import Microcontroller
from keras_sparse_ortho.shrinking._shrink_report import Trial
from keras_sparse_ortho.shrinking._trials import Terms

ANY_DROP = 1.0  # scores are between 0 and 1


class LeastLoss:
    """The array of least loss within flash and arena.

    Attributes:
        limits: dict. `max_flash` and `max_ram`, if they are given.

    Args:
        file: Path. Where the header or the LiteRT file is written.
        device: Microcontroller. The limits.
    """

    default_drop: MaxDrop = ANY_DROP

    def __init__(self, file: Path, device: Microcontroller) -> None:
        self.limits: Mapping[str, float] = device.limits
        self._file = file
        self._device = device

    def check_model(self, model: keras.Model) -> None:
        """ValueError for a compressed array, and for a model that assigns variables in a call."""
        _check_for_micro(model, self._file)

    def run(
        self,
        model: keras.Model,
        examples: Examples,
        folder: Path,
        terms: Terms,
    ) -> MicroTrials:
        """Makes the files that the time allows; the arguments are those of `Trials`."""
        trials = MicroTrials(model, examples, folder, terms, self._device)
        MicroSearch(trials).run()
        return trials

    def best(self, trials: Sequence[Trial], max_drop: MaxDrop) -> Trial | None:
        """The trial of least loss within the limits; `None` if there is none."""
        return least_loss(trials, max_drop, self._device)

    def report(self, **figures: Any) -> MicroReport:
        """The report on all trials; the arguments are those of `ShrinkReport`."""
        return MicroReport(**figures, device=self._device)


def _check_for_micro(model: keras.Model, file: Path) -> None:
    """ValueError for a compressed array, and for a model that assigns variables in a call."""
    if file.name.endswith(".gz"):
        raise ValueError(
            'With `target="micro"`, `path` must be a header with the C array, *.h, or a LiteRT '
            "file, *.tflite: a microcontroller reads neither from gzip. "
            f"Received: path={str(file)!r}"
        )
    specs = input_specs(model)
    if specs is None:  # of which the export says what is missing
        return
    zeros = keras.tree.map_structure(
        lambda spec: keras.ops.zeros(spec.shape, spec.dtype), specs
    )
    assigned = assigned_variables(model, zeros)
    if assigned:
        raise ValueError(
            'With `target="micro"`, a call of the model must assign no variables: each row would '
            "be judged with the state that others left. Write the file with `export_litert` and "
            "`c_array`, which keep READ_VARIABLE and ASSIGN_VARIABLE; or make the state an input "
            f"and an output of the model. Received: model {model.name!r}, variables {assigned[:5]}"
        )
