"""The tables of methods.py: mean and deviation of each method, where it wins, ties or loses."""

import functools
import itertools
import json
import statistics
from collections.abc import Iterable, Mapping

import keras
import numpy as np
from methods_table import CANDIDATES, DENSE, METHODS_SHOWN, beside_kernels
from networks import NETWORKS, settings
from record import (
    column,
    edge_of,
    groups,
    last_of_each,
    machine,
    markdown,
    mean_and_deviation,
    sentences,
)
from runner import Run
from scipy import stats

CHOOSING = 2
"""How many seeds choose a learning rate."""
CHANCE = 0.12
"""Up to this validation accuracy a network of ten classes has learnt nothing, at any rate."""
TIMES = "methods_time.json"
BUSY = "faster_ratios.jsonl"
RIVAL = "base_erk"
LEVEL = 0.05
SHAPES = {
    "digits": (8, 8, 1),
    "fashion_mnist": (28, 28, 1),
    "cifar10": (32, 32, 3),
}
RIVALS = dict.fromkeys(CANDIDATES, "gmp") | {
    "eoi_sign_in": "eoi_auto",
    "base_sign_in": "base_erk",
    "eoi_positive": "eoi_auto",
}
"""The rival that the methods of `methods_table.py` must beat."""


MIRRORED = {
    "dense_mirrored": ("dense_orthogonal", "dense_he"),
    "eoi_mirrored": (
        "sao_relu",
        "eoi_erk",
        "base_scaled",
        "dense_orthogonal",
        "dense_mirrored",
    ),
}
"""Whom each start in the mirrored form is shown beside."""


# --- runs -----------------------------------------------------------------------------------------


def identity(run: Run) -> tuple:
    """The key of a run; a dense network has no density."""
    density = None if run["method"] in DENSE else run["density"]
    return (
        run["net"],
        run["epochs"],
        run["method"],
        density,
        run["seed"],
        changed(run),
    )


def changed(run: Run) -> str:
    """The settings that differ between a run and the file, as a part of a title."""
    return "".join(
        f", {name}: {value}"
        for name, value in (run.get("settings") or {}).items()
    )


def latest(runs: list[Run]) -> dict[tuple, Run]:
    """The runs with a test accuracy; of those with equal keys, the last one."""
    return {identity(run): run for run in runs if "accuracy" in run}


def tried(runs: list[Run], like: Run) -> dict[float, dict[int, float]]:
    """Validation accuracies of runs like this one: for each learning rate, by seed."""
    kind = identity(like)[:4], changed(like)
    accuracies: dict[float, dict[int, float]] = {}
    for run in runs:
        if "validation" in run and (identity(run)[:4], changed(run)) == kind:
            accuracies.setdefault(run["learning_rate"], {})[run["seed"]] = run[
                "validation"
            ]
    return accuracies


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
    tested = latest(runs)
    count = 0
    for row in {
        identity(row | {"seed": None}): row | {"seed": None} for row in rows
    }.values():
        accuracies = tried(runs, row)
        if accuracies and not any(
            any(by_seed.values()) for by_seed in accuracies.values()
        ):
            continue  # lost a layer at every rate
        for rate in rates:
            count += len(set(choosing) - accuracies.get(rate, {}).keys())
        count += sum(
            identity(row | {"seed": seed}) not in tested for seed in seeds
        )
    return count


# --- cells ----------------------------------------------------------------------------------------


def percent(accuracies: list[float]) -> str:
    """Mean and deviation in percent."""
    return mean_and_deviation([100 * accuracy for accuracy in accuracies])


def beside(accuracies: list[float], rivals: list[float]) -> list[str]:
    """Points ahead of others, `p` of Student's t-test over the seeds, and whether that wins."""
    ahead = 100 * (statistics.mean(accuracies) - statistics.mean(rivals))
    if min(len(accuracies), len(rivals)) < 2:
        return [f"{ahead:+.2f}", "-", "-"]
    samples = [
        (statistics.mean(v), statistics.stdev(v), len(v))
        for v in (accuracies, rivals)
    ]
    if samples[0][1] == samples[1][1] == 0:  # no deviation, and no test of it
        p = float(ahead == 0)
    else:
        p = stats.ttest_ind_from_stats(*samples[0], *samples[1]).pvalue
    verdict = "ties"
    if p < LEVEL:
        verdict = "wins" if ahead > 0 else "loses"
    return [f"{ahead:+.2f}", f"{p:.3f}" if p >= 0.001 else "<.001", verdict]


