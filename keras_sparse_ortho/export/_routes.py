"""The routes from a Keras model to a LiteRT file, and which of them a mode tries."""

import dataclasses
from typing import Final

from keras_sparse_ortho.export._process import converter_backend

MODES = ("small", "fast")

# The largest error that passes by default. Measured: up to 6e-4 for float16, 0.014 for dynamic
# int8, 0.12 for int8. Float32 differs from Keras by the order of summation only.
_TOLERANCES = {"float32": 1e-5, "float16": 5e-3, "dynamic_int8": 0.1, "int8": 0.25}


class ExportRouteError(ValueError):
    """A route that cannot work on this model, or on any, with the reason and the alternative."""


@dataclasses.dataclass(frozen=True)
class Route:
    """How a model is stored in a LiteRT file, and how exact the file must be.

    Args:
        storage: "float32", "float16", "dynamic_int8" or "int8".
        encoding: "dense"; "sp": TensorFlow's own sparsity; "blocks": see `_blocks.py`.
    """

    storage: str
    encoding: str = "dense"

    @property
    def name(self) -> str:
        """Such as "dynamic_int8+blocks"."""
        return self.storage if self.encoding == "dense" else f"{self.storage}+{self.encoding}"

    @property
    def measure(self) -> str:
        """Of the error, see `compare`."""
        return "max" if self.storage == "float32" else "rms"

    @property
    def tolerance(self) -> float:
        """The largest error that passes by default."""
        return _TOLERANCES[self.storage]

    @property
    def needs_data(self) -> bool:
        """Whether activations are calibrated."""
        return self.storage == "int8"

    @property
    def of_blocks(self) -> bool:
        """Whether the model is converted with its block convolutions."""
        return self.encoding == "blocks"

    @property
    def rows_apart(self) -> bool:
        """See `as_convolutions`."""
        return self.of_blocks and self.storage == "dynamic_int8"

    def is_there(self) -> bool:
        """Whether what converts by this route is installed."""
        return self.encoding != "sp" or converter_backend() == "tensorflow"


_STORAGES = tuple(_TOLERANCES)
ROUTES: Final[tuple[Route, ...]] = (
    *(Route(storage) for storage in _STORAGES),
    *(Route(storage, "sp") for storage in _STORAGES[:3]),  # XNNPACK crashes on that of int8
    *(Route(storage, "blocks") for storage in _STORAGES),
)


def route_named(name: str) -> Route:
    """The route with a name; `ValueError` if there is none, or if it needs TensorFlow in vain."""
    for route in ROUTES:
        if route.name == name and route.is_there():
            return route
        if route.name == name:
            raise ExportRouteError(
                f"Route '{name}' is one of TensorFlow's converter; use another one, or install "
                'it: pip install "keras-sparse-ortho[litert]". '
                "Received: an environment without TensorFlow"
            )
    raise ValueError(
        f"`mode` must be one of {list(MODES)} or the name of a route, one of "
        f"{[route.name for route in ROUTES]}. Received: mode={name!r}"
    )


def routes_of(mode: str | None, quantization: str | None, has_data: bool) -> list[Route]:
    """The routes that a mode tries, see `export_litert`; without data no static int8."""
    if quantization not in (None, *_STORAGES):
        raise ValueError(
            f"`quantization` must be one of {[None, *_STORAGES]}. Received: {quantization=}"
        )
    there = [route for route in ROUTES if route.is_there()]
    if mode in MODES and quantization is None:
        return [route for route in there if has_data or not route.needs_data]
    if mode is None and quantization is not None:
        return [Route(quantization)]
    if mode is None or mode in MODES:
        return [route for route in there if route.storage == (quantization or "float32")]
    named = route_named(mode)
    if quantization not in (None, named.storage):
        raise ValueError(
            f"`mode` names a route of quantization={named.storage!r}; leave "
            f"`quantization` out. Received: mode={mode!r}, quantization={quantization!r}"
        )
    return [named]
