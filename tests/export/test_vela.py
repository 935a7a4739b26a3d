"""`vela_report`: the real compiler on real files; a fake one only where it hangs or crashes."""

import gzip
import json
import sys
import textwrap

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.cli import main
from keras_sparse_ortho.export import (
    ExportConversionError,
    LiteRTFileError,
    export_litert,
    vela_report,
)
from tests.export.models import layers

pytestmark = pytest.mark.tensorflow_only


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A dense and a sparse network, as static int8."""
    keras.utils.set_random_seed(0)
    data = np.random.default_rng(0).standard_normal((40, 128)).astype("float32")
    hidden = [layers.Dense(128, activation="relu", name=f"h{k}") for k in range(2)]
    dense = keras.Sequential([keras.Input((128,), name="x"), *hidden])
    sparse = kso.sparsify(dense, 0.1, "uniform", seed=0)
    folder = tmp_path_factory.mktemp("vela")
    for name, model in (("dense", dense), ("sparse", sparse)):
        path = folder / f"{name}.tflite"
        export_litert(model, path, quantization="int8", representative_data=data)
    return folder


def test_single_zeros_pay(files):
    dense = vela_report(files / "dense.tflite")
    sparse = vela_report(files / "sparse.tflite")
    assert dense.weight_bytes == sparse.weight_bytes == 2 * 128 * 128
    assert sparse.encoded_bytes < dense.encoded_bytes / 4
    assert sparse.ms < dense.ms / 2
    assert sparse.cycles == pytest.approx(500e3 * sparse.ms, rel=1e-3)  # at 500 MHz
    assert sparse.memory["off-chip flash"] < dense.memory["off-chip flash"]
    assert sparse.cpu_operators == ("Quantize", "Dequantize")
    assert sparse.npu_operators > 0
    assert vela_report(files / "sparse.tflite") == sparse


def test_accelerator_configuration_and_compressed_files(files, tmp_path):
    packed = tmp_path / "sparse.tflite.gz"
    packed.write_bytes(gzip.compress((files / "sparse.tflite").read_bytes()))
    plain = vela_report(files / "sparse.tflite", "ethos-u85-256")
    assert vela_report(packed, "ethos-u85-256").cycles == plain.cycles
    assert plain.system_config == "Ethos_U85_SYS_DRAM_Mid"
    chosen = vela_report(packed, system_config="Ethos_U55_Deep_Embedded", memory_mode="Sram_Only")
    assert (chosen.system_config, chosen.memory_mode) == ("Ethos_U55_Deep_Embedded", "Sram_Only")
    assert "off-chip flash" not in chosen.memory


def test_a_report_says_that_it_is_an_estimate(files):
    found = vela_report(files / "sparse.tflite")
    printed = str(found)
    assert f"Vela {found.vela}; nothing was measured" in printed
    assert "Quantize, Dequantize" in printed
    assert json.loads(found.to_json())["cycles"] == found.cycles


def test_files_that_are_not_for_an_ethos_u(all_routes):
    folder = all_routes[3]
    for route in ("float32", "dynamic_int8"):
        with pytest.raises(ValueError, match="must be static int8"):
            vela_report(folder / f"{route}.tflite")
    with pytest.raises(ValueError, match='route "int8"') as refused:
        vela_report(folder / "dynamic_int8+1x16.tflite")
    assert "2 encoded weights" in str(refused.value)


def test_damaged_files(files, tmp_path):
    content = bytearray((files / "dense.tflite").read_bytes())
    path = tmp_path / "damaged.tflite"
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(LiteRTFileError, match="truncated"):
        vela_report(path)
    path.write_bytes(b"\x1c\0\0\0TFL3" + bytes(200))  # no file of ours, and no flatbuffer
    with pytest.raises((LiteRTFileError, ExportConversionError), match=r"Vela|no flatbuffer"):
        vela_report(path)


def test_wrong_arguments(files):
    with pytest.raises(ValueError, match=r"ethos-u55-32, .*-2048\. Received: .*'u55'"):
        vela_report("not read", "u55")
    with pytest.raises(ExportConversionError, match=r"System_Config\.Nope not found"):
        vela_report(files / "dense.tflite", system_config="Nope")


def test_vela_is_not_installed(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "ethosu", None)
    with pytest.raises(ImportError, match=r"keras-sparse-ortho\[ethos-u\]"):
        vela_report(files / "dense.tflite")


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("import time; time.sleep(60)", r"within 0\.5 seconds"),
        ("raise RuntimeError('no such block')", "RuntimeError: no such block"),
        ("import os; os.abort()", "exit status -6"),
    ],
)
def test_vela_hangs_or_crashes(files, tmp_path, monkeypatch, code, rule):
    fake = tmp_path / "ethosu" / "vela"
    fake.mkdir(parents=True)
    for folder in (fake.parent, fake):
        (folder / "__init__.py").touch()
    (fake / "__main__.py").write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(tmp_path)
    seconds = 0.5 if "sleep" in code else 60
    with pytest.raises(ExportConversionError, match=rule):
        vela_report(files / "dense.tflite", timeout=seconds)


def test_the_command(files, capsys):
    names = [str(files / f"{name}.tflite") for name in ("dense", "sparse")]
    assert main(["bench", "--accelerator", "ethos-u55-128", "--json", *names]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["path"] for one in found] == names
    assert found[1]["ms"] < found[0]["ms"]
    assert main(["bench", "--accelerator", "ethos-u55-128", names[0]]) == 0
    assert "nothing was measured" in capsys.readouterr().out
    assert main(["bench", "--accelerator", "u55", names[0]]) == 2
    assert "ethos-u55-128" in capsys.readouterr().err
    assert main(["bench", names[0], "--accelerator", "ethos-u55-128", "--threads", "2"]) == 2
    assert "nothing is timed" in capsys.readouterr().err
    assert main(["bench", "--accelerator", "ethos-u55-128", "none.tflite"]) == 3
