"""The tables of methods.py: mean and deviation of each method, where it wins, ties or loses."""

import functools
import itertools
import json
import pathlib
import statistics
from collections.abc import Iterable

import keras
import numpy as np
from methods_rivals import beside_kernels
from methods_table import CANDIDATES, DENSE, METHODS
from networks import NETWORKS, settings
from record import append, finished, machine, markdown
from scipy import stats

Run = dict
CHOOSING = 2
"""How many seeds choose a learning rate."""
CHANCE = 0.12
"""Up to this validation accuracy a network of ten classes has learnt nothing, at any rate."""
TIMES = "methods_time.json"
RIVAL = "base_erk"
LEVEL = 0.05
SHAPES = {"digits": (8, 8, 1), "fashion_mnist": (28, 28, 1), "cifar10": (32, 32, 3)}
RIVALS = dict.fromkeys(CANDIDATES, "gmp") | {
    "eoi_sign_in": "eoi_auto",
    "base_sign_in": "base_erk",
    "eoi_positive": "eoi_auto",
}
"""The rival that the methods of `methods_table.py` must beat."""


# --- runs -----------------------------------------------------------------------------------------


def identity(run: Run) -> tuple:
    """The key of a run; a dense network has no density."""
    density = None if run["method"] in DENSE else run["density"]
    return run["net"], run["epochs"], run["method"], density, run["seed"], changed(run)


def changed(run: Run) -> str:
    """The settings that differ between a run and the file, as a part of a title."""
    return "".join(f", {name}: {value}" for name, value in (run.get("settings") or {}).items())


def latest(runs: list[Run]) -> dict[tuple, Run]:
    """The runs with a test accuracy; of those with equal keys, the last one."""
    return {identity(run): run for run in runs if "accuracy" in run}


def tried(runs: list[Run], like: Run) -> dict[float, dict[int, float]]:
    """Validation accuracies of runs like this one: for each learning rate, by seed."""
    key = identity(like)[:4], changed(like)
    found: dict[float, dict[int, float]] = {}
    for run in runs:
        if "validation" in run and (identity(run)[:4], changed(run)) == key:
            found.setdefault(run["learning_rate"], {})[run["seed"]] = run["validation"]
    return found


def missing(
    runs: list[Run],
    rows: Iterable[Run],
    seeds: list[int],
    rates: list[float],
    choosing: list[int],
) -> int:
    """How many runs these rows of a table need at least: a grid may go on, and its best move.

    Args:
        runs: The finished ones.
        rows: Runs without a seed.
        seeds: The seeds of the runs on the whole training set.
        rates: The grid of learning rates.
        choosing: Seeds of the runs that choose among them.
    """
    there, count = latest(runs), 0
    for row in {identity(row | {"seed": None}): row | {"seed": None} for row in rows}.values():
        found = tried(runs, row)
        if found and not any(any(by_seed.values()) for by_seed in found.values()):
            continue  # lost a layer at every rate
        count += sum(len(set(choosing) - found.get(rate, {}).keys()) for rate in rates)
        count += sum(identity(row | {"seed": seed}) not in there for seed in seeds)
    return count


def keep(lines: pathlib.Path, run: Run) -> None:
    """Writes and prints a finished run."""
    append(lines, run)
    kind = "validation" if "validation" in run else "accuracy"
    rate = "" if run["learning_rate"] is None else f" learning rate {run['learning_rate']}"
    print(
        f"{run['net']} {run['method']} density {run['density']} seed {run['seed']}{rate}: "
        f"{kind} {run[kind]:.4f}",
        flush=True,
    )


# --- tables ---------------------------------------------------------------------------------------


def mean_and_deviation(values: list[float], scale: float = 1.0) -> str:
    """Mean and deviation as text; a single value by itself."""
    mean = scale * statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.2f}"
    return f"{mean:.2f} +- {scale * statistics.stdev(values):.2f}"


def beside(mine: list[float], others: list[float]) -> list[str]:
    """Points ahead of others, `p` of Student's t-test over the seeds, and whether that wins."""
    ahead = 100 * (statistics.mean(mine) - statistics.mean(others))
    if min(len(mine), len(others)) < 2:
        return [f"{ahead:+.2f}", "-", "-"]
    samples = [(statistics.mean(v), statistics.stdev(v), len(v)) for v in (mine, others)]
    if samples[0][1] == samples[1][1] == 0:  # no deviation, and no test of it
        p = float(ahead == 0)
    else:
        p = stats.ttest_ind_from_stats(*samples[0], *samples[1]).pvalue
    verdict = ("wins" if ahead > 0 else "loses") if p < LEVEL else "ties"
    return [f"{ahead:+.2f}", f"{p:.3f}" if p >= 0.001 else "<.001", verdict]


