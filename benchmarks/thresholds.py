"""Learnt thresholds: what the reviewers of STR asked, and whether a target density is reached.

python benchmarks/thresholds.py NAME [options]
"""

import dataclasses
import functools
import itertools
import math
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from networks import NETWORKS, FastGRNNCell, mlp, settings
from record import (
    RESULTS,
    ahead_and_p,
    column,
    edge_of,
    groups,
    markdown,
    matching,
    mean_and_deviation,
    sentences,
)
from runner import Measurement, Run, Setting, grid, main
from training import (
    Dataset,
    accuracy,
    compiled,
    first_rows,
    keywords,
    load,
    vowels,
    whole_batches,
)

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import _target_density

L = keras.layers
KINDS = kso.parametrizations


def density_of(model: keras.Model) -> float:
    """The density of a model's kernels."""
    weights = kso.prunable_weights(model)
    return sum(weight.live for weight in weights) / sum(
        weight.size for weight in weights
    )


# --- learnt ---------------------------------------------------------------------------------------

DENSITY = 0.05
BAND = 0.1
"""How far a density may be from the one that is searched for, as a part of it."""
BATCH = 32
EPOCHS = {"digits": 12, "vowels": 50, "keywords": 12}
RATES = {
    "digits": [0.1, 0.2],
    "vowels": [6e-3, 1.2e-2],
    "keywords": [6e-3, 1.2e-2],
}
VALIDATED = 1
"""Seeds that choose a rate."""
MORE_RATES = 2
"""How often a grid of rates goes on while its best is an edge."""

PARTS = ("free", "steered", "forces", "transfer", "recurrent")

L1, L2 = keras.regularizers.L1, keras.regularizers.L2
FIXED_DECAY = 5e-4  # of weights, where the thresholds have their own
PENALTIES: dict[str, Callable[[float], tuple[Any, Any]]] = {
    "L2 of both": lambda strength: (L2(strength / 2), L2(strength / 2)),
    "L2, own for s": lambda strength: (L2(FIXED_DECAY / 2), L2(strength / 2)),
    "L1 of both": lambda strength: (L1(strength), L1(strength)),
    "L2 of w, L1 of s": lambda strength: (L2(FIXED_DECAY / 2), L1(strength)),
}
"""By name, the penalties of weights and of thresholds for a strength."""
FREE_ROWS = [
    ("sigmoid", "L2 of both"),
    ("exp", "L2 of both"),
    ("softplus", "L2 of both"),
]
FREE_ROWS += [("sigmoid", name) for name in PENALTIES if name != "L2 of both"]
STRENGTHS = (-4.0, -1.0)
"""The decimal logarithms between which strengths are searched."""

TRANSFER_METHODS = ("GMP", "DNW", "EOI")
CELLS = {"GRU": L.GRUCell, "FastGRNN": FastGRNNCell}
UNITS = 64
RANK_STARTS = {
    "learnt ranks": "orthogonal",
    "learnt ranks, Glorot": "glorot_uniform",
}
"""By kind of network, the initializer of recurrent matrices: Keras', and one of spread values."""


