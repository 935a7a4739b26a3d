"""The files of `real.py shrunk`, timed with the instructions of three kinds of processors.

python benchmarks/processors.py [--networks resnet8] [options]
"""

import contextlib
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator

import real
from packages import FETCHED
from record import last_of_each, machines_of, markdown, sentences
from runner import Measurement, Run, Setting, main

from keras_sparse_ortho.export import latencies

SOURCE = pathlib.Path(__file__).with_name(f"{real.OLDER}.c")
FILES = (*real.RIVALS, "shrink")
KINDS = {"avx2": "AVX2", "vnni": "VNNI", "amx": "AMX"}


class Processors(Measurement):
    """Files that `real.py shrunk` has made, with AVX2 alone, with VNNI, and with AMX as well.

        python benchmarks/processors.py

    It needs a processor of Intel with AMX, Linux and a C compiler: a library that is preloaded
    hides the newer instructions, so that XNNPACK takes the kernels for older processors.
    """

    page = lines = "processors"
    settings = {
        "networks": Setting(
            [*real.NETWORKS, *real.LOADED, *real.widths.TITLES],
            choices=[*real.NETWORKS, *real.LOADED, *real.widths.TITLES],
        ),
        "seconds": Setting(15.0, "to time the files of a network"),
    }

    def runs(self) -> list[Run]:
        return [
            {"network": name}
            for name in self.given.networks
            if _file(name, "shrink").exists()
        ]

    def run(self, which: Run) -> list[Run]:
        """Times the files of a network in turn, with each kind of instructions."""
        name, seconds = which["network"], self.given.seconds
        names = [file for file in FILES if _file(name, file).exists()]
        paths = [_file(name, file) for file in names]
        with _without_new_instructions():
            of_kinds = {"avx2": latencies(paths, seconds=seconds)}
        of_kinds["vnni"] = latencies(paths, seconds=seconds, target="arm64")
        of_kinds["amx"] = latencies(paths, seconds=seconds)
        lines = []
        for number, file in enumerate(names):
            line = {"file": file, "bytes": paths[number].stat().st_size}
            for kind, milliseconds in of_kinds.items():
                line[kind] = milliseconds[number]
            lines.append(which | line)
        return lines

    def report(self, lines: list[Run]) -> str:
        text = "# Shrunk networks on three kinds of processors\n\n" + sentences(
            f"""
            {machines_of(lines)}. The files of [real_shrunk.md](real_shrunk.md), which were chosen
            by times without AMX. XNNPACK takes the kernels for processors with AVX2 alone, with
            AVX-512 and VNNI, and with AMX as well, on the same cores. Milliseconds of a call with
            one row on one thread, and ratios to dense int8.
            """
        )
        latest = last_of_each(lines, "network", "file")
        rows = []
        for (name, file), line in latest.items():
            int8 = latest[name, real.RIVALS[0]]
            row = [name, file, f"{line['bytes'] / int8['bytes']:.2f}"]
            for kind in KINDS:
                row.append(f"{line[kind]:.3g}")
                row.append(f"{line[kind] / int8[kind]:.2f}")
            rows.append(row)
        header = ["network", "file", "bytes of int8"]
        for title in KINDS.values():
            header += [f"ms, {title}", f"of int8, {title}"]
        return text + markdown(header, rows)


def _file(network: str, name: str) -> pathlib.Path:
    return FETCHED / "shrunk" / network / f"{name}.tflite"


@contextlib.contextmanager
def _without_new_instructions() -> Iterator[None]:
    """Inside, new processes find a processor without AVX-512, VNNI and AMX."""
    if "cpuid_fault" not in pathlib.Path("/proc/cpuinfo").read_text():
        raise OSError("This processor cannot hide instructions: no cpuid_fault")
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / f"{real.OLDER}.so"
        command = ["cc", "-O2", "-shared", "-fPIC", str(SOURCE)]
        subprocess.run([*command, "-o", str(library)], check=True)
        os.environ["LD_PRELOAD"] = str(library)
        try:
            yield
        finally:
            del os.environ["LD_PRELOAD"]


if __name__ == "__main__":
    main(Processors)
