"""The report of `shrink`: its trials as a table, in words and as a picture."""

import dataclasses
import math
from typing import Any

from keras_sparse_ortho._foreign_names import Answering
from keras_sparse_ortho._text import printable_lines
from keras_sparse_ortho.export._judge import NO_SCORE, Score

_WIDE = 5.0  # points between the ends of an interval


@dataclasses.dataclass(frozen=True)
class Trial(Answering):
    """One file that was tried.

    Attributes:
        name: str. How the model was made: "dense", or "density 0.2, gradually".
        route: str. The route of the file, such as "float16+sp".
        score: On the held rows; `low` and `high` are its 95% interval.
        bytes, gzip_bytes: int. Size of the file, and under gzip.
        ms: float. Median time of one call with one row, on one thread of this machine.
        seconds: float. From the dense model to the file.
        reason: Why there is no file; then the figures are infinite, or nan.
    """

    name: str
    route: str
    score: Score = NO_SCORE
    bytes: float = math.inf
    gzip_bytes: float = math.inf
    ms: float = math.inf
    seconds: float = 0.0
    reason: str | None = None

    @property
    def mean(self) -> float:
        """The mean of the score; -1 without a file."""
        return -1.0 if self.reason else self.score.mean


@dataclasses.dataclass(frozen=True, repr=False)
class ShrinkReport(Answering):
    """The trials of a call, and the taken one; print it.

    Attributes:
        path: The file.
        taken: Its `Trial`; `None` if no file is within the limits.
        trials: All of them.
        measure: str. The score: "accuracy" (with labels), "agreement" with the dense model's
            classes, "closeness" of other outputs, or the name of a metric; joined by "and".
        rows: int. Held rows, which no file was made with.
        dense: Score of the dense Keras model.
        max_drop: The most that the score of `taken` was to lose.
        untried: Densities that the time did not allow.
    """

    path: str
    taken: Trial | None
    trials: tuple[Trial, ...]
    measure: str
    rows: int
    dense: Score
    max_drop: float
    untried: tuple[float, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Why this file, and what it is beside a dense int8 one."""
        taken, there = self.taken, [one for one in self.trials if one.reason is None]
        if taken is None:
            return self._words_without_a_file(there)
        lost = 100 * (self.dense.mean - taken.score.mean)
        least = round(self.dense.mean - self.max_drop, 9)
        good = [one for one in there if one.score.mean >= least]
        smaller = min(good, key=lambda one: one.bytes, default=taken)
        found = [f"Taken: {taken.name}, {taken.route}: the fewest bytes within the limits."]
        if smaller.bytes < taken.bytes and smaller.ms > taken.ms:
            found = [
                f"Taken: {taken.name}, {taken.route}. {smaller.name}, {smaller.route} has "
                f"{taken.bytes / smaller.bytes:.2f} times fewer bytes, and takes "
                f"{smaller.ms / taken.ms:.1f} times as long; `max_ms` allows it."
            ]
        found.append(f"It loses {lost:.1f} points of {self.measure} on {self.rows} held rows.")
        if 100 * (taken.score.high - taken.score.low) > _WIDE:
            found.append("These rows are few: on others it may lose more.")
        rivals = [one for one in there if one.name == "dense" and "int8" in one.route]
        if taken.name == "dense":
            found.append("No sparse file within the limits is smaller.")
        elif rivals:
            own = max(rivals, key=lambda one: one.mean)
            size, speed = own.bytes / taken.bytes, own.ms / taken.ms
            found.append(
                f"A dense {own.route} file has {size:.2f} its bytes, {speed:.2f} its time."
            )
        packed = min(good, key=lambda one: one.gzip_bytes, default=taken)
        if packed.gzip_bytes < 0.9 * taken.gzip_bytes:
            found.append(f"Under gzip {packed.name}, {packed.route} has fewest; for *.tflite.gz.")
        if self.untried:
            found.append(f"More minutes would allow density {self.untried[0]:g}.")
        return tuple(found)

    def _words_without_a_file(self, there: list[Trial]) -> tuple[str, ...]:
        """How near the files came that were tried."""
        if not there:
            return ("No file could be made.",)
        best = max(there, key=lambda one: one.score.mean)
        smallest = min(there, key=lambda one: one.bytes)
        fastest = min(there, key=lambda one: one.ms)
        lost = 100 * (self.dense.mean - best.score.mean)
        return (
            "No file was written.",
            f"The least loss is {lost:.1f} points of {self.measure}: {best.name}, {best.route}.",
            f"The fewest bytes are {smallest.bytes:,}: {smallest.name}, {smallest.route}.",
            f"The shortest call takes {fastest.ms:.3g} ms: {fastest.name}, {fastest.route}.",
        )

    def __repr__(self) -> str:
        figures = f"taken=None, {len(self.trials)} trials"
        if self.taken is not None:
            figures = (
                f"taken={self.taken.name!r}, route={self.taken.route!r}, "
                f"bytes={self.taken.bytes}, {len(self.trials)} trials"
            )
        return f"ShrinkReport(path={self.path!r}, {figures}); print it for all figures"

    def __str__(self) -> str:
        titles = f"  {'made by':32}{'route':14}{'score':>11}{'95%':>14}"
        lines = [titles + f"{'bytes':>12}{'gzip':>12}{'ms':>9}{'s':>6}"]
        for one in self.trials:
            line = f"{'->' if one is self.taken else '  '}{one.name:32}{one.route:14}"
            if one.reason is not None:
                lines.append(f"{line} no file: {printable_lines(one.reason)}")
                continue
            line += f"{one.score.mean:11.4f}{f'{one.score.low:.3f}-{one.score.high:.3f}':>14}"
            sizes = f"{one.bytes:12,}{one.gzip_bytes:12,}"
            lines.append(f"{line}{sizes}{one.ms:9.3g}{one.seconds:6.0f}")
        return "\n".join([*lines, "", *self.words])

    def plot(self, ax: Any = None) -> Any:
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.subplots(figsize=(6, 4))[1]
        for one in (one for one in self.trials if one.reason is None):
            error = [[one.score.mean - one.score.low], [one.score.high - one.score.mean]]
            mark = "o" if one is self.taken else "."
            ax.errorbar(one.bytes, one.score.mean, yerr=error, fmt=mark, color="C0")
            ax.annotate(f" {one.name}, {one.route}", (one.bytes, one.score.mean), fontsize=7)
        ax.set(xscale="log", xlabel="bytes", ylabel=f"{self.measure} on {self.rows} held rows")
        return ax