class Learnt(Measurement):
    """Experiments that the reviewers of soft threshold reparameterization (STR) asked for.

        KERAS_BACKEND=jax python benchmarks/thresholds.py learnt [--parts free steered]

    - `free`: the threshold function `g`, decays of weights and thresholds, L1 and L2, as in the
      paper: the density results from a strength, which is searched for with one seed.
    - `steered`: the same under `TargetDensity`.
    - `forces`: what the penalty and the loss have each moved `s` by, step by step.
    - `transfer`: densities that STR learnt, handed to GMP, DNW and exactly orthogonal kernels.
    - `recurrent`: learnt low rank in GRU and FastGRNN cells, on spoken vowels and keywords.

    The first four train a small CNN on scikit-learn's digits. The vowels are UCI's Japanese vowels,
    as the package aeon ships them; the keywords are spoken by `espeak-ng` (`apt-get install
    espeak-ng`). Learning rates are chosen on a validation split with one seed, for all rows from
    the same grid, which goes on while its best is an edge, twice at most.
    """

    page = lines = "learnt"
    settings = {
        "parts": Setting([*PARTS], choices=PARTS, quick=["free", "forces"]),
        "data": Setting(["vowels", "keywords"], "of the part `recurrent`"),
        "densities": Setting([DENSITY], "of the part `transfer`"),
        "shares": Setting([0.25], "of ranks"),
        "seeds": Setting(3, quick=1),
        "tries": Setting(6, "strengths that are tried", quick=1),
        "epochs": Setting(int, quick=1),
    }

    def measure(self) -> None:
        """Makes the parts one after the other."""
        for part in self.given.parts:
            getattr(self, part)()

    def case(self, part: str, data: str = "digits", **which: Any) -> Run:
        """The settings of a part's runs."""
        return {
            "part": part,
            "data": data,
            "epochs": self.given.epochs or EPOCHS[data],
        } | which

    def tuned(self, **which: Any) -> list[Run]:
        """Runs at the rate that is best on the validation split, one for each seed."""
        accuracies: dict[float, float] = {}

        def validate(rate: float) -> None:
            case = which | {"rate": rate, "split": "validation"}
            runs = [
                self.once(case | {"seed": seed}) for seed in range(VALIDATED)
            ]
            accuracies[rate] = statistics.mean(column(runs, "accuracy"))

        for rate in RATES[which["data"]]:
            validate(rate)
        for _ in range(MORE_RATES):
            best = max(accuracies, key=accuracies.__getitem__)
            if min(accuracies) < best < max(accuracies):
                break
            beyond = best * 2 if best == max(accuracies) else best / 2
            validate(float(f"{beyond:.4g}"))
        best = max(accuracies, key=accuracies.__getitem__)
        case = which | {"rate": best, "split": "test"}
        return [
            self.once(case | {"seed": seed}) for seed in range(self.given.seeds)
        ]

    def run(self, which: Run) -> Run:
        """Makes a run of a part."""
        keras.utils.clear_session()
        keras.utils.set_random_seed(which["seed"])
        make = {
            "free": run_of_soft_thresholds,
            "steered": run_of_soft_thresholds,
            "forces": run_of_forces,
            "transfer": self.run_of_transfer,
            "recurrent": run_of_cells,
        }
        return make[which["part"]](which)

    def free(self) -> None:
        """Strengths that end near the density, by bisection with the first seed; then runs."""
        for g, penalty in FREE_ROWS:
            case = self.case(
                "free", split="test", rate=0.1, g=g, penalty=penalty
            )
            low, high = STRENGTHS
            for k in range(self.given.tries):
                strength = float(f"{10 ** ((low + high) / 2):.4g}")
                if k == 0 and (g, penalty) != FREE_ROWS[0]:
                    strength = self.strength_of(*FREE_ROWS[0])
                reached = self.once(case | {"strength_": strength, "seed": 0})[
                    "density"
                ]
                if abs(np.log(max(reached, 1e-9) / DENSITY)) < 0.1:
                    break
                if reached < DENSITY:
                    high = np.log10(strength)
                else:
                    low = np.log10(strength)
            strength = self.strength_of(g, penalty)
            for seed in range(self.given.seeds):
                self.once(case | {"strength_": strength, "seed": seed})

    def strength_of(self, g: str, penalty: str) -> float:
        """The strength of the free runs that ends nearest to the density."""
        runs = matching(
            self.finished(), part="free", g=g, penalty=penalty, seed=0
        )
        nearest = min(
            runs,
            key=lambda run: abs(np.log(max(run["density"], 1e-9) / DENSITY)),
        )
        return nearest["strength_"]

    def steered(self) -> None:
        """The same under `TargetDensity`, without a penalty, and with the paper's."""
        rows = [(g, "none", 0.0) for g in ("sigmoid", "exp", "softplus")]
        rows.append((*FREE_ROWS[0], self.strength_of(*FREE_ROWS[0])))
        for g, penalty, strength in rows:
            self.tuned(
                **self.case("steered", g=g, penalty=penalty, strength_=strength)
            )

    def forces(self) -> None:
        """One free run, step by step."""
        strength = self.strength_of("sigmoid", "L2 of both")
        self.once(
            self.case(
                "forces", split="test", rate=0.1, strength_=strength, seed=0
            )
        )

    def transfer(self) -> None:
        """STR, and methods with the budgets uniform, ERK and STR's own."""
        for asked in self.given.densities:
            case = self.case("transfer", asked=asked)
            runs = self.tuned(**case, method="STR", budget="learnt")
            self.learnt_densities = {
                run["seed"]: run["densities"] for run in runs
            }
            for which in grid(
                method=TRANSFER_METHODS, budget=("uniform", "erk", "STR")
            ):
                self.tuned(**case, **which)

    def run_of_transfer(self, which: Run) -> Run:
        """A run of STR, or of a method under a budget."""
        if which["method"] == "STR":
            model = kso.parametrize(small_cnn(), KINDS.SoftThreshold())
            percent = fitted(
                model, which, [kso.callbacks.TargetDensity(which["asked"])]
            )
            budget = kso.Budget.from_model(model)
            return {
                "accuracy": percent,
                "density": budget.density,
                "densities": dict(budget),
            }
        if which["budget"] == "STR":
            shares = {
                "budget": kso.Budget(self.learnt_densities[which["seed"]])
            }
        else:
            shares = {"budget": which["budget"], "density": which["asked"]}
        model, callbacks = under_budget(which["method"], shares, which["seed"])
        percent = fitted(model, which, callbacks)
        return {"accuracy": percent, "density": density_of(model)}

    def recurrent(self) -> None:
        """Each cell at full size, with learnt and with fixed ranks, and narrower, of one count."""
        for name, cell in itertools.product(self.given.data, CELLS):
            case = self.case("recurrent", name, cell=cell)
            self.tuned(**case, kind="full", units=UNITS, share=1.0)
            data = split_data(name, "test")
            sizes = {
                units: parameters(recurrent_net(cell, units, data))
                for units in range(1, UNITS + 1)
            }
            for share in self.given.shares:
                runs = []
                for kind in RANK_STARTS:
                    runs += self.tuned(
                        **case, kind=kind, units=UNITS, share=share
                    )
                count = statistics.mean(column(runs, "parameters"))
                units = min(
                    sizes,
                    key=lambda units, count=count: abs(sizes[units] - count),
                )
                self.tuned(**case, kind="narrow", units=units, share=share)

    def report(self, lines: list[Run]) -> str:
        epochs = {run["part"]: run["epochs"] for run in lines}
        text = "# Experiments that STR's reviewers asked for\n\n" + sentences(
            """
            Test accuracy in percent, mean and standard deviation over seeds; `p`: Welch's test, not
            corrected for the number of rows. Learning rates are tuned for each row on a validation
            split, but in the first table. At an `edge` the chosen rate is the least or the largest
            rate of its grid: a better one may lie beyond. An asterisk marks densities more
            than a tenth apart from the one that was asked for.
            """
        )
        for part, (title, about, table) in LEARNT_TABLES.items():
            if part in epochs:
                text += f"## {title}\n\n{sentences(about.format(epochs=epochs[part]))}"
                text += f"{table(part, lines)}\n"
        return text


