"""All routes by the name the user gives."""

from typing import Final

from keras_sparse_ortho.export._dense_routes import DynamicInt8, Float16, Float32, Int8
from keras_sparse_ortho.export._route import Route

ROUTES: Final[tuple[Route, ...]] = (Float32(), Float16(), DynamicInt8(), Int8())


def route_for(quantization: str | None) -> Route:
    """The route that a value of `quantization` asks for.

    Raises:
        ValueError: if there is none.
    """
    for route in ROUTES:
        if route.quantization == quantization:
            return route
    raise ValueError(
        f"`quantization` must be one of {[route.quantization for route in ROUTES]}. "
        f"Received: quantization={quantization!r}"
    )
