"""Scripts of benchmarks/ as modules."""

import importlib
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"


def _importing(name):
    @pytest.fixture(name=name)
    def script(monkeypatch):
        monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
        return importlib.import_module(name)

    return script


methods = _importing("methods")
methods_summary = _importing("methods_summary")
record = _importing("record")
runner = _importing("runner")
memory = _importing("memory")
training = _importing("training")
networks = _importing("networks")
blocks = _importing("blocks")
splice_sites = _importing("splice_sites")
kernel_times = _importing("kernel_times")