def tries_and_edge(runs: list[Run], mine: list[Run]) -> list[str]:
    """How many learning rates were tried, with how many seeds; whether the chosen is an end.

    "chance" where no rate is above it: none is the best. Rates tried with fewer seeds than others
    do not count.
    """
    by_rate = tried(runs, mine[0])
    seeds = max(map(len, by_rate.values()), default=0)
    rates = [rate for rate, found in by_rate.items() if len(found) == seeds]
    chosen = {run.get("learning_rate") for run in mine}
    if not rates:
        return ["1", "-"]
    if all(statistics.mean(by_rate[rate].values()) <= CHANCE for rate in rates):
        return [f"{len(rates)} x {seeds}", "chance"]
    edges = {"low": min(rates), "high": max(rates)}
    edge = ", ".join(k for k, rate in edges.items() if rate in chosen) or "-"
    return [f"{len(rates)} x {seeds}", edge]


def parameters(runs: list[Run], used: dict) -> str:
    """Live entries of kernels and all weights that are never sparse; the mean of several counts."""

    def others(run: Run) -> int:
        # Older runs have not recorded it, and none of a network of another shape.
        return run["others"] if "others" in run else _others(run["net"], json.dumps(used))

    return f"{statistics.mean(run['live'] + others(run) for run in runs):.0f}"


@functools.cache
def _others(net: str, used: str) -> int:
    options = json.loads(used)
    network = NETWORKS[options.get("network", net)]
    return beside_kernels(network(SHAPES[options["dataset"]], 10, options))


def table(runs: list[Run], ratios: dict[str, float], all_runs: list[Run], used: dict) -> str:
    """Mean and standard deviation over the seeds, for each method and density."""
    densities = {run["density"] for run in runs if run["method"] not in DENSE}
    densities = sorted(densities, reverse=True)
    rows = []
    for density, method in itertools.product([None, *densities], METHODS):
        mine = [run for run in runs if identity(run)[2:4] == (method, density)]
        if not mine:
            continue
        accuracies = [run["accuracy"] for run in mine]
        rival = [run["accuracy"] for run in runs if identity(run)[2:4] == (RIVAL, density)]
        against = beside(accuracies, rival) if rival and method != RIVAL else ["-"] * 3
        flops = np.mean([run["flops"] for run in mine]) / 1e6
        rows.append(
            [
                "1" if density is None else f"{density}",
                method,
                mean_and_deviation(accuracies, 100),
                f"{len(mine)}",
                *against,
                f"{np.mean([run['live'] / run['size'] for run in mine]):.4f}",
                parameters(mine, used),
                f"{flops:.3f}",
                _channels([run.get("live_channels") or [] for run in mine]),
                *([f"{ratios[method]:.2f}" if method in ratios else "-"] if ratios else []),
                ", ".join(sorted({f"{run.get('learning_rate') or '-'}" for run in mine})),
                *tries_and_edge(all_runs, mine),
            ]
        )
    header = ["density", "method", "test accuracy [%]", "seeds", f"to {RIVAL}", "p", "verdict"]
    header += [
        "reached",
        "parameters",
        "MFLOPs",
        "live channels",
        *["time ratio"][: len(ratios)],
        "learning rate",
        "tries",
        "edge",
    ]
    return markdown(header, rows)


BUDGETS = ("uniform", "erk", "snip", "grasp", "synflow")
STARTS = {
    "Base, mask of the score": "{}",
    "Base": "base_{}",
    "AI": "ai_{}",
    "EOI": "eoi_{}",
}
"""The method of a budget, by column of `combinations`."""
OTHERWISE = {"ai_erk": "ai", "eoi_erk": "eoi_auto"}


def combinations(runs: list[Run]) -> str:
    """Budgets by starts, where all that a score allows were run: the best of a density is bold."""
    text = ""
    for density in sorted({run["density"] for run in runs}, reverse=True):
        found: dict[str, list[float]] = {}
        for run in runs:
            if run["density"] == density:
                found.setdefault(run["method"], []).append(run["accuracy"])
        cells = {}
        for budget, (start, name) in itertools.product(BUDGETS, STARTS.items()):
            method = name.format(budget)
            cells[budget, start] = found.get(OTHERWISE.get(method, method), [])
        if any("uniform" in name for name in found) and RIVAL in found:
            best = max(cells.values(), key=lambda each: statistics.mean(each or [0]))
            rows = [
                [budget, *(_combined(cells[budget, s], best, found[RIVAL]) for s in STARTS)]
                for budget in BUDGETS
            ]
            text += f"\nDensity {density}: layer densities by starts, in brackets p against "
            text += f"{RIVAL}. Base, AI and EOI have random masks of these densities.\n\n"
            text += markdown(["layer densities", *STARTS], rows)
    return text


