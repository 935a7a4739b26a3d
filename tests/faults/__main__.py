"""Runs the parts of the fault suite, and writes their table.

python -m tests.faults [--parts fits kills ...] [--share 0.1] [--table docs/faults.md]
"""

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

PARTS = (
    "fits",
    "kills",
    "disks",
    "files",
    "hostile",
    "threads",
    "memory",
    "rows",
    "workers",
)
KEYS = ("part", "runs", "wrong", "lost", "hangs", "crashes", "foreign")


def one(part: str, folder: Path, seed: int, share: float) -> list[dict]:
    """One part, in this process."""
    import dataclasses
    import warnings

    warnings.simplefilter("ignore")
    from tests.faults import (
        disks,
        files,
        hostile,
        kills,
        memory,
        rows,
        threads,
        workers,
    )

    rng = random.Random(seed)
    work = {
        "fits": lambda: [kills.in_fit(folder, rng, share)],
        "kills": lambda: kills.run(folder, rng, share),
        "disks": lambda: disks.run(folder, share),
        "files": lambda: files.run(folder, rng, share),
        "hostile": lambda: hostile.run(folder, rng, share),
        "threads": lambda: threads.run(rng, share),
        "memory": lambda: memory.run(folder, share),
        "rows": lambda: rows.run(share, rng),
        "workers": lambda: workers.run(folder, rng, share),
    }
    return [dataclasses.asdict(count) for count in work[part]()]


def table(counts: list[dict]) -> str:
    """The counts in Markdown."""
    rows = [[*KEYS[:-1], "foreign errors", "seconds", ""], ["---"] * 9]
    for count in counts:
        cells = [count[key] for key in KEYS]
        rows.append(
            [*cells, round(count["seconds"]), "; ".join(count["notes"])]
        )
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in rows)


def main() -> int:
    """Each part in a process of its own; 0 if nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the full numbers"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="default: the day"
    )
    parser.add_argument(
        "--table", type=Path, help="a page whose table to write anew"
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    seed = options.seed
    seed = (
        int(datetime.date.today().strftime("%Y%m%d")) if seed is None else seed
    )
    if options.inside:
        counts = one(
            options.parts[0], options.inside / "work", seed, options.share
        )
        (options.inside / "counts.json").write_text(json.dumps(counts))
        return 0
    environment = os.environ | {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
    }
    # Forked children can go on with PyTorch; it starts the quickest, too.
    environment["KERAS_BACKEND"] = "torch"
    found: list[dict] = []
    failed = []
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="kso-faults-") as folder:
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "tests.faults",
                "--parts",
                part,
            ]
            command += [
                "--share",
                str(options.share),
                "--seed",
                str(seed),
                "--inside",
                folder,
            ]
            done = subprocess.run(command, env=environment, check=False)
            answer = Path(folder, "counts.json")
            if done.returncode or not answer.exists():
                failed.append(part)
                continue
            found += json.loads(answer.read_text())
    print(table(found))
    bad = [count for count in found if any(count[key] for key in KEYS[2:])]
    print(
        f"seed {seed}; {len(bad)} of {len(found)} lines found something; failed: {failed}"
    )
    if options.table:
        _write(options.table, table(found))
    return int(bool(bad or failed))


def _write(page: Path, lines: str) -> None:
    before, _, rest = page.read_text().partition("<!-- table -->\n")
    _, mark, after = rest.partition("<!-- end -->")
    page.write_text(f"{before}<!-- table -->\n{lines}\n{mark}{after}")


if __name__ == "__main__":
    sys.exit(main())
