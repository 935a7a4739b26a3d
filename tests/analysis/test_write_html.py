"""Reports on one page: text and pictures in the file itself, and nothing that runs."""

import re
import sys

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import analysis

L = keras.layers


@pytest.fixture(scope="module")
def network():
    layers = [L.Dense(16, "relu", name="up"), L.Dense(4, name="down")]
    return keras.Sequential([keras.Input((8,)), *layers])


@pytest.fixture(scope="module")
def rows():
    return np.random.default_rng(0).normal(size=(128, 8)).astype("float32")


def test_text_and_pictures_are_in_the_file(network, rows, tmp_path):
    reports = {
        "Widths": kso.widths(network, rows),
        "Sensitivity": kso.sensitivity(network, rows, densities=(0.5,)),
        "Kernels <all>": kso.report(network),
    }
    page = tmp_path / "model.html"
    page.write_text("an older page")
    analysis.write_html(page, reports, title="R & D")
    text = page.read_text()
    assert text.count("<img") == 2
    assert 'alt=""' not in text
    assert text.count("<pre>") == 3
    assert "<title>R &amp; D</title>" in text
    assert "down/kernel" in text
    assert "<h2>Kernels &lt;all&gt;</h2>" in text
    # Everything is inside, and no heading becomes a tag.
    assert not re.search(r"<all>|<script|(?:src|href)=\"(?!data:)", text)


class NothingToDraw:
    """As an export whose files were not timed."""

    def plot(self):
        raise ValueError("nothing was timed")

    def __str__(self):
        return "12 bytes"


def test_a_report_that_cannot_be_drawn_is_text(tmp_path):
    analysis.write_html(tmp_path / "page.html", {"File": NothingToDraw()})
    text = (tmp_path / "page.html").read_text()
    assert "12 bytes" in text
    assert "<img" not in text


@pytest.mark.parametrize(
    ("reports", "error"), [(["table"], TypeError), ({}, ValueError)]
)
def test_reports_have_headings(reports, error, tmp_path):
    with pytest.raises(error, match="Received: reports="):
        analysis.write_html(tmp_path / "page.html", reports)
    assert not (tmp_path / "page.html").exists()


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"keras-sparse-ortho\[plot\].*File"):
        analysis.write_html(tmp_path / "page.html", {"File": NothingToDraw()})
