"""The report of `shrink(target="micro")`: flash, arena and operators of each file."""

import dataclasses
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from keras_sparse_ortho._files import path_of
from keras_sparse_ortho._keras_internals import without_warnings
from keras_sparse_ortho._text import printable_lines
from keras_sparse_ortho.export import c_array
from keras_sparse_ortho.shrinking._max_drop import MaxDrop
from keras_sparse_ortho.shrinking._microcontroller import (
    Microcontroller,
    MicroFigures,
)
from keras_sparse_ortho.shrinking._shrink_report import ShrinkReport, Trial

HEADER = ".h"  # the ending of a file with a C array
_NAME_WIDTH = 42


@dataclasses.dataclass(frozen=True, repr=False)
class MicroReport(ShrinkReport):
    """The trials of `shrink(target="micro")`, and the written one; print it.

    Attributes:
        device: Microcontroller. The limits; other attributes are those of `ShrinkReport`.
    """

    device: Microcontroller = dataclasses.field(kw_only=True)

    def write(self, trial: Trial, path: str | os.PathLike[str]) -> None:
        """Writes the array of a trial of the frontier, `*.h`, or its LiteRT file.

        Args:
            trial: One of `frontier`, or `taken`.
            path: str or path. With the ending `.h` a header, as `c_array` writes it, with the
                array `model_data`; else the LiteRT file, as for Vela and `load_litert`.

        Raises:
            ValueError: If the file of this trial was not kept, as another one beats it.
        """
        target = path_of("path", path)
        if target.suffix != HEADER:
            super().write(trial, target)
            return
        content = self.content_of(trial)
        assert trial.micro is not None  # trials with files have figures
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / target.with_suffix(".tflite").name
            file.write_bytes(content)
            with without_warnings():
                c_array(
                    file,
                    target,
                    packed=trial.micro.is_packed,
                    ram=trial.micro.ram,
                )

    @property
    def words(self) -> tuple[str, ...]:
        """Why this file, what it takes, and the operators of each."""
        if self.taken is None:
            return (*self._words_without_a_file(self._files), *self._operators)
        assert self.taken.micro is not None
        words = [
            f"Written: {self.taken.name}, with the least loss within the limits.",
            *self._words_on_outputs(self.taken),
        ]
        for name, limit in self.device.limits.items():
            spare = limit - self.device.figure(self.taken.micro, name)
            words.append(f"{name}={limit:,}: {spare:,} bytes are left.")
        if self.taken.micro.is_packed:
            words.append(
                "Packed zeros: the program needs `AddDecode`, with about 11 kB of code; "
                f"{self.device.decode_code:,} bytes of it are counted."
            )
        if self.untried:
            words.append(f"More minutes would allow {self.untried[0]}.")
        return (*words, *self._operators)

    @property
    def _files(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.micro is not None]

    def _words_without_a_file(self, files: list[Trial]) -> tuple[str, ...]:
        """By how much the nearest file misses each limit."""
        if not files:
            return ("No file could be made.",)
        nearest = min(files, key=self._distance)
        assert nearest.micro is not None
        words = ["No file was written."]
        words += [
            f"{name}={self.device.limits[name]:,}: the nearest file, {nearest.name}, {text}."
            for name, text in self._texts_of_excess(nearest.micro)
        ]
        surest = min(files, key=lambda trial: trial.bound)
        lost = f"{100 * surest.lost:.1f} points of {self.measure}"
        words.append(f"The least loss is {lost}: {surest.name}.")
        if self.untried:
            words.append(f"More minutes would allow {self.untried[0]}.")
        return tuple(words)

    def _distance(self, trial: Trial) -> tuple[float, float]:
        assert trial.micro is not None
        return self.device.reach(trial.micro), trial.lost

    def _texts_of_excess(self, figures: MicroFigures) -> list[tuple[str, str]]:
        """A text for each limit: how far a file is above it."""
        texts = []
        for name, excess in self.device.excess(figures).items():
            text = f"misses it by {excess:,} bytes"
            if not excess:
                text = "is within it"
            texts.append((name, text))
        return texts

    @property
    def _operators(self) -> list[str]:
        """The operators with their numbers, and the files that have them."""
        names: dict[str, list[str]] = {}
        for trial in self._files:
            assert trial.micro is not None
            text = _listed(trial.micro.operators)
            names.setdefault(text, []).append(trial.name)
        lines = []
        for text, files in names.items():
            lines.append(f"Operators of {'; '.join(files)}:")
            lines.append(f"  {text}")
        return lines

    def __str__(self) -> str:
        """The table of trials, and the words on the choice."""
        lines = [
            f"  {'made by':{_NAME_WIDTH}}{'score':>8}{'95%':>14}{'lost':>8}"
            f"{'flash':>10}{'arena':>10}{'s':>5}"
        ]
        numbers = {id(trial) for trial in self.frontier}
        for trial in self.trials:
            mark = " "
            if trial is self.taken:
                mark = "->"
            elif id(trial) in numbers:
                mark = "*"
            line = f"{mark:2}{printable_lines(trial.name):{_NAME_WIDTH}}"
            if trial.micro is None:
                reason = printable_lines(trial.reason or "")
                lines.append(f"{line} no file: {reason}")
                continue
            interval = f"{trial.score.low:.3f}-{trial.score.high:.3f}"
            line += f"{trial.score.mean:8.4f}{interval:>14}{trial.lost:8.4f}"
            line += f"{trial.micro.flash:10,}{trial.micro.arena:10,}"
            lines.append(f"{line}{trial.seconds:5.0f}")
        lines.append("* no other file is as good in score, flash and arena")
        return "\n".join([*lines, "", *self.words])


def least_loss(
    trials: Sequence[Trial], max_drop: MaxDrop, device: Microcontroller
) -> Trial | None:
    """The file of least loss within the limits; of equal ones that of fewest bytes."""
    candidates = []
    for trial in trials:
        is_good = trial.loses_at_most(max_drop)
        if is_good and trial.micro and device.reach(trial.micro) <= 1.0:
            candidates.append(trial)
    return min(candidates, key=_order, default=None)


def _order(trial: Trial) -> tuple[float, float]:
    assert trial.micro is not None
    return trial.lost, trial.micro.flash


def _listed(operators: Mapping[str, int]) -> str:
    """Operators with their numbers, in one line."""
    return ", ".join(f"{name} {count}" for name, count in operators.items())
