"""Full disks, folders that cannot be written to, and odd paths."""

import contextlib
import functools
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import keras

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import export_litert, load_litert
from tests.faults.counting import FOREIGN, OK, WRONG, Count, timed, watched

ODD = [
    "ü ñ 中 \U0001f600",
    "a\nb",
    "-rf",
    " ",
    "'\"$(x)`",
    "a" * 240,
    "%s{0}\\",
    "#?&;",
]

_WRITTEN = 5


def _large_budget() -> kso.Budget:
    names = [f"layer_{k}/kernel" for k in range(3000)]
    return kso.Budget(dict.fromkeys(names, 0.1), dict.fromkeys(names, 1000))


def _model() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])


def full_disk(folder: Path, share: float) -> Count:
    """What stood there stays; the error is one of the system."""
    with timed("full disk") as count, _small_disk(folder / "disk", 128) as disk:
        report = kso.report(_model())
        wide = type(report)(report.rows * 3000, report.name)
        jobs: list[tuple[str, Callable[[Path], object]]] = [
            ("b.json", lambda p: _large_budget().save(p)),
            ("r.csv", wide.to_csv),
            ("m.tflite", lambda p: export_litert(_model(), p)),
        ]
        for name, write in jobs:
            for limit in (0, 1, 4000, 20_000):
                path = disk / name
                path.write_bytes(b"old")
                status = watched(
                    _refused(write, path, limit), folder / "log", 600
                )
                count.take(OK if status == _WRITTEN else status)
                # Where there was room for all of it, the new file stands there.
                if status != _WRITTEN and path.read_bytes() != b"old":
                    count.lost += 1
                left = [
                    p.name
                    for p in disk.iterdir()
                    if p != path and "fill" not in p.name
                ]
                if left:
                    count.wrong += 1
                    count.notes.append(f"left behind: {left}")
                path.unlink()
                if limit == 0 and name == "m.tflite" and share < 1:
                    break
    return count


def _refused(
    write: Callable[[Path], object], path: Path, limit: int
) -> Callable[[], None]:
    """Work that must raise OSError: no byte is left (0), or files have a limit."""

    def work() -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        else:
            with (
                (path.parent / "fill").open("wb", buffering=0) as fill,
                contextlib.suppress(OSError),
            ):
                while True:
                    fill.write(b"x" * 1024)
        status, said = OK, "written"
        try:
            write(path)
            status = WRONG if limit == 1 else _WRITTEN
        except OSError as error:
            said = str(error)
        except Exception as error:
            status, said = FOREIGN, f"{type(error)} {error}"
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        (path.parent / "fill").unlink(missing_ok=True)
        print(path.name, limit, status, said)
        raise SystemExit(status)

    return work


@contextlib.contextmanager
def _small_disk(folder: Path, kib: int) -> Iterator[Path]:
    """A tmpfs, where this may be mounted; else an ordinary folder under RLIMIT_FSIZE."""
    folder.mkdir()
    command = [
        "mount",
        "-t",
        "tmpfs",
        "-o",
        f"size={kib}k",
        "tmpfs",
        str(folder),
    ]
    mounted = (
        subprocess.run(command, capture_output=True, check=False).returncode
        == 0
    )
    if not mounted:
        with (folder / "fill").open("wb"):
            pass
    try:
        yield folder
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=False)


def paths(folder: Path) -> Count:
    """Every path is written to and read back, or refused with an OSError or ValueError."""
    with timed("read-only and odd paths") as count:
        model, budget = (
            _model(),
            kso.Budget({"a/kernel": 0.5}, {"a/kernel": 10}),
        )
        report = kso.report(model)
        for name in ODD:
            here = folder / name
            here.mkdir()
            work = functools.partial(_written, here, name, budget, report)
            count.take(watched(work, folder / "log"))
        real, link = folder / "real.json", folder / "link.json"
        real.write_text("x")
        link.symlink_to(real)
        budget.save(link)
        count.runs += 1
        if not link.is_symlink() or kso.Budget.load(real) != budget:
            count.wrong += 1
        (folder / "dir.json").mkdir()
        (folder / "dir.tflite.gz").mkdir()
        # No device among them: this may run as root, and what is replaced would be the device.
        os.mkfifo(folder / "pipe.tflite")

        def refused(work: Callable[[Path], object], path: Path) -> None:
            def inner() -> None:
                with contextlib.suppress(OSError, ValueError):
                    work(path)
                    raise SystemExit(WRONG)

            count.take(watched(inner, folder / "log", 300))

        export = functools.partial(export_litert, model)
        writes = {
            "b.json": budget.save,
            "r.csv": report.to_csv,
            "m.tflite": export,
        }
        for write in writes.values():
            refused(write, folder / "dir.json")
        for place in (folder / "none", Path("/proc/self")):
            for name, write in writes.items():
                refused(write, place / name)
        refused(export, folder / "pipe.tflite")
        for path in (
            folder / "none.json",
            folder / "dir.json",
            Path("/dev/null"),
            Path(""),
        ):
            refused(kso.Budget.load, path)
            refused(load_litert, path)
    return count


def _written(here: Path, name: str, budget: kso.Budget, report: object) -> None:
    part = name[:200]
    path = here / f"{part}.json"
    budget.save(path)
    if kso.Budget.load(path) != budget:
        raise SystemExit(WRONG)
    report.to_csv(here / f"{part}r.csv")  # type: ignore[attr-defined]
    try:
        from keras_sparse_ortho.export import check_path

        check_path(here / f"{name}.tflite")
    except (OSError, ValueError):
        pass


def run(folder: Path, share: float) -> list[Count]:
    """All of them."""
    for name in ("full", "paths"):
        (folder / name).mkdir(parents=True)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    return [full_disk(folder / "full", share), paths(folder / "paths")]
