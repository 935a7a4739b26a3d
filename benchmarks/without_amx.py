"""Runs what follows without AMX, the tiles of Intel's server processors: Linux on x86-64 only.

XNNPACK asks Linux for leave to use the tiles; `deny` lets the system refuse it to this process and
those that it starts, by a seccomp filter. What was not yet loaded then takes the kernels of other
processors with AVX-512 and VNNI.
"""

import ctypes
import struct

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # of Berkeley packet filters
_NUMBER, _FIRST_ARGUMENT = 0, 16  # offsets in seccomp_data
_FAIL, _ALLOW = 0x00050000 | 22, 0x7FFF0000  # with EINVAL
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2  # of prctl


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def deny() -> None:
    """Refuses AMX to this process, for good. OSError where that is not possible."""
    steps = [
        (_LOAD, 0, 0, _NUMBER),
        (_EQUAL, 0, 3, _ARCH_PRCTL),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 0, 1, _REQUEST_PERMISSION),
        (_RETURN, 0, 0, _FAIL),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    held = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(steps), ctypes.addressof(held))
    system = ctypes.CDLL(None, use_errno=True)
    if system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or system.prctl(
        _SECCOMP, _FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "The system takes no seccomp filter")
    if system.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        raise OSError("AMX was allowed in spite of the filter")