# --- runs of `learnt` -----------------------------------------------------------------------------


@functools.cache
def split_data(name: str, split: str) -> Dataset:
    """The data; for validation, every fifth training example stands in for the test set."""
    data = {
        "digits": lambda: load("digits"),
        "vowels": vowels,
        "keywords": keywords,
    }[name]()
    if split == "test":
        return data
    number = np.arange(len(data.x_train))
    # Keywords are split by voices, as the test set is.
    held_back = (
        number >= 0.8 * len(number) if name == "keywords" else number % 5 == 4
    )
    x, y = data.x_train, data.y_train
    return Dataset(
        name, x[~held_back], y[~held_back], x[held_back], y[held_back]
    )


def fitted(
    model: keras.Model, which: Run, callbacks: Iterable[Any] = ()
) -> float:
    """The test accuracy in percent after training, the rate a cosine over the epochs."""
    data = split_data(which["data"], which["split"])
    epochs = which["epochs"]
    sgd = which["data"] == "digits"
    optimizer = (
        keras.optimizers.SGD(momentum=0.9) if sgd else keras.optimizers.Adam()
    )
    rate = keras.callbacks.LearningRateScheduler(
        lambda k: decayed(which["rate"], k, epochs)
    )
    compiled(model, optimizer)
    batches = whole_batches(data.x_train, data.y_train, BATCH)
    model.fit(**batches, epochs=epochs, verbose=0, callbacks=[rate, *callbacks])
    return accuracy(model, data)


def decayed(rate: float, epoch: int, epochs: int) -> float:
    """Half a cosine, in steps: a schedule would be compiled again for every rate."""
    return rate * (1 + math.cos(math.pi * epoch / epochs)) / 2


def small_cnn() -> keras.Model:
    """The small CNN of `methods.py`, for digits."""
    model = NETWORKS["cnn"]((8, 8, 1), 10, settings("methods")["cnn"])
    for layer in model.layers:
        if isinstance(layer, L.BatchNormalization):
            layer.momentum = (
                0.9  # Keras' 0.99 remembers weights of before they shrank
            )
    return model


def soft(g: str, penalty: str, strength: float) -> keras.Model:
    """The CNN with soft thresholds, whose variables have penalties."""
    model = kso.parametrize(small_cnn(), KINDS.SoftThreshold(g=g))
    for weight in kso.prunable_weights(model) if strength else []:
        regularizers = PENALTIES[penalty](strength)
        weight.variable.regularizer, weight.parametrization.s.regularizer = (
            regularizers
        )
    return model


def run_of_soft_thresholds(which: Run) -> Run:
    """A run of the parts `free` and `steered`."""
    model = soft(which["g"], which["penalty"], which["strength_"])
    steering = (
        [kso.callbacks.TargetDensity(DENSITY)]
        if which["part"] == "steered"
        else []
    )
    percent = fitted(model, which, steering)
    return {"accuracy": percent, "density": density_of(model)}