def rates_of(runs: list[Run]) -> str:
    """The learning rates of the runs of a row."""
    return ", ".join(
        sorted({f"{run.get('learning_rate') or '-'}" for run in runs})
    )


def tries_and_edge(lines: list[Run], runs: list[Run]) -> list[str]:
    """How many learning rates were tried, with how many seeds; whether the chosen is an end.

    "chance" where no rate is above it: none is the best. Rates tried with fewer seeds than most
    do not count; the rate that nobody tuned may have more.
    """
    by_rate = tried(lines, runs[0])
    if not by_rate:
        return ["1", "-"]
    counts = [len(by_seed) for by_seed in by_rate.values()]
    seeds = max(statistics.multimode(counts))
    rates = [rate for rate, by_seed in by_rate.items() if len(by_seed) >= seeds]
    tries = f"{len(rates)} x {seeds}"
    if all(statistics.mean(by_rate[rate].values()) <= CHANCE for rate in rates):
        return [tries, "chance"]
    chosen = {run["learning_rate"] for run in runs if run.get("learning_rate")}
    edges = {edge_of(rate, rates) for rate in chosen} - {"-"}
    return [tries, ", ".join(sorted(edges, reverse=True)) or "-"]


def parameters(runs: list[Run], used: Run) -> str:
    """Live entries of kernels and all weights that are never sparse; the mean of several counts."""
    counts = []
    for run in runs:
        # Older runs have not recorded it, and none of a network of another shape.
        others = (
            run["others"]
            if "others" in run
            else _others(run["net"], json.dumps(used))
        )
        counts.append(run["live"] + others)
    return f"{statistics.mean(counts):.0f}"


@functools.cache
def _others(net: str, used: str) -> int:
    options = json.loads(used)
    network = NETWORKS[options.get("network", net)]
    return beside_kernels(network(SHAPES[options["dataset"]], 10, options))


def channels(runs: list[list[list[int]]]) -> str:
    """Mean numbers of live channels: of each layer if there are few, else the total."""
    if not all(runs):
        return "-"
    live, most = np.mean(runs, axis=0).T
    if len(live) > 4:
        return f"{live.sum():.0f} of {most.sum():.0f}"
    return "/".join(f"{count:.0f}" for count in live)


# --- tables ---------------------------------------------------------------------------------------

HEADER = [
    *(
        "density",
        "method",
        "test accuracy [%]",
        "seeds",
        f"to {RIVAL}",
        "p",
        "verdict",
        "reached",
    ),
    *(
        "parameters",
        "MFLOPs",
        "live channels",
        "learning rate",
        "tries",
        "edge",
    ),
]


def table(
    runs: list[Run], ratios: Mapping[str, float], lines: list[Run], used: Run
) -> str:
    """Mean and standard deviation over the seeds, for each method and density."""
    densities = {run["density"] for run in runs if run["method"] not in DENSE}
    by_row: dict[tuple, list[Run]] = {}
    for run in runs:
        by_row.setdefault(identity(run)[2:4], []).append(run)
    rows = []
    for density in [None, *sorted(densities, reverse=True)]:
        rival = column(by_row.get((RIVAL, density), []), "accuracy")
        for method in METHODS_SHOWN:
            members = by_row.get((method, density), [])
            if not members:
                continue
            accuracies = column(members, "accuracy")
            compared = (
                beside(accuracies, rival)
                if rival and method != RIVAL
                else ["-"] * 3
            )
            flops = np.mean(column(members, "flops")) / 1e6
            row = [
                "1" if density is None else f"{density}",
                method,
                percent(accuracies),
                f"{len(members)}",
                *compared,
                f"{np.mean([run['live'] / run['size'] for run in members]):.4f}",
                parameters(members, used),
                f"{flops:.3f}",
                channels([run.get("live_channels") or [] for run in members]),
            ]
            if ratios:
                row.append(f"{ratios[method]:.2f}" if method in ratios else "-")
            rows.append(
                [*row, rates_of(members), *tries_and_edge(lines, members)]
            )
    header = [*HEADER]
    if ratios:
        header.insert(HEADER.index("learning rate"), "time ratio")
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
    for density, members in sorted(
        groups(runs, "density").items(), reverse=True
    ):
        by_method = {
            method: column(found, "accuracy")
            for method, found in groups(members, "method").items()
        }
        rival = by_method.get(RIVAL)
        if rival is None or not any(
            "uniform" in method for method in by_method
        ):
            continue
        cells: dict[tuple[str, str], list[float]] = {}
        for budget, (start, name) in itertools.product(BUDGETS, STARTS.items()):
            method = name.format(budget)
            cells[budget, start] = by_method.get(
                OTHERWISE.get(method, method), []
            )
        best = max(
            cells.values(), key=lambda each: statistics.mean(each or [0])
        )
        rows = []
        for budget in BUDGETS:
            texts = [
                _combined(cells[budget, start], best, rival) for start in STARTS
            ]
            rows.append([budget, *texts])
        text += f"\nDensity {density}: layer densities by starts, in brackets p against "
        text += f"{RIVAL}. Base, AI and EOI have random masks of these densities.\n\n"
        text += markdown(["layer densities", *STARTS], rows)
    return text


