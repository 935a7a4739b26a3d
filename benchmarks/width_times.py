"""The search for widths by measured milliseconds, beside that by multiply-adds.

python benchmarks/width_times.py [--networks resnet8] [options]
"""

import itertools
import pathlib
import tempfile
from collections.abc import Mapping

import keras
import numpy as np
import packages
import real
import widths
from kernel_times import kernel_times
from record import groups, machines_of, markdown, sentences
from runner import Measurement, Run, Setting, main

import keras_sparse_ortho as kso
from keras_sparse_ortho.calibration import WidthTable
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.export import latencies

NETWORKS = ("resnet8", "mobilenet", "birdnet", "fer")
MODE = "dynamic_int8"


class WidthTimes(Measurement):
    """Networks whose widths are searched by time, and by multiply-adds, at equal times.

        KERAS_BACKEND=tensorflow python benchmarks/width_times.py

    The cost in time is the sum over the kernels of their milliseconds in the dense file, each times
    the share of multiply-adds that it has left.
    """

    page = lines = "width_times"
    settings = {
        "networks": Setting([*NETWORKS], choices=NETWORKS),
        "shares": Setting([0.85, 0.75, 0.6, 0.5, 0.4], "of the cost"),
        "rows": Setting(256, "that calibrate"),
        "tested": Setting(1000, "rows at most, to test"),
        "minutes": Setting(4.0, "of the table of widths"),
    }

    def measure(self) -> None:
        """Fetches the packages first."""
        packages.fetch()
        super().measure()

    def runs(self) -> list[Run]:
        return [{"network": name} for name in self.given.networks]

    def run(self, which: Run) -> list[Run]:
        """Narrows a network by each cost, and times all files in turn."""
        given = self.given
        dense, rows, tested, _ = real.subject(which["network"])
        x = rows[: given.rows]
        tested = tested[: given.tested]
        reference = _outputs(dense, tested)
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            files = [folder / "dense.tflite"]
            real.write_file(dense, x, MODE, files[0])
            table = kso.widths(dense, x, minutes=given.minutes)
            in_time = TimeCost(dense, table, kernel_times(files[0]))
            costs = {"work": "work", "milliseconds": in_time}
            lines = [which | {"cost": "dense", "share": 1.0}]
            for share, (cost, cost_of) in itertools.product(
                given.shares, costs.items()
            ):
                try:
                    chosen = table.search(share, cost=cost_of)
                except BudgetError:  # out of reach
                    continue
                small = kso.narrow(dense, chosen, data=x, table=table)
                file = folder / f"{cost}_{share}.tflite"
                real.write_file(small, x, MODE, file)
                files.append(file)
                error = widths.relative_distance(
                    _outputs(small, tested), reference
                )
                line = {
                    "cost": cost,
                    "share": share,
                    "error": error,
                    "work": table.cost(chosen, "work")
                    / table.cost(cost="work"),
                    "predicted": in_time(chosen) / in_time({}),
                }
                lines.append(which | line)
            milliseconds = latencies(files)
        for line, ms in zip(lines, milliseconds, strict=True):
            line |= {"ms": ms, "time": ms / milliseconds[0]}
        return lines

    def report(self, lines: list[Run]) -> str:
        text = "# Widths by measured milliseconds\n\n" + sentences(
            f"""
            {machines_of(lines)}. A cost that counts milliseconds, beside `"work"`, multiply-adds
            with the outputs of each kernel rounded up to 16. The milliseconds of a kernel are
            measured in the dense file ({MODE}), which is cut in front of each kernel, and fall with
            its work. Time: of the narrower file, as a share of the dense one's; work and
            milliseconds: what the two costs say of it. Error: the relative squared error of the
            outputs on test rows, at once. The last column is the error of the search by the other
            cost at the same measured time, between its files (the logarithm of the error over that
            of the time). On Fashion-MNIST a ResNet-8 and a MobileNet, and two networks of packages.
            """
        )
        rows = []
        for members in groups(lines, "network").values():
            narrower = members[1:]
            rows += [_row(line, narrower) for line in narrower]
        header = ["network", "cost", "share", "time", "work", "milliseconds"]
        return text + markdown([*header, "error", "of the other"], rows)


class TimeCost:
    """The milliseconds of a network by its widths: a cost for `WidthTable.search`.

    Args:
        model: Model. The dense network.
        table: WidthTable of it.
        times: dict from the path of a kernel to its milliseconds in the dense file.
    """

    def __init__(
        self, model: keras.Model, table: WidthTable, times: Mapping[str, float]
    ) -> None:
        self._costs = table.costs
        work = self._costs.work_by_weight({})
        self._rates = np.zeros(len(work))
        for number, weight in enumerate(kso.strip(model).weights):
            if weight.path in times and work[number] > 0:
                self._rates[number] = times[weight.path] / work[number]

    def __call__(self, chosen: Mapping[str, int]) -> float:
        return float(self._rates @ self._costs.work_by_weight(chosen))


def _outputs(model: keras.Model, x: np.ndarray) -> np.ndarray:
    return np.asarray(model.predict(x, verbose=0), np.float64)


def _row(line: Run, lines: list[Run]) -> list[str]:
    """The row of a network, beside the others that were made from the same one."""
    rivals = [other for other in lines if other["cost"] != line["cost"]]
    return [
        line["network"],
        line["cost"],
        f"{line['share']:g}",
        f"{line['time']:.2f}",
        f"{line['work']:.2f}",
        f"{line['predicted']:.2f}",
        f"{line['error']:.2g}",
        _error_at(rivals, line["time"]),
    ]


def _error_at(rivals: list[Run], time: float) -> str:
    """The error at a time, between those of some files; empty beyond them."""
    ordered = sorted(rivals, key=lambda line: line["time"])
    times = [line["time"] for line in ordered]
    if not times or not times[0] <= time <= times[-1]:
        return ""
    errors = [line["error"] for line in ordered]
    logarithm = np.interp(np.log(time), np.log(times), np.log(errors))
    return f"{np.exp(logarithm):.2g}"


if __name__ == "__main__":
    main(WidthTimes)
