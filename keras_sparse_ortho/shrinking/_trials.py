"""The files of one call of `shrink`: made, trained, exported, judged and timed."""

import dataclasses
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._data import rows_at
from keras_sparse_ortho._keras_internals import without_warnings
from keras_sparse_ortho.errors import (
    ExportConversionError,
    ExportRouteError,
    ExportVerificationError,
    NotPrunableError,
)
from keras_sparse_ortho.export import (
    Steps,
    export_litert,
    latencies,
    load_litert,
)
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.recovery import distill
from keras_sparse_ortho.shrinking._examples import Examples, Training
from keras_sparse_ortho.shrinking._max_drop import MaxDrop
from keras_sparse_ortho.shrinking._shrink_report import Trial, frontier_of

_LONGEST_REASON = 100  # characters of a reason in the table
# Examples that ranges of static int8 are measured on. More are no better; fewer, if their forward
# passes would take more than a share of the time: SpliceAI has 15,000 positions in each.
_RANGED = 256
_FEWEST_RANGED = 32
_RANGING_SHARE = 0.02
_ANY_ERROR = (
    1e6  # the held examples judge a file, and a bad one has a time, too
)
_COMPARED = 16  # examples, one by one in Keras with a file
# Of the time that is left, for one training, and for one that has too few examples in that.
_TRAINING_SHARE, _MOST_TRAINING_SHARE = 0.33, 0.5
# Dense files in whose time a network is narrowed and exported: 2.8 for MobileNetV2 at 96 pixels.
_NARROWING_COST = 3.0
_REFUSALS = (
    ExportRouteError,
    ExportConversionError,
    ExportVerificationError,
    NotPrunableError,
)

Widths = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Terms:
    """The terms of one call of `shrink`.

    Attributes:
        say: Steps. Logs each step, and knows how long the call has taken.
        seconds: float. How long the call may take.
        max_drop: float or dict by output. The largest losses of a good file.
        seed: int. Decides the order of training.
    """

    say: Steps
    seconds: float
    max_drop: MaxDrop
    seed: int


