"""Pictures that are drawn from results show them: one panel at one size, and curves in it."""

import pytest

pytestmark = pytest.mark.tensorflow_only

# Masks, grids of panels, and a picture of its own shape.
OTHERS = {"gain", "density_law", "structures", "taps", "rooms"}


@pytest.fixture(scope="module")
def drawn():
    """Every picture that is drawn from results alone, without training."""
    import importlib
    import sys

    from tests.benchmarks.conftest import FOLDER

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(FOLDER), *sys.path])
        pictures = importlib.import_module("pictures")
        names = [*pictures.SOURCES, "thresholds", "schedules"]
        figures = {
            name: pictures.PICTURES[name]()
            for name in names
            if name not in OTHERS
        }
    return pictures, figures


def test_no_picture_is_empty(drawn):
    _, figures = drawn
    for name, figure in figures.items():
        (panel,) = figure.axes
        marks = [line for line in panel.lines if len(line.get_xdata()) > 1]
        assert len(marks) + len(panel.patches) > 1, name
        assert panel.get_legend() or figure.legends or panel.patches, name


def test_pictures_have_one_size(drawn):
    pictures, figures = drawn
    for name, figure in figures.items():
        size = tuple(figure.get_size_inches())
        assert size == (pictures.WIDTH, pictures.HEIGHT), name
