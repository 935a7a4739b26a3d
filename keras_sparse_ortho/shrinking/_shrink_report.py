"""The report of `shrink`: its trials as a table, in words and as a picture."""

import dataclasses
import gzip
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from keras_sparse_ortho._files import atomic_write_bytes, path_of
from keras_sparse_ortho._foreign_names import Answering
from keras_sparse_ortho._pictures import axes_or_new
from keras_sparse_ortho._text import printable_lines
from keras_sparse_ortho.export import TARGETS
from keras_sparse_ortho.shrinking._judge import (
    NO_SCORE,
    OutputScore,
    Score,
)
from keras_sparse_ortho.shrinking._max_drop import MaxDrop, limit_of
from keras_sparse_ortho.shrinking._microcontroller import MicroFigures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDE = 5.0  # points between the ends of an interval
_DIGITS = 9  # 1 - 0.99 is more than 0.01
_OUTPUT_WIDTH = 12  # the longest name of an output in the table


@dataclasses.dataclass(frozen=True)
class Trial(Answering):
    """One file that was tried.

    Attributes:
        name: str. How the model was made: "dense", "narrowed to 0.4, trained", or "density 0.2,
            gradually".
        route: str. The route of the file, such as "dynamic_int8".
        score: On the held examples; `low` and `high` are its 95% interval.
        bytes, gzip_bytes: int. Size of the file, and under gzip; with `target="micro"` `bytes` is
            the flash.
        ms: float. Median time of one call with one example, on one thread of this machine.
        seconds: float. From the dense model to the file.
        reason: Why there is no file; then the figures are infinite, or nan.
        lost: float. How much less than the dense model's the score is, in the output that comes
            nearest to its limit, or that is farthest beyond it.
        margin: float. The standard error of `lost`.
        measure: str. The score of this output, such as "expected accuracy".
        agreement: float. The share of answers that are the dense model's class; nan if no output
            is a class.
        widths: dict. The channels of each group that were left, by its name; empty if none went.
        in_floats: Operations that an integer file computes in floats.
        outputs: dict. By the name of each output its `measure`, `mean` score, `lost` and `margin`.
        micro: MicroFigures. With `target="micro"`: flash, arena and operators of the array.
    """

    name: str
    route: str
    score: Score = NO_SCORE
    bytes: float = math.inf
    gzip_bytes: float = math.inf
    ms: float = math.inf
    seconds: float = 0.0
    reason: str | None = None
    lost: float = math.inf
    margin: float = 0.0
    measure: str = ""
    agreement: float = math.nan
    widths: Mapping[str, int] = dataclasses.field(
        default_factory=dict, repr=False
    )
    in_floats: tuple[str, ...] = ()
    outputs: Mapping[str, OutputScore] = dataclasses.field(
        default_factory=dict, repr=False
    )
    micro: MicroFigures | None = None

    @property
    def mean(self) -> float:
        """The mean of the score; -1 without a file."""
        return -1.0 if self.reason else self.score.mean

    @property
    def bound(self) -> float:
        """The loss that a limit is compared with: `lost`, and one standard error."""
        return self.lost + self.margin

    def loses_at_most(self, max_drop: MaxDrop) -> bool:
        """Whether there is a file, and the bound of each loss is within its limit.

        Args:
            max_drop: float, or dict by the name of each output. The limits.
        """
        if self.reason is not None:
            return False
        if not isinstance(max_drop, Mapping):
            return round(self.bound, _DIGITS) <= max_drop
        for name, output in self.outputs.items():
            if round(output.bound, _DIGITS) > max_drop[name]:
                return False
        return True

    def share_of_limit(self, max_drop: MaxDrop) -> float:
        """The largest bound of a loss, as a share of its limit; infinite without a file.

        Args:
            max_drop: float, or dict by the name of each output. The limits.
        """
        if self.reason is not None:
            return math.inf
        shares = [
            output.share_of(limit_of(max_drop, name))
            for name, output in self.outputs.items()
        ]
        return max(shares)

    def beats(self, other: "Trial") -> bool:
        """Whether each score, bytes and time are as good as another file's, and one is better.

        For microcontrollers flash and arena take the place of bytes and time.
        """
        own_figures = (*self._losses, *self._sizes)
        other_figures = (*other._losses, *other._sizes)
        pairs = list(zip(own_figures, other_figures, strict=True))
        return (
            all(own <= theirs for own, theirs in pairs)
            and own_figures != other_figures
        )

    @property
    def _losses(self) -> tuple[float, ...]:
        if not self.outputs:
            return (self.lost,)
        return tuple(output.lost for output in self.outputs.values())

    @property
    def _sizes(self) -> tuple[float, float]:
        if self.micro is None:
            return self.bytes, self.ms
        return self.micro.flash, self.micro.arena