class Forces(keras.callbacks.Callback):
    """Splits the way of every `s` under SGD into what its decay and what the loss have moved.

    The velocity is a sum over gradients, so that of the decay's part `strength * s` alone gives the
    decay's share, and the loss has moved the rest.
    """

    def __init__(
        self,
        rate: Callable[[int], float],
        strength: float,
        momentum: float = 0.9,
    ):
        super().__init__()
        self.rate, self.strength, self.momentum = rate, strength, momentum
        # of steps: s, by decay, by loss, t, each by layer
        self.curves: list[list[list[float]]] = []

    def _s(self) -> np.ndarray:
        weights = kso.prunable_weights(self.model)
        return np.array(
            [float(weight.parametrization.s.numpy()) for weight in weights]
        )

    def on_train_begin(self, logs: dict | None = None) -> None:
        """The start."""
        self.first = self.last = self._s()
        self.velocity = self.by_decay = np.zeros_like(self.first)
        self.step = 0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """The rate of its steps."""
        self.now = self.rate(epoch)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """One step of SGD."""
        pulled = self.now * self.strength * self.last
        self.velocity = self.momentum * self.velocity - pulled
        self.by_decay = self.by_decay + self.velocity
        self.step, self.last = self.step + 1, self._s()
        if self.step % 10 == 0:
            by_loss = self.last - self.first - self.by_decay
            parts = (
                self.last,
                self.by_decay,
                by_loss,
                1 / (1 + np.exp(-self.last)),
            )
            self.curves.append(
                [[round(float(x), 5) for x in part] for part in parts]
            )


def run_of_forces(which: Run) -> Run:
    """A free run with the curves of its forces."""
    epochs = which["epochs"]
    watch = Forces(
        lambda epoch: decayed(which["rate"], epoch, epochs), which["strength_"]
    )
    model = soft("sigmoid", "L2 of both", which["strength_"])
    percent = fitted(model, which, [watch])
    return {
        "accuracy": percent,
        "density": density_of(model),
        "curves": watch.curves,
    }


def under_budget(
    method: str, shares: Run, seed: int
) -> tuple[keras.Model, list[Any]]:
    """The CNN and the callbacks of a method that takes a budget."""
    model = small_cnn()
    updates = [kso.callbacks.UpdateMasks()]
    if method == "GMP":
        masks = KINDS.MagnitudeMask(kso.schedules.Cubic())
        return kso.parametrize(model, masks, **shares), updates
    if method == "DNW":
        return kso.parametrize(
            model, KINDS.StraightThroughTopK(), **shares
        ), updates
    budget = shares["budget"]
    if not isinstance(budget, str):
        shares = shares | {"budget": kso.budgets.lift(model, budget)}
    start = kso.initializers.ExactOrthogonal(gain=1.0)
    return kso.sparsify(model, **shares, initializer=start, seed=seed), []


def recurrent_net(
    cell: str, units: int, data: Dataset, start: str = "orthogonal"
) -> keras.Model:
    """One layer and a head."""
    cells = L.RNN(CELLS[cell](units, recurrent_initializer=start), name="cells")
    layers = [cells, L.Dense(data.classes, name="head")]
    return keras.Sequential([keras.Input(data.x_train.shape[1:]), *layers])


def run_of_cells(which: Run) -> Run:
    """A run of the part `recurrent`."""
    data = split_data(which["data"], which["split"])
    start = RANK_STARTS.get(which["kind"])
    model = recurrent_net(
        which["cell"], which["units"], data, start or "orthogonal"
    )
    callbacks = []
    if start:
        model = kso.parametrize(
            model, KINDS.LowRankSoftThreshold(), exclude="head"
        )
        callbacks = [kso.callbacks.TargetDensity(which["share"])]
    percent = fitted(model, which, callbacks)
    return {"accuracy": percent, "parameters": parameters(model)}


