"""A trained language model pruned at once: perplexity by score, pattern and structure.

    python benchmarks/one_shot_text.py [--seeds 3] [--steps 1500]
    python benchmarks/one_shot_text.py --summary

For each seed the model of `small_language_model.py` is trained (kept in `out/language_model`). Then
the kernels of its blocks are pruned, with 512 windows for calibration; half of its feed-forward
channels, or half of the width of its residual stream, are taken out. Nothing is trained afterwards.
Each run is a line of `results/one_shot_text.jsonl`; `results/one_shot_text.md` has the means.
"""

import argparse
import os
import statistics
import time

from record import RESULTS, append, finished, markdown, parsed, told, write

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
LINES = RESULTS / "one_shot_text.jsonl"
OTHERS = ["embedding", "head"]
UNKNOWN = {"unregistered": "dense"}  # the vectors of positions
METHODS = {
    "magnitude": {},
    "magnitude, refit": {"refit": True},
    "Wanda, refit": {"score": "wanda", "refit": True},
    "OBS": {"score": "obs"},
    "OBS, shares by error": {"score": "obs", "budget": "error"},
}
PATTERNS = {"0.5": 0.5, "2:4": 0.5, "0.2": 0.2}
SKIPPED = [("OBS, shares by error", "2:4"), ("magnitude, refit", "0.5"), ("Wanda, refit", "0.5")]
SMALLER = {
    "half the feed-forward channels, OBS": {"score": "obs"},
    "half the feed-forward channels, by magnitude": {"score": "magnitude"},
    "SliceGPT, full width": 1.0,
    "SliceGPT, half the width": 0.5,
}


def pruned(model, method: str, pattern: str, x):
    """The model with the kernels of its blocks pruned."""
    import keras_sparse_ortho as kso

    options = {"exclude": OTHERS} | UNKNOWN | METHODS[method]
    if pattern == "2:4":
        options["structure"] = kso.NByM(2, 4)
    if method != "magnitude":
        options["data"] = x
    return kso.prune(model, PATTERNS[pattern], **options)


def smaller(model, name: str, x):
    """The model with fewer channels or a narrower stream."""
    import small_language_model as lm
    from slice_transformer import sliced

    import keras_sparse_ortho as kso

    how = SMALLER[name]
    if isinstance(how, float):
        return sliced(model, x, round(how * lm.WIDTH))
    narrow = [f"narrow_{k}" for k in range(lm.DEPTH)]
    options = how | ({"data": x} if how["score"] == "obs" else {})
    channels = kso.calibration.Channels()
    return kso.remove_channels(kso.prune(model, 0.5, structure=channels, include=narrow, **options))


def measure(seed: int, given: argparse.Namespace) -> None:
    """Appends the lines of a seed that are missing."""
    import small_language_model as lm

    setting = {"seed": seed, "steps": given.steps, "windows": given.windows}
    done = {
        (run["method"], run["pattern"]) for run in finished(LINES) if setting.items() <= run.items()
    }
    wanted = [(m, p) for p in PATTERNS for m in METHODS if (m, p) not in SKIPPED]
    wanted = [("dense", "1"), *((name, "smaller") for name in SMALLER), *wanted]
    missing = [run for run in wanted if run not in done and run[1] in given.patterns]
    if not missing:
        return
    model = lm.trained(seed, given.steps)
    x, _ = lm.windows(lm.text()[0], given.windows, 7)
    for method, pattern in told(f"seed {seed}", missing):
        start = time.perf_counter()
        if pattern in PATTERNS:
            found = pruned(model, method, pattern, x)
        else:
            found = model if method == "dense" else smaller(model, method, x)
        seconds = time.perf_counter() - start
        run = {"method": method, "pattern": pattern, "perplexity": lm.perplexity(found)}
        run |= {"seconds": seconds, "weights": found.count_params()}
        append(LINES, setting | run)
        print(setting | run, flush=True)


