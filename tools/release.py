"""Build and check a release: ``release.py [--any-state] [--tag TAG]``.

See docs/releasing.md. The source archive and the wheel go to ``dist/``, built from a clean copy of
the last commit (with ``--any-state``: of the working tree).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "keras_sparse_ortho"
BUILD = "import sys, setuptools.build_meta as m; print(getattr(m, sys.argv[1])(sys.argv[2]))"


def run(*command: str, cwd: Path = ROOT, **env: str) -> str:
    """The output of a command; its own message if it fails."""
    both = {
        "capture_output": True,
        "text": True,
        "check": False,
        "env": os.environ | env,
    }
    done = subprocess.run(command, cwd=cwd, **both)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def version_of(root: Path = ROOT) -> str:
    """The version, which stands in the package alone."""
    text = (root / PACKAGE / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"', text, re.MULTILINE)[0]


def built(source: Path, folder: Path, kind: str) -> Path:
    """The archive (``sdist``) or the wheel of a source tree, in a folder."""
    name = run(
        sys.executable, "-c", BUILD, f"build_{kind}", str(folder), cwd=source
    )
    return folder / name.splitlines()[-1]


def problems_of(wheel: Path, source: Path, scratch: Path) -> list[str]:
    """The problems of a wheel."""
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        path.relative_to(source).as_posix()
        for path in (source / PACKAGE).rglob("*")
        if path.suffix in (".py", ".csv", ".typed")
    }
    # The console command.
    wanted |= {path.name for path in source.glob(f"{PACKAGE}_*.py")}
    strays = {name for name in names - wanted if ".dist-info/" not in name}
    found = [f"the wheel lacks {name}" for name in sorted(wanted - names)]
    found += [f"the wheel holds {name}" for name in sorted(strays)]
    site = scratch / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "-q",
    ]
    run(*pip, "--no-deps", "--no-index", "--target", str(site), str(wheel))
    # With what is installed here, on the backend that needs least.
    steps = (sys.executable, "-P", str(ROOT / "tools" / "first_steps.py"))
    said = run(*steps, cwd=scratch, PYTHONPATH=str(site), KERAS_BACKEND="jax")
    if not said.startswith(str(site)):
        found.append("the installed wheel is not what is imported")
    return found


def main() -> int:
    """Build and check; 0 if it can be released."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--any-state",
        action="store_true",
        help="of files that are not committed",
    )
    parser.add_argument(
        "--tag", help="what the release is tagged with; a branch is no tag"
    )
    given = parser.parse_args()
    any_state, version, problems = given.any_state, version_of(), []
    if (given.tag or "").startswith("v") and given.tag != f"v{version}":
        problems.append(f"the tag must be v{version}. Received: {given.tag}")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"[{version}]" not in changes and f"will be {version}" not in changes:
        problems.append(f"CHANGELOG.md says nothing of {version}")
    if not any_state and (
        changed := run("git", "status", "--porcelain").strip()
    ):
        problems.append(f"not committed:\n{changed}")
    with tempfile.TemporaryDirectory() as folder:
        scratch, source = Path(folder), Path(folder) / "source"
        files = run("git", "ls-files", "-z").split("\0")
        for name in filter(None, files):
            if (ROOT / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, source / name)
        out = scratch / "dist"
        out.mkdir()
        archive, wheel = (
            built(source, out, "sdist"),
            built(source, out, "wheel"),
        )
        problems += problems_of(wheel, source, scratch)
        if wheel.name.split("-")[1] != version:
            problems.append(
                f"the wheel must be of version {version}. Received: {wheel.name}"
            )
        with tarfile.open(archive) as packed:
            packed.extractall(scratch / "unpacked", filter="data")
        (unpacked,) = (scratch / "unpacked").iterdir()
        again = scratch / "again"
        again.mkdir()
        second = built(unpacked, again, "wheel")
        first_names, second_names = (
            set(zipfile.ZipFile(path).namelist()) for path in (wheel, second)
        )
        if first_names != second_names:
            problems.append(
                f"the archive builds another wheel: {first_names ^ second_names}"
            )
        if not problems:
            (ROOT / "dist").mkdir(exist_ok=True)
            for path in (archive, wheel):
                shutil.copyfile(path, ROOT / "dist" / path.name)
                print(f"dist/{path.name}  {path.stat().st_size / 1024:.0f} KiB")
    print("\n".join(problems) or f"{version} can be released")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