def parameters(model: keras.Model) -> int:
    """The count, with matrices stored as two factors where these are smaller."""
    total = 0
    for weight in kso.prunable_weights(model):
        total += weight.size
        thresholds = weight.parametrization
        if isinstance(thresholds, KINDS.LowRankSoftThreshold):
            rows = int(weight.shape[0])
            factors = thresholds.live_rank * (rows + weight.size // rows)
            total += min(factors - weight.size, 0)
    for variable in model.trainable_variables:
        # The bias of a GRU has two axes.
        bias = "bias" in variable.path if len(variable.shape) == 1 else False
        bias = bias or (
            len(variable.shape) == 2 and variable.path.endswith("bias")
        )
        total += int(np.prod(variable.shape)) if bias else 0
    return total


# --- tables of `learnt` ---------------------------------------------------------------------------


def spread(runs: Iterable[Run]) -> str:
    """Mean and standard deviation of the accuracies."""
    return mean_and_deviation(column(runs, "accuracy"), 1, always=True)


def compared(runs: list[Run], rival: list[Run] | None) -> list[str]:
    """Points ahead of a rival, and Welch's p."""
    if rival is None or runs is rival:
        return ["", ""]
    return ahead_and_p(column(runs, "accuracy"), column(rival, "accuracy"))


def tested(part: str, lines: list[Run], *names: str) -> dict[tuple, list[Run]]:
    """The test runs of each kind at the rate that was chosen: the last with all seeds."""
    runs = matching(lines, part=part, split="test")
    chosen = {}
    for kind, members in groups(runs, *names).items():
        by_rate = [*groups(members, "rate").values()]
        chosen[kind] = max(by_rate[::-1], key=len)
    return chosen


def edges(part: str, lines: list[Run], *names: str) -> dict[tuple, str]:
    """Where the rate that was chosen for a kind is the least or the largest of several."""
    ends = {}
    tried = groups(matching(lines, part=part), *names)
    for kind, runs in tested(part, lines, *names).items():
        ends[kind] = edge_of(runs[0]["rate"], column(tried[kind], "rate"))
    return ends


def table_of_penalties(part: str, lines: list[Run]) -> str:
    """Rows of g and penalties: of the strengths that were tried, that with the most seeds."""
    names = ("g", "penalty", "strength_")
    by_strength = tested(part, lines, *names)
    ends = edges(part, lines, *names)
    by_row: dict[tuple, list[tuple]] = {}
    for kind in by_strength:
        by_row.setdefault(kind[:2], []).append(kind)
    chosen = {
        row: max(kinds, key=lambda kind: len(by_strength[kind]))
        for row, kinds in by_row.items()
    }
    first = chosen.get(
        ("sigmoid", "none" if part == "steered" else "L2 of both")
    )
    rows = []
    for (g, penalty), kind in chosen.items():
        runs = by_strength[kind]
        reached = column(runs, "density")
        densities = f"{min(reached):.4f} to {max(reached):.4f}"
        if max(abs(density / DENSITY - 1) for density in reached) > BAND:
            densities += " *"
        cells = [
            g,
            penalty,
            f"{kind[2]:.2g}",
            str(len(by_row[g, penalty])),
            densities,
        ]
        compared_cells = compared(runs, by_strength.get(first))
        rows.append([*cells, spread(runs), *compared_cells, ends[kind]])
    header = [
        "g",
        "penalty",
        "strength",
        "strengths tried",
        "density",
        "accuracy",
    ]
    return markdown([*header, "to the first", "p", "edge"], rows)


def table_of_transfer(part: str, lines: list[Run]) -> str:
    """Methods by budget."""
    names = ("asked", "method", "budget")
    by_kind = tested(part, lines, *names)
    ends = edges(part, lines, *names)
    rows = []
    for (asked, method, budget), runs in by_kind.items():
        rival = None if method == "STR" else by_kind.get((asked, method, "erk"))
        reached = f"{statistics.mean(column(runs, 'density')):.4f}"
        cells = [f"{asked:g}", method, budget, reached, spread(runs)]
        end = ends[asked, method, budget]
        rows.append([*cells, *compared(runs, rival), end])
    header = ["density", "method", "budget", "reached", "accuracy", "to ERK"]
    return markdown([*header, "p", "edge"], rows)


def table_of_recurrent(part: str, lines: list[Run]) -> str:
    """Learnt ranks against a narrower network of the same count."""
    names = ("data", "cell", "kind", "share")
    by_kind = tested(part, lines, *names)
    ends = edges(part, lines, *names)
    rows = []
    for (name, cell, kind, share), runs in by_kind.items():
        rival = (
            by_kind.get((name, cell, "narrow", share))
            if kind in RANK_STARTS
            else None
        )
        count = f"{statistics.mean(column(runs, 'parameters')):.0f}"
        cells = [
            name,
            cell,
            kind,
            "" if kind == "full" else f"{share:g}",
            str(runs[0]["units"]),
        ]
        end = ends[name, cell, kind, share]
        rows.append([*cells, count, spread(runs), *compared(runs, rival), end])
    header = [
        "data",
        "cell",
        "matrices",
        "share of ranks",
        "units",
        "parameters",
        "accuracy",
    ]
    return markdown([*header, "to narrow", "p", "edge"], rows)


LEARNT_TABLES = {
    "free": (
        "Free thresholds",
        "The small CNN on digits, SGD at 0.1, {epochs} epochs. As in the paper the density results "
        f"from the strength, searched for with one seed to end at {DENSITY} within a tenth. Where "
        f"s has its own penalty, that of w is L2 of {FIXED_DECAY}.",
        table_of_penalties,
    ),
    "steered": (
        "Under TargetDensity",
        f"The same network, density {DENSITY}, with the strengths of the table above.",
        table_of_penalties,
    ),
    "transfer": (
        "Budgets that STR has learnt",
        "The same network; STR's budget is that of the run with the same seed. EOI has gain 1.",
        table_of_transfer,
    ),
    "recurrent": (
        "Low rank in recurrent networks",
        "One layer and a head. `vowels`: nine speakers; `keywords`: ten words by synthetic voices "
        "under noise, other voices in the test set. Learnt ranks: `LowRankSoftThreshold` on both "
        "matrices under `TargetDensity`; parameters are those of two factors where these are "
        "smaller. `narrow`: fewer units, the same count.",
        table_of_recurrent,
    ),
}
"""By part, the heading of a section, the text above its table, and the function of the table."""


# --- floors ---------------------------------------------------------------------------------------

FLOORS_OPTIONS = {
    "filters": [24, 48, 48],
    "batch_size": 128,
    "frequency": 50,
    "jit": True,
}
FLOORS = {
    "floor, by magnitude": (0.3, True),
    "floor, by place": (0.3, False),
    "no floor, by magnitude": (0.0, True),
    "no floor, by place": (0.0, False),
}
"""By name, the floor, and whether entries out of reach are ranked by magnitude."""
by_magnitude = _target_density.entries_of


def by_place(threshold) -> _target_density.Entries:
    """Entries out of reach, all equal, so that the first of them are kept."""
    entries = by_magnitude(threshold)
    return entries._replace(
        scales=np.where(entries.critical > -np.inf, 0.0, -np.inf)
    )


def pooled(data: Dataset) -> Dataset:
    """Images of half the height and width."""

    def halved(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.reshape(-1, 14, 2, 14, 2, 1).mean((2, 4)))

    return dataclasses.replace(
        data, x_train=halved(data.x_train), x_test=halved(data.x_test)
    )


class Floors(Measurement):
    """STR under `TargetDensity` with and without its floor, and its rank of entries out of reach.

        python benchmarks/thresholds.py floors [--nets cnn14 cnn] [--rates 0.016 0.032]

    The small CNN of methods.py on Fashion-MNIST at density 0.05, Adam, cosine decay, four epochs;
    `cnn14` has the same weights on images pooled to 14 x 14, a third of the work. Entries of
    magnitude 1 and more are out of a sigmoid's reach: they are ranked by magnitude, or, as
    before, by place.
    """

    page = lines = "floors"
    settings = {
        "nets": Setting(
            ["cnn14", "cnn"], choices=["cnn14", "cnn"], quick=["cnn14"]
        ),
        "rates": Setting([0.008, 0.016, 0.032, 0.064], quick=[0.032]),
        "seeds": Setting([0, 1, 2], quick=[0]),
        "epochs": Setting(4, quick=1),
    }

    def runs(self) -> Iterable[Run]:
        """All rates with the floor; without it, and ranked by place, some of them."""
        given = self.given
        for which in grid(
            net=given.nets,
            variant=FLOORS,
            rate=given.rates,
            seed=given.seeds,
            epochs=[given.epochs],
        ):
            ablated = which["net"] == "cnn14" and which["rate"] in (
                0.016,
                0.032,
            )
            ablated = ablated and which["seed"] == 0
            if ablated or which["variant"] == "floor, by magnitude":
                yield which

    def run(self, which: Run) -> Run:
        import methods

        data = load("fashion_mnist")
        if which["net"] == "cnn14":
            data = pooled(data)
        keras.utils.clear_session()
        floor, ranked = FLOORS[which["variant"]]
        _target_density.entries_of = by_magnitude if ranked else by_place

        def method(
            model: keras.Model, plan: Run
        ) -> tuple[keras.Model, list[Any]]:
            model = kso.parametrize(model, kso.SoftThreshold())
            return model, [
                kso.callbacks.TargetDensity(plan["density"], floor=floor)
            ]

        methods.METHODS["floors"] = method
        options = FLOORS_OPTIONS | {
            "epochs": which["epochs"],
            "budgets": RESULTS,
        }
        seed, rate = which["seed"], which["rate"]
        model = methods.trained(
            "cnn", "floors", DENSITY, seed, data, options, rate
        )
        weights = kso.prunable_weights(model)
        return {
            "accuracy": accuracy(model, data) / 100,
            "live": sum(weight.live for weight in weights),
            "size": sum(weight.size for weight in weights),
            "shares": [weight.density for weight in weights],
        }

    def report(self, lines: list[Run]) -> str:
        by_row = groups(lines, "net", "variant", "rate")
        order = [*FLOORS]
        rows = []
        for net, variant, rate in sorted(
            by_row, key=lambda k: (k[0], order.index(k[1]), k[2])
        ):
            runs = by_row[net, variant, rate]
            percent = column(runs, "accuracy", 100)
            shares = np.mean([run["shares"] for run in runs], axis=0)
            counts = sorted({run["live"] for run in runs})
            rows.append(
                [
                    *(net, variant, f"{rate:g}", mean_and_deviation(percent)),
                    f"{min(percent):.2f}",
                    "/".join(f"{share:.3f}" for share in shares),
                    ", ".join(f"{count}" for count in counts),
                    f"{len(runs)}",
                ]
            )
        about = sentences(
            """
            STR on Fashion-MNIST at density 0.05: 1590 of 31800 entries. Shares are the densities of
            the layers in order, the head last.
            """
        )
        header = [
            "net",
            "variant",
            "rate",
            "test accuracy [%]",
            "worst",
            "shares",
            "live",
            "seeds",
        ]
        return "# Floors of TargetDensity\n\n" + about + markdown(header, rows)


# --- target ---------------------------------------------------------------------------------------

TARGETS = (0.5, 0.1, 0.05, 0.02, 0.01)
TARGET_NETS = ("MLP", "CNN")
TARGET_OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(2e-3),
}
TARGET_EPOCHS = 20