def _combined(
    accuracies: list[float], best: list[float], rival: list[float]
) -> str:
    """A cell of `combinations`."""
    if not accuracies:
        return "-"
    value = percent(accuracies)
    if accuracies is best:
        value = f"**{value}**"
    return (
        value
        if accuracies is rival
        else f"{value} ({beside(accuracies, rival)[1]})"
    )


def candidates(runs: list[Run]) -> str:
    """Methods tried against GMP or EOI, which join the package only if they win at each density."""
    rows = []
    for density in sorted({run["density"] for run in runs}, reverse=True):
        members = [run for run in runs if identity(run)[3] == density]
        by_method = groups(members, "method")
        for method, rival in RIVALS.items():
            accuracies = column(by_method.get(method, []), "accuracy")
            theirs = column(by_method.get(rival, []), "accuracy")
            if accuracies and theirs:
                ahead, _, verdict = beside(accuracies, theirs)
                seeds = f"{len(accuracies)} and {len(theirs)}"
                rows.append(
                    [f"{density}", method, rival, ahead, verdict, seeds]
                )
    if not rows:
        return ""
    header = [
        "density",
        "tried",
        "against",
        "points ahead",
        "verdict",
        "seeds of both",
    ]
    return f"\nTried, and built only where it wins:\n\n{markdown(header, rows)}"


def mirrored(runs: list[Run]) -> str:
    """Mirrored starts beside their rivals, which are dense or have the same density."""
    by_row: dict[tuple[str, float | None], list[Run]] = {}
    for run in runs:
        by_row.setdefault(_row(run), []).append(run)
    rows = []
    for method, density in sorted(by_row, key=str):
        for rival in MIRRORED.get(method, ()):
            where = rival, (None if rival in DENSE else density)
            accuracies = column(by_row[method, density], "accuracy")
            theirs = column(by_row.get(where, []), "accuracy")
            if theirs:
                seeds = f"{len(accuracies)} and {len(theirs)}"
                shown = "1" if density is None else f"{density}"
                compared = beside(accuracies, theirs)
                rows.append([shown, method, rival, *compared, seeds])
    if not rows:
        return ""
    header = ["density", "mirrored", "against", "points ahead", "p", "verdict"]
    body = markdown([*header, "seeds of both"], rows)
    return f"\nMirrored kernels beside their rivals:\n\n{body}"


def _row(run: Run) -> tuple[str, float | None]:
    """Method and density."""
    _, _, method, density, *_ = identity(run)
    return method, density


def untuned(runs: list[Run], lines: list[Run], used: Run) -> str:
    """The validation accuracies of all rows at the one rate that nobody has tuned.

    They come from the runs that choose the learning rates, and so cost none.
    """
    rate = used["learning_rate"]
    columns: dict[str, Run] = {}
    for run in runs:
        method, density = _row(run)
        at_rate = tried(lines, run).get(rate)
        if at_rate:
            shown = "1" if density is None else f"{density}"
            columns.setdefault(shown, {})[method] = list(at_rate.values())
    if not columns:
        return ""
    shown_densities = sorted(columns, key=float, reverse=True)
    rows = []
    for method in METHODS_SHOWN:
        cells = [columns[name].get(method, []) for name in shown_densities]
        if any(cells):
            texts = [percent(cell) if cell else "-" for cell in cells]
            counts = sorted({len(cell) for cell in cells if cell})
            seeds = " or ".join(f"{count}" for count in counts)
            rows.append([method, *texts, seeds])
    body = markdown(["method", *shown_densities, "seeds"], rows)
    return (
        f"\nUntuned: all rows at the learning rate {rate:g}, accuracy on the "
        f"validation split [%], by density:\n\n{body}"
    )