class Trials:
    """The trials of one call.

    Attributes:
        model: The dense model, without wrappers.
        examples: The examples that judge and that train.
        say: As in `Terms`, like the next three.
        seconds: float.
        max_drop: float or dict by output.
        seed: int.
        packed: bool. Whether sizes are under gzip.
        target: `None` or `"arm64"`, as for `shrink`: the processor that files are timed for.
        remedy: dict. Further arguments of `export_litert` for static int8.
        route: str. That of smaller networks, once it is known.
        made: list of Trial, in their order.
        untried: list of str. The trials that the time did not allow.

    Args:
        folder: Path. Where files are made.
        terms: Terms of the call.
    """

    ends = ("float32", "float32")  # types of inputs and outputs

    def __init__(
        self,
        model: keras.Model,
        examples: Examples,
        folder: Path,
        terms: Terms,
        *,
        packed: bool = False,
        target: str | None = None,
    ) -> None:
        self.model = model
        self.examples = examples
        self.say = terms.say
        self.seconds = terms.seconds
        self.max_drop = terms.max_drop
        self.seed = terms.seed
        self.packed = packed
        self.target = target
        self.remedy: dict[str, Any] = {}
        self.route: str | None = None
        self.made: list[Trial] = []
        self.untried: list[str] = []
        self._folder = folder
        self._files: dict[int, Path] = {}

    # --- one file ---------------------------------------------------------------------------------

    def make(
        self,
        name: str,
        make: Callable[[], keras.Model],
        training: Training | None,
        route: str,
        widths: Widths | None = None,
        *,
        was_tried: bool = False,
    ) -> tuple[Trial, keras.Model | None]:
        """Makes a network, trains it to answer as the dense one, and exports it.

        Args:
            name: str. The name of the trial.
            make: callable. Makes the network.
            training: Training, or `None` for a network that is exported as it is made.
            route: str. The `mode` of `export_litert`.
            widths: Those of its groups of channels, for the report.
            was_tried: bool. Whether there is a file of the network without training: there is none
                of training that changed nothing, then.
        """
        start = time.monotonic()
        self.say(name)
        try:
            model = make()
            if training is not None:
                history = self._train(model, training)
                if was_tried and not any(history["improved"]):
                    raise ValueError(
                        "training lowered no loss on held-out rows"
                    )
        # Any: there are other networks, and the dense files.
        except Exception as error:
            trial = Trial(name, "", reason=shortly(error))
            self.made.append(trial)
            return trial, None
        trial = self.export(name, model, route, start, widths)
        return trial, model

    def _train(
        self, model: keras.Model, training: Training
    ) -> dict[str, list[float]]:
        """Trains a network; returns its history."""
        model.trainable = True  # frozen layers as well
        if not training.options["validation_split"]:
            _freeze_statistics(model)
        start = time.monotonic()
        with without_warnings():  # the table has what they say
            history = distill(
                model,
                self.model,
                verbose=2 if self.say.loud else 0,
                **training.options,
            )
        # Training that does harm at every rate ends early.
        share = len(history.epoch) / history.params["epochs"]
        self.examples.took(time.monotonic() - start, training, share)
        return history.history

    def export(
        self,
        name: str,
        model: keras.Model,
        route: str,
        start: float,
        widths: Widths | None = None,
    ) -> Trial:
        """Exports a model and judges its file.

        Args:
            name: str. The name of the trial.
            model: Model.
            route: str. The `mode` of `export_litert`.
            start: float. When the work on the trial began, by `time.monotonic`.
            widths: Those of its groups of channels, for the report.
        """
        number = len(self.made)
        path = self._folder / f"{number}.tflite"
        self.say(f"{name}: {route}")
        options = self._options_of_export(route)
        refusals: Any = _REFUSALS if model is self.model else Exception
        try:
            with without_warnings():  # the table has what they say
                report = export_litert(model, path, mode=route, **options)
            verdict = self.examples.judge.verdict(self._answers(path))
        except refusals as error:
            trial = Trial(name, route, reason=shortly(error))
        else:
            size = path.stat().st_size
            if self.packed:
                size = report.gzip_bytes
            trial = Trial(
                name,
                report.route,
                verdict.score,
                size,
                report.gzip_bytes,
                seconds=time.monotonic() - start,
                lost=verdict.lost,
                margin=verdict.margin,
                measure=verdict.measure,
                agreement=verdict.agreement,
                outputs=verdict.outputs,
                widths=dict(widths or {}),
                in_floats=report.in_floats,
            )
            self._files[number] = path
        self.made.append(trial)
        return trial

    def _options_of_export(self, route: str) -> dict[str, Any]:
        """The arguments of `export_litert` for a route."""
        options: dict[str, Any] = {
            "sample": rows_at(self.examples.held, slice(0, _COMPARED)),
            "tolerance": _ANY_ERROR,
            "inference_input_type": self.ends[0],
            "inference_output_type": self.ends[1],
        }
        if route.startswith("int8"):
            options["representative_data"] = rows_at(
                self.examples.calibration, slice(0, self._ranged_count())
            )
            options |= self.remedy
        return options

    def _ranged_count(self) -> int:
        """How many examples ranges of static int8 are measured on."""
        seconds = _RANGING_SHARE * self.seconds
        in_time = int(seconds / self.examples.seconds_each)
        return min(_RANGED, max(_FEWEST_RANGED, in_time))

    def _answers(self, path: Path) -> list[np.ndarray]:
        """The outputs of a file on the held examples."""
        answers = load_litert(path).predict(self.examples.held)
        outputs = [answers]
        if isinstance(answers, dict):
            outputs = [*answers.values()]
        if not all(np.isfinite(output).all() for output in outputs):
            raise ExportVerificationError(
                "The file gives values that are not finite"
            )
        return outputs

    # --- verdicts and time ------------------------------------------------------------------------

    def is_good(self, trial: Trial) -> bool:
        """Whether a file is within the limits of the loss."""
        return trial.loses_at_most(self.max_drop)

    def is_late(self) -> bool:
        """Whether another trial would end too late.

        It takes as many seconds as a dense file, or a network that was narrowed at once.
        """
        seconds = max(self.dense_seconds(), self._narrowed_seconds())
        return self.seconds_left() < seconds

    def is_late_to_narrow(self) -> bool:
        """Whether a narrower network, made at once, would end too late."""
        return self.seconds_left() < self.narrowing_seconds()

    def dense_seconds(self) -> float:
        """The most seconds that a file of the dense network took; 0 before the first.

        Files of static int8 can take ten times as long as others: once it is known which route
        smaller networks take, that of its dense file counts.
        """
        times = []
        for trial in self.made:
            if trial.name == "dense" and self.route in (None, trial.route):
                times.append(trial.seconds)
        return max(times, default=0.0)

    def narrowing_seconds(self) -> float:
        """The seconds of a network that is narrowed at once: as those before it, if there are."""
        measured = self._narrowed_seconds()
        return measured or _NARROWING_COST * self.dense_seconds()

    def _narrowed_seconds(self) -> float:
        times = [
            trial.seconds for trial in self.made if _is_narrowed_at_once(trial)
        ]
        return max(times, default=0.0)

    def seconds_left(self) -> float:
        """The time until the call should end; below 0 if it is late."""
        return self.seconds - self.say()

    def seconds_to_train(self) -> float:
        """The time that one training may take."""
        return _TRAINING_SHARE * self.seconds_left()

    def most_seconds_to_train(self) -> float:
        """The time of a training that would have too few examples in less."""
        return _MOST_TRAINING_SHARE * self.seconds_left()

    def latencies(self, numbers: list[int]) -> list[float]:
        """Milliseconds of a call of the files of some trials, in turn."""
        files = [self._files[number] for number in numbers]
        return latencies(files, target=self.target)

    def time_files(self) -> None:
        """Times all files in turn, and notes it in the trials."""
        numbers = sorted(self._files)
        self.say(f"timing {len(numbers)} files")
        for number, ms in zip(numbers, self.latencies(numbers), strict=True):
            self.made[number] = dataclasses.replace(self.made[number], ms=ms)

    # --- files ------------------------------------------------------------------------------------

    def file_of(self, trial: Trial) -> Path:
        """The file of a trial."""
        return self._files[self._number_of(trial)]

    def contents(self, taken: Trial | None) -> dict[int, bytes]:
        """The compressed files of the frontier, and the taken one, by the number of the trial."""
        kept_trials = list(frontier_of(self.made))
        if taken is not None:
            kept_trials.append(taken)
        numbers = {self._number_of(trial) for trial in kept_trials}
        contents = {}
        for number in sorted(numbers):
            content = self._files[number].read_bytes()
            contents[number] = zlib.compress(content, 1)
        return contents

    def _number_of(self, trial: Trial) -> int:
        numbers = [k for k, entry in enumerate(self.made) if entry is trial]
        return numbers[0]


def _freeze_statistics(model: keras.Model) -> None:
    """Keeps the statistics of normalization where `distill` does not: it has no held-out rows.

    A short training leaves moving statistics between those of its start and those of its batches,
    and the kernels answer worse with either.
    """
    for layer, _ in walk(model, ""):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False


def _is_narrowed_at_once(trial: Trial) -> bool:
    return bool(trial.widths) and not trial.name.endswith("trained")


def shortly(error: Exception) -> str:
    """The first sentence of an error and the value in it; of a failed conversion its cause."""
    rule, _, received = str(error).partition("Received: ")
    _, _, cause = received.partition("Error: ")
    if isinstance(error, ExportConversionError) and cause:
        return cause[:_LONGEST_REASON].strip()
    sentence = rule.partition(". ")[0] or type(error).__name__
    if not received:
        return sentence
    return f"{sentence} (received {received[:_LONGEST_REASON]})"