def _combined(accuracies: list[float], best: list[float], rival: list[float]) -> str:
    """A cell of `combinations`."""
    if not accuracies:
        return "-"
    value = mean_and_deviation(accuracies, 100)
    value = f"**{value}**" if accuracies is best else value
    return value if accuracies is rival else f"{value} ({beside(accuracies, rival)[1]})"


def candidates(runs: list[Run]) -> str:
    """Methods tried against GMP or EOI, which join the package only if they win at each density."""
    text = ""
    for density in sorted({run["density"] for run in runs}, reverse=True):
        accuracies: dict[str, list[float]] = {}
        for run in runs:
            if identity(run)[3] == density:
                accuracies.setdefault(run["method"], []).append(run["accuracy"])
        for method, rival in RIVALS.items():
            found = accuracies.get(method, []), accuracies.get(rival, [])
            if all(found):
                ahead, _, verdict = beside(*found)
                text += f"| {density} | {method} | {rival} | {ahead} | {verdict} | "
                text += " and ".join(f"{len(each)}" for each in found) + " |\n"
    header = ["density", "tried", "against", "points ahead", "verdict", "seeds of both"]
    return f"\nTried, and built only where it wins:\n\n{markdown(header, [])}{text}" if text else ""


def _channels(runs: list[list[list[int]]]) -> str:
    """Mean numbers of live channels: of each layer if there are few, else the total."""
    if not all(runs):
        return "-"
    live, most = np.mean(runs, axis=0).T
    if len(live) > 4:
        return f"{live.sum():.0f} of {most.sum():.0f}"
    return "/".join(f"{count:.0f}" for count in live)


def summarize(lines: pathlib.Path, known: dict, title: str) -> str:
    """The text of `results/methods.md`."""
    all_runs = finished(lines)
    runs = list(latest(all_runs).values())
    text = f"# {title}\n\n{machine()}, Keras {keras.__version__} on "
    text += f"{', '.join(sorted({run['backend'] for run in runs}))}. Adam unless noted, cosine "
    text += "decay. "
    text += f"Mean and standard deviation over seeds. `to {RIVAL}`: points ahead of a random mask "
    text += "of the same density; it wins or loses where Student's test over the seeds says so at "
    text += "5%, and ties elsewhere. `reached` is the live fraction of all kernels in the end, "
    text += (
        "with the kernels that `include` leaves dense; `parameters` are their live entries, and "
    )
    text += "biases, normalizations and whatever else is never sparse. "
    text += "MFLOPs are multiply-adds of the live entries for one sample. Live channels are those "
    text += "after ReLU that are not constant over 1000 test images, in the end. A time ratio is "
    text += "that of training against the dense network, without compilation and what sets up an "
    text += "epoch, timed apart and interleaved at one density (`time_of_training`). A method "
    text += "without a row has not been run, or left a layer without any live entry (collapse). "
    text += "Tries are the learning rates that were compared on the validation split, each with so "
    text += "many seeds; at an edge the chosen one is the least or the largest of them: a better "
    text += "one may lie beyond. At chance no rate is above it.\n"
    times = lines.with_name(TIMES)
    ratios = json.loads(times.read_text()) if times.exists() else {}
    of_times = settings("methods")
    for kind in sorted({(*identity(run)[:2], changed(run)) for run in runs}):
        mine = [run for run in runs if (*identity(run)[:2], changed(run)) == kind]
        net, epochs, other = kind
        used = known[net] | (mine[0].get("settings") or {})
        keys = (
            "dataset",
            "filters",
            "blocks",
            "unit",
            "width",
            "depth",
            "activation",
            "optimizer",
            "batch_size",
        )
        keys += ("frequency", "learning_rates", "samples", "include")
        about = ", ".join(f"{key} {used[key]}" for key in keys if key in used)
        compiled = sorted({run["jit"] for run in mine})
        about += ", " + " and ".join("XLA" if jit else "no XLA" for jit in compiled)
        # JAX and torch have a new order of batches in each epoch in any case.
        if not used.get("reshuffle", True) and any(run["backend"] == "tensorflow" for run in mine):
            about += ", one order of batches for all epochs"
        timed = ratios.get(net, {}) if known[net] == of_times.get(net) else {}
        text += f"\n## {net}, epochs: {epochs}{other}\n\n{about}\n\n"
        text += table(mine, timed, all_runs, used) + combinations(mine) + candidates(mine)
        if timed:
            text += f"\nThe dense network against itself: {timed['dense again']:.2f}.\n"
    return text