ABOUT_KEYS = (
    *(
        "dataset",
        "filters",
        "blocks",
        "unit",
        "width",
        "depth",
        "activation",
        "optimizer",
    ),
    *("batch_size", "frequency", "learning_rates", "samples", "include"),
)


def about(runs: list[Run], used: Run) -> str:
    """A line about the settings of a table."""
    settings_used = ", ".join(
        f"{key} {used[key]}" for key in ABOUT_KEYS if key in used
    )
    compiled = sorted({run["jit"] for run in runs})
    text = f"{settings_used}, " + " and ".join(
        "XLA" if jit else "no XLA" for jit in compiled
    )
    # JAX and torch have a new order of batches in each epoch in any case.
    if not used.get("reshuffle", True) and any(
        run["backend"] == "tensorflow" for run in runs
    ):
        text += ", one order of batches for all epochs"
    return text


def machines_of(lines: list[Run]) -> str:
    """Where the runs were made: a page may have runs of several machines."""
    made = [line["made"]["machine"] for line in lines if "made" in line]
    return " and ".join(sorted(set(made))) or machine()


def summarize(
    lines: list[Run],
    known: Mapping[str, Run],
    ratios: Mapping[str, Run],
    title: str,
) -> str:
    """The page of a comparison.

    Args:
        lines: All of its lines.
        known: The settings of its networks.
        ratios: Times of training against the dense network, by network and method.
        title: The heading.
    """
    runs = list(latest(lines).values())
    text = f"# {title}\n\n" + sentences(
        f"""
        {machines_of(lines)}, Keras {keras.__version__} on
        {", ".join(sorted({run["backend"] for run in runs}))}. Adam unless noted, cosine decay.
        Mean and standard deviation over seeds. `to {RIVAL}`: points ahead of a random mask of
        the same density; it wins or loses where Student's test over the seeds says so at 5%, and
        ties elsewhere. `reached` is the live fraction of all kernels in the end, with the kernels
        that `include` leaves dense; `parameters` are their live entries, and biases,
        normalizations and whatever else is never sparse. MFLOPs are multiply-adds of the live
        entries for one sample. Live channels are those after ReLU that are not constant over 1000
        test images, in the end. A time ratio is that of training against the dense network,
        without compilation and what sets up an epoch, timed apart and interleaved at one density
        (`time_of_training`). A method without a row has not been run, or left a layer without any
        live entry (collapse). Tries are the learning rates that were compared on the validation
        split, each with so many seeds; at an edge the chosen one is the least or the largest of
        them: a better one may lie beyond. At chance no rate is above it.
        """
    )
    text = text.rstrip("\n") + "\n"
    timed_settings = settings("methods")
    kinds = sorted({(*identity(run)[:2], changed(run)) for run in runs})
    for net, epochs, other in kinds:
        members = [
            run
            for run in runs
            if (*identity(run)[:2], changed(run)) == (net, epochs, other)
        ]
        used = known[net] | (members[0].get("settings") or {})
        timed = (
            ratios.get(net, {}) if known[net] == timed_settings.get(net) else {}
        )
        text += (
            f"\n## {net}, epochs: {epochs}{other}\n\n{about(members, used)}\n\n"
        )
        text += (
            table(members, timed, lines, used)
            + combinations(members)
            + candidates(members)
            + mirrored(members)
        )
        if "activation" in used:
            text += untuned(members, lines, used)
        if timed:
            text += f"\nThe dense network against itself: {timed['dense again']:.2f}.\n"
    return text


# --- the page of `faster` -------------------------------------------------------------------------

GOAL = 0.88


def epochs_to_goal(run: Run) -> int | None:
    """The epoch after which the validation accuracy reaches `GOAL`; `None` for never."""
    return next(
        (k + 1 for k, accuracy in enumerate(run["curve"]) if accuracy >= GOAL),
        None,
    )


def steps_of(used: Run) -> int:
    """Batches of an epoch, without the validation split."""
    return used["samples"] * 9 // 10 // used["batch_size"]


