"""LiteRT flatbuffers as Python objects and back, by the official schema."""

from typing import Any

import flatbuffers  # type: ignore[import-untyped]
import numpy as np

_IDENTIFIER = b"TFL3"
_ALIGNMENT = 16  # what the schema asks of the data of a buffer (`force_align`)


def read_model(content: bytes) -> Any:
    """The `ModelT` of a flatbuffer. Large buffers are views of `content`, not copies."""
    from ai_edge_litert import schema_py_generated as schema

    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))


def write_model(model: Any) -> bytes:
    """The flatbuffer of a `ModelT`."""
    size = sum(0 if buffer.data is None else len(buffer.data) for buffer in model.buffers)
    builder = _AligningBuilder(size + (1 << 16))
    builder.Finish(model.Pack(builder), _IDENTIFIER)
    return bytes(builder.Output())


class _AligningBuilder(flatbuffers.Builder):
    """Aligns byte vectors as the schema asks, which the generated Python code does not."""

    def CreateNumpyVector(self, x: np.ndarray) -> int:
        """Write a vector; those of bytes hold weights and start at a multiple of 16."""
        if x.dtype != np.uint8:
            return int(super().CreateNumpyVector(x))
        self.StartVector(1, x.size, _ALIGNMENT)
        self.head -= x.size
        self.Bytes[self.head : self.head + x.size] = x.tobytes()
        return int(self.EndVector())
