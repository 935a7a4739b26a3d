"""The cost of answers that a smaller network changed: by labels, and as the dense one expects.

python benchmarks/changed_answers.py [--networks gru] [options]
"""

import functools
import math
from typing import NamedTuple

import keras
import numpy as np
import packages
import real
from int8 import classes
from record import machine, markdown, sentences
from runner import Measurement, Run, Setting, main

import keras_sparse_ortho as kso
from keras_sparse_ortho.models import output_kinds
from keras_sparse_ortho.recovery import distill
from keras_sparse_ortho.shrinking._judge import _LEAST_LOSS, Judge

NETWORKS = ("gru", "transformer", "resnet8", "silero")
CALIBRATION = 2048
REFITTED = 0  # passes over the rows


class ChangedAnswers(Measurement):
    """Networks with labels, narrowed without them, judged with them and without.

        python benchmarks/changed_answers.py [--networks gru] [--passes 0 3]

    Narrower networks are refitted on 2,048 rows; some learn the dense one's outputs on 20,000 rows
    for some passes after it. The labels are those of rows that made nothing of the networks.
    """

    page = lines = "changed_answers"
    settings = {
        "networks": Setting(
            [*NETWORKS], choices=[*NETWORKS, "mlp"], quick=["mlp"]
        ),
        "shares": Setting([0.5, 0.35], "of the parameters", quick=[0.5]),
        "passes": Setting([REFITTED, 3], "of training", quick=[REFITTED]),
        "rows": Setting(real.IMAGES, "at most, to train", quick=2048),
        "tested": Setting(20000, "rows at most, to test", quick=500),
    }

    def runs(self) -> list[Run]:
        given = self.given
        return [
            {"network": network, "share": share, "passes": passes}
            for network in given.networks
            for share in given.shares
            for passes in given.passes
        ]

    def run(self, which: Run) -> list[Run]:
        """Narrows a network, trains it if asked to, and compares its answers."""
        subject = _subject(which["network"])
        dense, labels = subject.dense, subject.labels
        rows = subject.rows[: self.given.rows]
        tested = subject.tested[: self.given.tested]
        small = kso.narrow(
            dense,
            which["share"],
            data=rows[:CALIBRATION],
            table=subject.table,
        )
        if which["passes"] > REFITTED:
            distill(
                small,
                dense,
                rows,
                epochs=which["passes"],
                learning_rate=1e-3,
                verbose=0,
            )
        return [which | figures_of(small, dense, tested, labels[: len(tested)])]

    def report(self, lines: list[Run]) -> str:
        text = "# The cost of changed answers\n\n" + sentences(
            f"""
            {machine()}, Keras {keras.__version__} on {keras.backend.backend()}. Trained networks,
            narrowed to a share of their parameters and refitted, or trained to answer as the dense
            one after it. Changed: answers of another class than the dense network's, in percent.
            Lost, in points of accuracy: as the dense network expects it from its probabilities; the
            same with {_LEAST_LOSS:g} at least for each changed answer, as `shrink` counts; by
            labels, with half the 95% interval. The last column is the loss by labels for each
            changed answer. Labels and rows made nothing of the networks.
            """
        )
        header = ["network", "share", "made", "changed", "lost as expected"]
        header += ["with the least loss", "by labels", "95%", "each"]
        rows = []
        for line in lines:
            passes = line["passes"]
            made = "refitted" if passes == REFITTED else f"{passes} passes"
            losses = (line["expected"], line["cautious"], line["labelled"])
            each = "-"
            if line["changed"] > 0.0:
                each = f"{line['labelled'] / line['changed']:.2f}"
            rows.append(
                [
                    line["network"],
                    f"{line['share']:g}",
                    made,
                    f"{100 * line['changed']:.1f}",
                    *(f"{100 * loss:.2f}" for loss in losses),
                    f"{100 * line['interval']:.2f}",
                    each,
                ]
            )
        return text + "\n" + markdown(header, rows)


class _Subject(NamedTuple):
    """A trained network, rows to train and to test it, and its table of widths."""

    dense: keras.Model
    rows: np.ndarray
    tested: np.ndarray
    labels: np.ndarray
    table: kso.calibration.WidthTable


@functools.lru_cache(maxsize=1)
def _subject(network: str) -> _Subject:
    """A network with its table of widths, which all its shares have in common."""
    if network in real.NETWORKS:
        packages.fetch()
    dense, rows, tested, labels = real.subject(network)
    assert labels is not None
    table = kso.widths(dense, rows[:CALIBRATION])
    return _Subject(dense, rows, tested, labels, table)


def figures_of(
    small: keras.Model,
    dense: keras.Model,
    tested: np.ndarray,
    labels: np.ndarray,
) -> Run:
    """How many answers changed, and what is lost: as expected, cautiously, and by labels."""
    outputs = dense.predict(tested, verbose=0)
    small_outputs = small.predict(tested, verbose=0)
    kinds = output_kinds(dense, 1)
    verdicts = [
        Judge([outputs], None, None, kinds, least_loss=least_loss).verdict(
            [small_outputs]
        )
        for least_loss in (0.0, _LEAST_LOSS)
    ]
    known = labels >= 0
    is_right = classes(outputs)[known] == labels[known]
    is_right_now = classes(small_outputs)[known] == labels[known]
    drops = is_right.astype(float) - is_right_now
    return {
        "changed": 1.0 - verdicts[0].agreement,
        "labelled": float(drops.mean()),
        "interval": 1.96 * float(drops.std()) / math.sqrt(drops.size),
        "tested": int(known.sum()),
        "expected": verdicts[0].lost,
        "cautious": verdicts[1].lost,
    }


if __name__ == "__main__":
    main(ChangedAnswers)
