"""Networks that packages ship, made narrower at once: searched widths beside uniform ones.

python benchmarks/real_widths.py [--networks rnet] [options]
"""

import statistics
import time

import keras
import numpy as np
import packages
import real
import widths
from record import column, groups, machines_of, markdown, sentences
from runner import Measurement, Run, Setting, main

import keras_sparse_ortho as kso
from keras_sparse_ortho.calibration._output_errors import _logits as logits_of
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.models import output_kinds, output_names
from keras_sparse_ortho.shrinking._judge import Judge

NETWORKS = ("rnet", "onet", "pnet", "silero", "magika", "fer", "spliceai")
# Searched widths are multiples of it. Magika has one group, where only the multiple would count.
UNITS = {"magika": 1}
USUAL_UNIT = 4
DENSE = "dense"


class RealWidths(Measurement):
    """Trained networks of packages, narrowed to shares of their parameters.

        KERAS_BACKEND=tensorflow python benchmarks/real_widths.py

    The networks are given, so the seeds draw the rows that calibrate. All methods of a seed share
    its table of widths; nothing is trained. Losses are on rows of other origin.
    """

    page = lines = "real_widths"
    seeds = (0, 1, 2)
    settings = {
        "networks": Setting([*NETWORKS], choices=NETWORKS, quick=["pnet"]),
        "seeds": Setting([0, 1, 2], "of the rows that calibrate", quick=[0]),
        "shares": Setting([0.75, 0.5, 0.25], "of the parameters", quick=[0.5]),
        "rows": Setting(512, "that calibrate", quick=64),
        "tested": Setting(2000, "rows at most, to test", quick=100),
    }

    def measure(self) -> None:
        """Fetches the packages first."""
        packages.fetch()
        super().measure()

    def runs(self) -> list[Run]:
        given = self.given
        return [
            {"network": network, "seed": seed, "rows": given.rows}
            for network in given.networks
            for seed in given.seeds
        ]

    def run(self, which: Run) -> list[Run]:
        """Narrows a network by every method to every share."""
        dense, rows, tested, labels = real.subject(which["network"])
        tested = tested[: self.given.tested]
        order = np.random.default_rng(which["seed"]).permutation(len(rows))
        x = rows[order[: which["rows"]]]
        start = time.perf_counter()
        unit = UNITS.get(which["network"], USUAL_UNIT)
        table = kso.widths(dense, x, multiple_of=unit)
        which |= {"table_seconds": time.perf_counter() - start}
        judge = _Judged(which["network"], dense, tested, labels)
        lines = [which | {"method": DENSE, "share": 1.0} | judge.line(dense)]
        for share in self.given.shares:
            for name, method in widths.METHODS.items():
                line = which | {"method": name, "share": share}
                try:
                    small, chosen = widths.narrowed_by(
                        method, dense, table, share, unit, x
                    )
                except BudgetError as error:  # a share that is out of reach
                    lines.append(line | {"reason": str(error)[:200]})
                    continue
                predicted = {"predicted": table.predicted(chosen)}
                lines.append(line | predicted | judge.line(small))
        return lines

    def report(self, lines: list[Run]) -> str:
        text = (
            "# Networks that packages ship, made narrower, at once\n\n"
            + sentences(
                f"""
            {machines_of(lines)}, Keras {keras.__version__} on {keras.backend.backend()}. As in
            [the table of networks that we train](widths.md): nothing is trained afterwards, and
            {self.given.rows} rows calibrate, another draw for each seed (of SpliceAI 32, of 15,000
            positions each, and 32 test it: `--rows 32 --tested 32`). Searched widths are multiples
            of {USUAL_UNIT}, but for magika, whose one group has any. Lost: points of
            expected accuracy of classes (of SpliceAI of the F1 of the dense network's sites), and
            of the closeness of other outputs, the most of several outputs, on rows of other origin;
            the mean over the seeds and half the 95% interval of the mean (Student's t). Accuracy
            [%]: of rows whose label is known. Error: the relative squared error of the outputs on
            these rows, of logits where there are such, the mean of several outputs; predicted: by
            the table, for OBS.
            """
            )
        )
        for network in NETWORKS:
            members = [line for line in lines if line["network"] == network]
            if members:
                text += f"## {network}\n\n{_table(members)}\n"
        return text


class _Judged:
    """Judges narrower networks beside the dense one on rows that nothing was fitted to."""

    def __init__(
        self,
        name: str,
        dense: keras.Model,
        tested: np.ndarray,
        labels: np.ndarray | None,
    ) -> None:
        self._name = name
        self._tested = tested
        self._labels = labels
        predicted = dense.predict(tested, verbose=0)
        self._outputs = keras.tree.flatten(predicted)
        self._names = output_names(dense, predicted)
        self._kinds = kinds = output_kinds(dense, len(self._outputs))
        self._logits = self._logits_of(self._outputs)
        self._classes = [
            name
            for name, kind in zip(self._names, kinds, strict=True)
            if real.is_class(kind)
        ]
        self._judge = Judge(
            self._outputs,
            None,
            real.metric_of(name),
            kinds,
            self._names,
            real.CLASSES,
            least_loss=0.0,
        )

    def line(self, model: keras.Model) -> Run:
        """The figures of a network."""
        outputs = keras.tree.flatten(model.predict(self._tested, verbose=0))
        verdict = self._judge.verdict(outputs)
        errors = [
            widths.relative_distance(logits, first)
            for logits, first in zip(
                self._logits_of(outputs), self._logits, strict=True
            )
        ]
        line: Run = {
            "lost": {
                name: score.lost for name, score in verdict.outputs.items()
            },
            "classes": self._classes,
            "error": float(np.mean(errors)),
            "parameters": model.count_params(),
        }
        if self._labels is not None:
            labels = self._labels[: len(self._tested)]
            line["accuracy"] = real.accuracy_of(self._name, outputs[-1], labels)
        return line

    def _logits_of(self, outputs: list[np.ndarray]) -> list[np.ndarray]:
        """The logits of probabilities, and other outputs as they are."""
        return [
            logits_of(output.astype(np.float64), kind)
            for output, kind in zip(outputs, self._kinds, strict=True)
        ]


def _table(lines: list[Run]) -> str:
    """The table of a network."""
    rows = []
    for (share, method), members in groups(lines, "share", "method").items():
        row = [f"{share:g}", method]
        if any("reason" in line for line in members):
            rows.append([*row, "out of reach", *[""] * 7])
            continue
        for is_class in (True, False):
            row += _lost(members, is_class)
        accuracies = [
            100 * line["accuracy"] for line in members if "accuracy" in line
        ]
        row.append(f"{statistics.mean(accuracies):.1f}" if accuracies else "")
        row += widths.errors_of(members, method)
        row.append(f"{statistics.mean(column(members, 'parameters')):,.0f}")
        rows.append(row)
    header = ["share", "method", "classes lost", "95%", "values lost", "95%"]
    header += ["accuracy", "error", "predicted", "parameters"]
    return markdown(header, rows)


def _lost(lines: list[Run], is_class: bool) -> list[str]:
    """The mean loss over the seeds in points, and half its 95% interval."""
    losses = []
    for line in lines:
        classes = line["classes"]
        loss = real.largest_loss(
            line, lambda name, classes=classes: (name in classes) == is_class
        )
        if loss is not None:
            losses.append(100 * loss)
    if not losses:
        return ["", ""]
    return [f"{statistics.mean(losses):.1f}", widths.interval(losses)]


if __name__ == "__main__":
    main(RealWidths)
