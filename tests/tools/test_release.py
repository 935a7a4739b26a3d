"""What a release must have: one version everywhere, and a wheel that holds the package alone."""

import zipfile

import pytest

from tools import release

pytestmark = pytest.mark.numpy_only


def test_one_version_everywhere():
    assert len(set(release.versions().values())) == 1, release.versions()


def test_a_wheel_with_too_little_and_too_much_is_refused(tmp_path, monkeypatch):
    source = tmp_path / "source"
    package = source / release.PACKAGE
    package.mkdir(parents=True)
    for name in ("__init__.py", "left_out.py", "py.typed", "notes.txt"):
        (package / name).write_text("")
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in ("__init__.py", "py.typed", "stray.py"):
            file.writestr(f"{release.PACKAGE}/{name}", "")
        file.writestr("keras_sparse_ortho-0.dist-info/METADATA", "")
    # Installed and imported from elsewhere than the folder that it was put into.
    monkeypatch.setattr(release, "run", lambda *command, **_: "/elsewhere/__init__.py")
    assert release.problems_of(wheel, source, tmp_path) == [
        "the wheel lacks keras_sparse_ortho/left_out.py",
        "the wheel holds keras_sparse_ortho/stray.py",
        "the installed wheel is not what is imported",
    ]
