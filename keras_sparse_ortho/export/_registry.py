"""All routes by the name the user gives."""

from typing import Final

from keras_sparse_ortho.export._dense_routes import DynamicInt8, Float16, Float32, Int8
from keras_sparse_ortho.export._errors import ExportRouteError
from keras_sparse_ortho.export._route import Route
from keras_sparse_ortho.export._sparse_encoding import BLOCK_1X4, BLOCK_1X16, CSR
from keras_sparse_ortho.export._sparse_routes import ConverterSparsity, SparseFullyConnected

_F32, _F16, _DYNAMIC, _INT8 = DENSE_ROUTES = (Float32(), Float16(), DynamicInt8(), Int8())

ROUTES: Final[tuple[Route, ...]] = (
    *DENSE_ROUTES,
    *(ConverterSparsity(route) for route in DENSE_ROUTES),
    SparseFullyConnected(_F32, CSR),
    SparseFullyConnected(_F32, BLOCK_1X4),
    SparseFullyConnected(_DYNAMIC, BLOCK_1X16),
    SparseFullyConnected(_INT8, BLOCK_1X16),
)

_FLOAT16 = (
    "LiteRT widens float16 weights by a DEQUANTIZE operation, so that no kernel sees the sparse "
    "ones, and the converter's 1x4 blocks of float16 crash the interpreter; take 'float16+sp', "
    "'float32+csr' or 'float32+1x4'"
)
_DYNAMIC_INT8 = (
    "the kernel takes every sparse int8 weight for blocks of 1x16 and answers wrongly; take "
    "'dynamic_int8+1x16'"
)
_STATIC_INT8 = "the kernel refuses int8 weights in any blocks but 1x16; take 'int8+1x16'"

TRAPS: Final[dict[str, str]] = {
    "float16+csr": _FLOAT16,
    "float16+1x4": _FLOAT16,
    "float16+1x16": _FLOAT16,
    "float32+1x16": "the kernel takes float32 blocks of 1x4 only; take 'float32+1x4'",
    "dynamic_int8+csr": _DYNAMIC_INT8,
    "dynamic_int8+1x4": _DYNAMIC_INT8,
    "int8+csr": _STATIC_INT8,
    "int8+1x4": _STATIC_INT8,
}


def route_for(quantization: str | None) -> Route:
    """The dense route that a value of `quantization` asks for.

    Raises:
        ValueError: if there is none.
    """
    for route in DENSE_ROUTES:
        if quantization in (route.quantization, route.name):
            return route
    raise ValueError(
        f"`quantization` must be one of {[route.quantization for route in DENSE_ROUTES]}. "
        f"Received: quantization={quantization!r}"
    )


def route_named(name: str) -> Route:
    """The route of a name, such as `"dynamic_int8+1x16"`.

    Raises:
        ExportRouteError: if it is one that cannot work, with the reason.
        ValueError: if there is none.
    """
    for route in ROUTES:
        if route.name == name:
            return route
    if name in TRAPS:
        raise ExportRouteError(f"Route '{name}' cannot work: {TRAPS[name]}. Received: {name!r}")
    raise ValueError(
        f"A route must be one of {[route.name for route in ROUTES]}. Received: {name!r}"
    )
