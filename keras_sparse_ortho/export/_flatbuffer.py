"""LiteRT flatbuffers as Python objects and back, by the official schema."""

from typing import Any

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
    builder = _aligning_builder(size + (1 << 16))
    builder.Finish(model.Pack(builder), _IDENTIFIER)
    return bytes(builder.Output())


def _aligning_builder(size: int) -> Any:
    """A builder that aligns byte vectors as the schema asks; the generated Python code does not."""
    import flatbuffers  # type: ignore[import-untyped]  # comes with TensorFlow and ai-edge-litert

    class AligningBuilder(flatbuffers.Builder):
        def CreateNumpyVector(self, x: np.ndarray) -> int:
            if x.dtype != np.uint8:
                return int(super().CreateNumpyVector(x))
            self.StartVector(1, x.size, _ALIGNMENT)
            self.head -= x.size
            self.Bytes[self.head : self.head + x.size] = x.tobytes()
            return int(self.EndVector())

    return AligningBuilder(size)