def measure_time(given: argparse.Namespace) -> None:
    """Appends the times of a call of the full and the sliced model, measured in turns."""
    import keras
    import small_language_model as lm
    from timing import interleaved

    model = lm.trained(0, given.steps)
    x, _ = lm.windows(lm.text()[0], 64, 7)
    models = {"dense": model}
    models |= {name: smaller(model, name, x) for name in SMALLER if "half" in name}
    calls = {name: (lambda one=one: one.predict_on_batch(x)) for name, one in models.items()}
    for name, seconds in interleaved(calls, given.rounds, warm_up=3).items():
        run = {"steps": given.steps, "method": name, "pattern": "time", "seconds": seconds}
        append(LINES, run | {"backend": keras.backend.backend()})
        print(name, seconds, flush=True)


def summarize(given: argparse.Namespace) -> None:
    """Writes the tables of all lines: of the model that was trained longest first."""
    runs = finished(LINES)
    text = "# A trained language model, pruned at once\n\n"
    text += (
        "Characters of the sources of Python's standard library; two decoder blocks, 128 wide, "
        "trained on batches of 16 windows of 64 characters. All kernels of the "
        "blocks at one density (magnitudes are compared over all; shares by error differ); "
        f"{given.windows} windows for calibration, nothing is trained afterwards. Perplexity of "
        "the next character on 256 windows of other modules, mean and standard deviation over the "
        "seeds. Times of a call with 64 windows: medians of interleaved calls.\n\n"
    )
    for steps in sorted({run["steps"] for run in runs}, reverse=True):
        text += f"## Trained for {steps} batches\n\n"
        text += _table([run for run in runs if run["steps"] == steps], given.windows) + "\n"
    seeds = sorted({run["seed"] for run in runs if "seed" in run})
    write("one_shot_text", text, seeds)


def _table(runs: list[dict], windows: int) -> str:
    rounds: dict[tuple[str, str], list[float]] = {}
    for run in runs:
        if run["pattern"] == "time":
            key = run.get("backend", "jax"), run["method"]
            rounds.setdefault(key, []).append(run["seconds"])
    runs = [run for run in runs if run.get("windows") == windows]
    dense = {run["seed"]: run["perplexity"] for run in runs if run["method"] == "dense"}
    backends = {"jax": "time of a call [ms]", "tensorflow": "TensorFlow [ms]"}
    backends = {key: name for key, name in backends.items() if (key, "dense") in rounds}
    rows = []
    for method, pattern in dict.fromkeys((run["method"], run["pattern"]) for run in runs):
        own = [r for r in runs if (r["method"], r["pattern"]) == (method, pattern)]
        more = [100 * (run["perplexity"] / dense[run["seed"]] - 1) for run in own]
        row = [method, pattern, shown([run["perplexity"] for run in own]), shown(more)]
        row.append(f"{own[0]['weights']}" if pattern in ("1", "smaller") else "")
        row.append(f"{statistics.mean(run['seconds'] for run in own):.0f}")
        times = [rounds.get((backend, method)) for backend in backends]
        rows.append([*row, *(f"{1000 * statistics.median(t):.1f}" if t else "" for t in times)])
    header = ["method", "pattern", "perplexity", "more than dense [%]", "weights"]
    return markdown([*header, "time to prune [s]", *backends.values()], rows)


def shown(values: list[float]) -> str:
    """Mean and standard deviation."""
    mean = f"{statistics.mean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} +- {statistics.stdev(values):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--windows", type=int, default=512, help="for calibration")
    parser.add_argument("--patterns", nargs="+", default=["1", "smaller", *PATTERNS])
    parser.add_argument("--rounds", type=int, default=200, help="of the times")
    parser.add_argument("--time", action="store_true", help="only time calls")
    parser.add_argument("--summary", action="store_true", help="only write the table")
    quick = {"seeds": 1, "steps": 20, "windows": 64, "patterns": ["1", "smaller"]}
    given = parsed(parser, quick=quick)
    if given.time:
        measure_time(given)
    elif not given.summary:
        for seed in range(given.seeds):
            measure(seed, given)
    summarize(given)


if __name__ == "__main__":
    main()