def _times(ratio: float) -> str:
    """A ratio in words, such as "2.5 times"."""
    if ratio >= 10:
        return f"{ratio:.0f} times"
    if 0.95 <= ratio < 1.05:
        return f"{ratio:.3g} times"  # not "1 times as long"
    return f"{ratio:.2g} times"


def frontier_of(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The files that no other beats, the largest first."""
    files = [trial for trial in trials if trial.reason is None]
    unbeaten = [
        trial
        for trial in files
        if not any(other.beats(trial) for other in files)
    ]
    return tuple(sorted(unbeaten, key=lambda trial: -trial.bytes))


@dataclasses.dataclass(frozen=True, repr=False)
class ShrinkReport(Answering):
    """The trials of a call, and the written one; print it.

    Attributes:
        path: The file.
        taken: Its `Trial`; `None` if no file is within the limits.
        trials: All of them.
        measure: str. The score: "accuracy" (with labels), "expected accuracy" (of classes without
            labels), "agreement", "closeness" of other outputs, or the name of a metric; joined by
            "and".
        rows: int. Held examples, which no file was made with.
        dense: Score of the dense Keras model.
        max_drop: float or dict. The most that the score of `taken` was to lose, or each output's.
        untried: Trials for which there was no time.
        contents: The compressed files of `frontier` and `taken`, by the number of the trial.
        target: str or None. The device that files were timed for: `None` is this machine.
    """

    path: str
    taken: Trial | None
    trials: tuple[Trial, ...]
    measure: str
    rows: int
    dense: Score
    max_drop: MaxDrop
    untried: tuple[str, ...] = ()
    contents: Mapping[int, bytes] = dataclasses.field(default_factory=dict)
    target: str | None = None

    @property
    def frontier(self) -> tuple[Trial, ...]:
        """The files that no other beats in score, bytes and time, the largest first."""
        return frontier_of(self.trials)

    def write(self, trial: Trial, path: str | os.PathLike[str]) -> None:
        """Writes the file of another trial of the frontier.

        Args:
            trial: One of `frontier`, or `taken`.
            path: str or path. Where to write, `*.tflite` or `*.tflite.gz`.

        Raises:
            ValueError: If the file of this trial was not kept, as another one beats it.
        """
        target = path_of("path", path)
        content = self.content_of(trial)
        if target.name.endswith(".gz"):
            content = gzip.compress(content, 6, mtime=0)
        atomic_write_bytes(target, content)

    def content_of(self, trial: Trial) -> bytes:
        """The LiteRT file of a trial of the frontier; ValueError for another one."""
        numbers = [k for k, other in enumerate(self.trials) if other is trial]
        contents = [self.contents[k] for k in numbers if k in self.contents]
        if not contents:
            names = [f"{kept.name}, {kept.route}" for kept in self.frontier]
            raise ValueError(
                "The files of `report.frontier` and `report.taken` can be written. "
                f"Received: {trial.name}, {trial.route}; there are {'; '.join(names)}"
            )
        return zlib.decompress(contents[0])

    @property
    def words(self) -> tuple[str, ...]:
        """Why this file, and what it is beside a dense int8 one."""
        files = [trial for trial in self.trials if trial.reason is None]
        if self.taken is None:
            return self._words_without_a_file(files)
        good = [trial for trial in files if trial.loses_at_most(self.max_drop)]
        return (
            *self._words_on_the_choice(self.taken, good),
            *self._words_on_the_loss(self.taken),
            *self._words_on_rivals(self.taken, files),
            *self._words_on_what_else(self.taken, good),
        )

    def _words_on_the_choice(
        self, taken: Trial, good: list[Trial]
    ) -> list[str]:
        smallest = min(good, key=lambda trial: trial.bytes, default=taken)
        if smallest.bytes >= taken.bytes:
            return [
                f"Written: {taken.name}, {taken.route}, the smallest file within the limits."
            ]
        words = [f"Written: {taken.name}, {taken.route}."]
        if smallest.ms > taken.ms:
            words.append(
                f"{smallest.name}, {smallest.route} is smaller ({smallest.bytes:,} bytes), but "
                f"takes {_times(smallest.ms / taken.ms)} as long; "
                '`prefer="bytes"` writes it.'
            )
        return words

    def _words_on_the_loss(self, taken: Trial) -> list[str]:
        words = self._words_on_outputs(taken)
        if not math.isnan(taken.agreement) and self.measure != "agreement":
            words.append(
                f"It gives the dense model's class for {100 * taken.agreement:.1f}% of them."
            )
        if 100 * (taken.score.high - taken.score.low) > _WIDE:
            words.append("They are few: on other examples it may lose more.")
        if taken.in_floats:
            count = len(taken.in_floats)
            words.append(
                f"{count} operations of the file are in floats: `taken.in_floats`."
            )
        return words

    def _words_on_outputs(self, taken: Trial) -> list[str]:
        """The loss, of each output if there are several."""
        if len(taken.outputs) <= 1:
            verb = "gains" if taken.lost < 0 else "loses"
            points = f"{100 * abs(taken.lost):.2f} points of {self.measure}"
            return [f"On {self.rows} examples held out it {verb} {points}."]
        words = [
            f"On {self.rows} examples held out it loses, with the standard error,"
        ]
        for name, output in taken.outputs.items():
            limit = limit_of(self.max_drop, name)
            words.append(
                f"  {printable_lines(name)}: {100 * output.lost:.2f} +- "
                f"{100 * output.margin:.2f} of {100 * limit:g} points of {output.measure}"
            )
        return words

    def _words_on_rivals(self, taken: Trial, files: list[Trial]) -> list[str]:
        if taken.name == "dense":
            if all(trial.name.startswith("dense") for trial in files):
                return ["No smaller network could be tried."]
            return ["No smaller network within the limits was found."]
        rivals = [
            trial
            for trial in files
            if trial.name == "dense" and "int8" in trial.route
        ]
        if not rivals:
            return []
        rival = max(rivals, key=lambda trial: trial.mean)
        size = rival.bytes / taken.bytes
        speed = rival.ms / taken.ms
        return [
            f"Dense {rival.route} is {_times(size)} as large and takes {_times(speed)} as long."
        ]

    def _words_on_what_else(self, taken: Trial, good: list[Trial]) -> list[str]:
        words = []
        packed = min(good, key=lambda trial: trial.gzip_bytes, default=taken)
        if packed.gzip_bytes < 0.9 * taken.gzip_bytes:
            words.append(
                f"Compressed, {packed.name}, {packed.route} is smallest: write a *.tflite.gz."
            )
        if self.target is not None:
            words.append(
                f"Estimated for {self.target}: {TARGETS[self.target]}."
            )
        words += self._words_on_the_next(taken)
        if self.untried:
            words.append(f"More minutes would allow {self.untried[0]}.")
        return words

    def _words_on_the_next(self, taken: Trial) -> list[str]:
        """The file that a larger loss would allow, where the limit is one number."""
        if not isinstance(self.max_drop, float | int):
            return []
        smaller = [
            trial
            for trial in self.trials
            if trial.reason is None
            and trial.bytes < taken.bytes
            and not trial.loses_at_most(self.max_drop)
        ]
        if not smaller:
            return []
        following = min(smaller, key=lambda trial: trial.bound)
        limit = math.ceil(1000 * round(following.bound, _DIGITS)) / 1000
        return [
            f"With max_drop={limit:g} it would have {following.bytes:,} bytes: "
            f"{following.name}, {following.route}."
        ]

    def _words_without_a_file(self, files: list[Trial]) -> tuple[str, ...]:
        """How near the files came that were tried."""
        if not files:
            return ("No file could be made.",)
        best = min(files, key=lambda trial: trial.bound)
        smallest = min(files, key=lambda trial: trial.bytes)
        fastest = min(files, key=lambda trial: trial.ms)
        lost = f"{100 * best.lost:.1f} points of {self.measure}"
        if best.margin > 0:
            lost += f" (standard error {100 * best.margin:.1f})"
        return (
            "No file was written.",
            f"The least loss is {lost}: {best.name}, {best.route}.",
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
        """The table of trials, and the words on the choice."""
        frontier = self.frontier
        columns = self._columns_of_outputs()
        of_name = _width_of("made by", [trial.name for trial in self.trials])
        of_route = _width_of("route", [trial.route for trial in self.trials])
        titles = f"  {'made by':{of_name}}{'route':{of_route}}"
        titles += f"{'score':>8}{'95%':>14}"
        for name in columns:
            titles += (
                f"{printable_lines(name)[:_OUTPUT_WIDTH]:>{columns[name]}}"
            )
        lines = [
            f"{titles}{'lost':>7}{'bytes':>12}{'gzip':>12}{'ms':>9}{'s':>5}"
        ]
        for trial in self.trials:
            mark = " "
            if trial is self.taken:
                mark = "->"
            elif any(trial is other for other in frontier):
                mark = "*"
            line = f"{mark:2}{trial.name:{of_name}}{trial.route:{of_route}}"
            if trial.reason is not None:
                lines.append(f"{line} no file: {printable_lines(trial.reason)}")
                continue
            interval = f"{trial.score.low:.3f}-{trial.score.high:.3f}"
            line += f"{trial.score.mean:8.4f}{interval:>14}"
            for name, width in columns.items():
                line += f"{trial.outputs[name].mean:{width}.4f}"
            sizes = f"{trial.bytes:12,}{trial.gzip_bytes:12,}"
            line += f"{trial.lost:7.4f}{sizes}"
            lines.append(f"{line}{trial.ms:9.3g}{trial.seconds:5.0f}")
        lines.append("* no other file is as good in score, bytes and time")
        return "\n".join([*lines, "", *self.words])

    def _columns_of_outputs(self) -> dict[str, int]:
        """The widths of the columns with the scores of outputs, by name, if there are several."""
        columns: dict[str, int] = {}
        for trial in self.trials:
            if len(trial.outputs) > 1:
                for name in trial.outputs:
                    letters = len(printable_lines(name)[:_OUTPUT_WIDTH])
                    columns[name] = 2 + max(letters, 6)
        return columns

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Plots the score of each file over its bytes, with the frontier.

        Files of the dense model are squares, those of smaller networks circles; the one that was
        written is filled. Those on the frontier have names.

        Args:
            ax: Matplotlib axes to draw on. Default: those of a new figure.

        Returns:
            The axes.
        """
        axes = axes_or_new(ax)
        frontier = self.frontier
        on_frontier = {id(trial) for trial in frontier}
        for trial in self.trials:
            if trial.reason is not None:
                continue
            below = trial.score.mean - trial.score.low
            above = trial.score.high - trial.score.mean
            is_dense = trial.name.startswith("dense")
            is_written = trial is self.taken
            axes.errorbar(
                trial.bytes,
                trial.score.mean,
                yerr=[[below], [above]],
                fmt="s" if is_dense else "o",
                color="C0",
                markerfacecolor="C0" if is_written else "white",
                elinewidth=0.5,
            )
            if is_written or id(trial) in on_frontier:
                axes.annotate(
                    f"{trial.name}, {trial.route}",
                    (trial.bytes, trial.score.mean),
                    xytext=(4, -6),
                    textcoords="offset points",
                    fontsize=7,
                    rotation=-30,  # so that names beside each other can be read
                    rotation_mode="anchor",
                    verticalalignment="top",
                )
        sizes = [trial.bytes for trial in frontier]
        scores = [trial.score.mean for trial in frontier]
        axes.plot(sizes, scores, color="C1", linewidth=1, zorder=0)
        axes.set(
            xscale="log",
            xlabel="bytes",
            ylabel=f"{self.measure} on {self.rows} examples held out",
        )
        return axes


def _width_of(title: str, texts: Sequence[str]) -> int:
    """The width of a column of texts, with two spaces after the longest."""
    return 2 + max(map(len, [title, *texts]))