class Target(Measurement):
    """Target and final densities of soft thresholds under `TargetDensity`.

        KERAS_BACKEND=jax python benchmarks/thresholds.py target

    Sparsities of 50, 90, 95, 98 and 99% x MLP and CNN x SGD and Adam x 3 seeds, under XLA, on
    scikit-learn's digits: 60 runs on each backend.
    """

    page = lines = "target_density"
    settings = {
        "nets": Setting([*TARGET_NETS], choices=TARGET_NETS, quick=["MLP"]),
        "optimizers": Setting(
            [*TARGET_OPTIMIZERS], choices=TARGET_OPTIMIZERS, quick=["Adam"]
        ),
        "densities": Setting([*TARGETS], quick=[0.1, 0.02]),
        "seeds": Setting([0, 1, 2], quick=[0]),
        "epochs": Setting(TARGET_EPOCHS, quick=4),
    }

    def finished(self) -> list[Run]:
        """The lines; the first ones did not say how many epochs."""
        return [{"epochs": TARGET_EPOCHS} | line for line in super().finished()]

    def runs(self) -> list[Run]:
        given = self.given
        return grid(
            backend=[keras.backend.backend()],
            net=given.nets,
            optimizer=given.optimizers,
            density=given.densities,
            seed=given.seeds,
            epochs=[given.epochs],
        )

    def run(self, which: Run) -> Run:
        from sklearn.datasets import load_digits

        keras.utils.clear_session()
        keras.utils.set_random_seed(which["seed"])
        x, y = load_digits(return_X_y=True)
        x = x.astype("float32") / 16
        if which["net"] == "MLP":
            model = mlp((64,), (256, 256))
        else:
            x = x.reshape(-1, 8, 8, 1)
            options = {"filters": (32, 64, 64), "strides": (1, 2, 1)}
            model = NETWORKS["cnn"]((8, 8, 1), 10, options)
        model = kso.parametrize(model, kso.SoftThreshold())
        compiled(
            model, TARGET_OPTIMIZERS[which["optimizer"]](), jit_compile=True
        )
        steering = kso.callbacks.TargetDensity(which["density"], frequency=20)
        epochs = which["epochs"]
        model.fit(
            x[:1440],
            y[:1440],
            32,
            epochs=epochs,
            verbose=0,
            callbacks=[steering],
        )
        budget = kso.Budget.from_model(model)
        share = model.evaluate(x[1440:], y[1440:], verbose=0)[1]
        return {
            "size": budget.size,
            "live": budget.live,
            "accuracy": float(share),
        }

    def report(self, lines: list[Run]) -> str:
        by_row = groups(lines, "net", "optimizer", "density", "backend")
        backends = sorted({line["backend"] for line in lines})
        rows = []
        for kind in itertools.product(
            TARGET_NETS, TARGET_OPTIMIZERS, TARGETS, backends
        ):
            if runs := by_row.get(kind):
                net, optimizer, density, backend = kind
                reached = [run["live"] / run["size"] for run in runs]
                rows.append(
                    [
                        *(net, optimizer, backend, f"{density}"),
                        f"{min(reached):.5f} to {max(reached):.5f}",
                        f"{100 * max(map(miss, runs)):.3f}%",
                        f"{100 * sum(column(runs, 'accuracy')) / len(runs):.1f}%",
                        f"{len(runs)}",
                    ]
                )
        epochs = " and ".join(sorted({str(line["epochs"]) for line in lines}))
        about = sentences(
            f"""
            {len(lines)} runs of {epochs} epochs on scikit-learn's digits, XLA. MLP 64-256-256-10,
            CNN of three convolutions. The largest relative miss of all runs is
            {100 * max(map(miss, lines)):.3f}%.
            """
        )
        header = [
            "net",
            "optimizer",
            "backend",
            "asked",
            "reached",
            "largest miss",
            "accuracy",
        ]
        title = "# Soft thresholds under TargetDensity: asked and reached densities\n\n"
        return title + about + markdown([*header, "runs"], rows)