def faster_table(
    runs: list[Run], lines: list[Run], seconds: Mapping[tuple, float]
) -> str:
    """A row for each density, method and number of epochs.

    Args:
        runs: The runs of the network in the table.
        lines: These, and the runs that chose their learning rates.
        seconds: The time of an epoch, by method and density.
    """
    densities = sorted(
        {run["density"] for run in runs if run["method"] not in DENSE},
        reverse=True,
    )
    lengths = sorted({run["epochs"] for run in runs}, reverse=True)
    rows = []
    for density, method, epochs in itertools.product(
        [None, *densities], METHODS_SHOWN, lengths
    ):
        members = [
            run
            for run in runs
            if identity(run)[1:4] == (epochs, method, density)
        ]
        if not members:
            continue
        reached = [epochs_to_goal(run) for run in members]
        needed = [count for count in reached if count is not None]
        epoch = seconds.get((method, density))
        seconds_needed = (
            epoch * statistics.mean(needed) if epoch and needed else None
        )
        rows.append(
            [
                "1" if density is None else f"{density}",
                method
                if epochs == lengths[0]
                else f"{method}, {epochs} epochs",
                percent(column(members, "accuracy")),
                f"{len(members)}",
                f"{len(needed)} of {len(members)}",
                f"{statistics.mean(needed):.1f}" if needed else "-",
                "-" if epoch is None else f"{epoch:.2f}",
                "-" if seconds_needed is None else f"{seconds_needed:.1f}",
                rates_of(members),
                *tries_and_edge(lines, members),
            ]
        )
    header = [
        "density",
        "method",
        "test accuracy [%]",
        "seeds",
        "reached 88%",
        "epochs to 88%",
    ]
    header += [
        "seconds an epoch",
        "seconds to 88%",
        "learning rate",
        "tries",
        "edge",
    ]
    return markdown(header, rows)


def ratio_table(ratios: list[Run], net: str) -> str:
    """CPU times of a step against dense, all in turn in one process; nothing without any."""
    rows = []
    members = [line for line in ratios if line["net"] == net]
    by_method = last_of_each(members, "density", "method")
    for (density, method), line in by_method.items():
        shown = "1" if method.removesuffix(" again") in DENSE else f"{density}"
        ratio = f"{line['cpu_ratio']:.2f}"
        load = f"{line['load']:.0f}"
        rows.append([shown, method, ratio, line["backend"], load])
    if not rows:
        return ""
    header = ["density", "method", "CPU time of a step", "backend", "load"]
    return f"\nIn turn, in one process of a busy machine, dense = 1:\n\n{markdown(header, rows)}"


def summarize_faster(
    lines: list[Run],
    known: Mapping[str, Run],
    times: Mapping[str, Run],
    ratios: list[Run],
) -> str:
    """The page of `faster`.

    Args:
        lines: All of its lines.
        known: The settings of its networks.
        times: Seconds of a step, by network, density and method.
        ratios: CPU times of a step against dense, by the same.
    """
    runs = list(latest(lines).values())
    backends = ", ".join(sorted({run["backend"] for run in runs}))
    text = (
        "# Training on live blocks: accuracy, and time to 88%\n\n"
        + sentences(
            f"""
        {machines_of(lines)}, {backends}. Fashion-MNIST, Adam,
        cosine decay over all epochs of a row. 88% are read after each epoch on the last tenth of
        the training set, without which all are trained; the learning rate is the best one there
        of those tried, each with so many seeds. At an edge the chosen one is the least or the
        largest. Density is that of the hidden kernels; stem and head are dense. Seconds are those
        of a step of training times the steps of an epoch, medians of interleaved turns of one
        process, on an idle machine (`methods.py time_of_training --settings faster`). A dense
        network that is narrower, as many weights in all, has none of these.
        """
        )
    )
    text = text.rstrip("\n") + "\n"
    for net, other in sorted({(run["net"], changed(run)) for run in runs}):
        members = [
            run for run in runs if (run["net"], changed(run)) == (net, other)
        ]
        used = known[net] | (members[0].get("settings") or {})
        width_and_depth = json.dumps(
            {key: used[key] for key in ("width", "depth", "samples")}
        )
        epochs = max(run["epochs"] for run in members)
        text += f"\n## {net}, epochs: {epochs}{other}\n\n{width_and_depth}\n\n"
        seconds = {
            (method, None if method in DENSE else float(density)): step
            * steps_of(used)
            for density, steps in times.get(net, {}).items()
            for method, step in steps.items()
        }
        text += faster_table(members, lines, seconds)
        text += ratio_table(ratios, net)
    return text