def miss(run: dict) -> float:
    """Relative distance of the final density from the target."""
    return abs(run["live"] / run["size"] - run["density"]) / run["density"]


# --- early_stopping -------------------------------------------------------------------------------

STOPPED = ("FixedMask", "SET", "RigL", "STR", "channel STR", "GMP", "DNW")


class EarlyStopping(Measurement):
    """Final density with early stopping, for every method.

        python benchmarks/thresholds.py early_stopping [--density 0.05] [--epochs 20]

    An MLP 784-300-100-10 on 20,000 images of Fashion-MNIST and 5,000 more for validation, with
    each method, for at most `epochs` epochs: once with `EarlyStopping(patience=2,
    restore_best_weights=True)` alone, once inside `BestAtDensity`. Fails unless every run with
    `BestAtDensity` ends at the target density, and every other run does or warns.
    """

    page = "early_stopping"
    settings = {
        "density": Setting(0.05),
        "epochs": Setting(20, quick=4),
        "samples": Setting(20000, quick=2000),
        "methods": Setting([*STOPPED], choices=STOPPED, quick=["STR", "GMP"]),
    }

    def runs(self) -> list[Run]:
        return grid(method=self.given.methods, careful=(False, True))

    def run(self, which: Run) -> Run:
        given = self.given
        data = load("fashion_mnist")
        few = first_rows(data, given.samples + given.samples // 4)
        x = few.x_train.reshape(-1, 784)
        y = few.y_train
        train = (x[: given.samples], y[: given.samples])
        keras.utils.set_random_seed(0)
        model, callbacks = stopped_network(
            which["method"], given.density, train
        )
        compiled(model, keras.optimizers.Adam(1e-3))
        stop = keras.callbacks.EarlyStopping(
            "val_accuracy", mode="max", patience=2, restore_best_weights=True
        )
        around = kso.callbacks.BestAtDensity(stop) if which["careful"] else stop
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(
                *(*train, 128, given.epochs),
                verbose=0,
                validation_data=(x[given.samples :], y[given.samples :]),
                callbacks=[*callbacks, around],
            )
        weights = [
            w
            for w in kso.prunable_weights(model)
            if w.parametrization is not None
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", kso.errors.DensityWarning)
            _, share = model.evaluate(
                data.x_test.reshape(-1, 784), data.y_test, verbose=0
            )
        return {
            "epochs": len(history.history["loss"]),
            "best": stop.best_epoch + 1,
            "size": sum(weight.size for weight in weights),
            "live": sum(weight.live for weight in weights),
            "warned": any(
                w.category is kso.errors.DensityWarning for w in caught
            ),
            "accuracy": share,
        }

    def asked(self, method: str) -> float:
        """The target density of a method; of whole channels fewer can be removed: half of them."""
        return 0.5 if method == "channel STR" else self.given.density

    def missed(self, line: Run) -> bool:
        """Whether a run ends at another density, and nobody is warned."""
        # To within one entry of each weight, or one channel.
        slack = 784 if line["method"] == "channel STR" else 3
        away = (
            abs(line["live"] - self.asked(line["method"]) * line["size"])
            > slack
        )
        return away and (line["careful"] or not line["warned"])

    def report(self, lines: list[Run]) -> str:
        wrong = [line for line in lines if self.missed(line)]
        if wrong:
            sys.exit(f"not at the density asked for, and no warning: {wrong}")
        rows = []
        for method, runs in groups(lines, "method").items():
            cells = [method, str(self.asked(method))]
            for run in runs:
                cells += [
                    f"{run['epochs']}, {run['best']}",
                    f"{run['live'] / run['size']:.4f}",
                ]
                cells += [
                    "yes" if run["warned"] else "no",
                    f"{run['accuracy']:.4f}",
                ]
            rows.append(cells)
        about = sentences(
            f"""
            784-300-100-10 on {self.given.samples:,} pictures of Fashion-MNIST, at most
            {self.given.epochs} epochs, one seed, `EarlyStopping(patience=2,
            restore_best_weights=True)` alone and inside `BestAtDensity`. The best epoch is the one
            that was restored; accuracy is that of the test set. Channels of the last layer stay,
            the others end at half.
            """
        )
        result = ["density", "warned", "accuracy"]
        header = ["method", "asked", "alone: of epochs, the best", *result]
        header += ["`BestAtDensity`: of epochs, the best", *result]
        return (
            "# EarlyStopping, and the density asked for\n\n"
            + about
            + markdown(header, rows)
        )


def stopped_network(
    method: str, density: float, train: Sequence[np.ndarray]
) -> tuple[keras.Model, list[Any]]:
    """The model, not compiled, and the callbacks of the method."""
    dense = mlp((784,), (300, 100))
    callbacks = kso.callbacks
    if method in ("FixedMask", "SET", "RigL"):
        model = kso.sparsify(dense, density, seed=0)
        moving = {
            "SET": callbacks.SET,
            "RigL": lambda: callbacks.RigL(train, 128),
        }
        return model, [moving[method]()] if method in moving else []
    if method in ("GMP", "DNW"):
        kind = (
            kso.MagnitudeMask if method == "GMP" else KINDS.StraightThroughTopK
        )
        masks = kind(kso.schedules.Cubic(density))
        return kso.parametrize(dense, masks), [callbacks.UpdateMasks()]
    if method == "STR":
        return kso.parametrize(dense, kso.SoftThreshold), [
            callbacks.TargetDensity(density)
        ]
    model = kso.parametrize(dense, KINDS.ChannelSoftThreshold, exclude="head")
    return model, [callbacks.TargetDensity(0.5)]


if __name__ == "__main__":
    main(Learnt, Floors, Target, EarlyStopping)
