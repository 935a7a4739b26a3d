"""The routes from a Keras model to a LiteRT file, and which of them a mode tries."""

import dataclasses
from typing import Final

from keras_sparse_ortho.export._process import converter_backend

MODES = ("small", "fast", "sparse", "auto")

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
        encoding: "dense"; "sp": TensorFlow's own sparsity; "csr" or "1x16": see
            `_sparse_encoding.py`; "blocks": see `_block_convolutions.py`.
    """

    storage: str
    encoding: str = "dense"

    @property
    def name(self) -> str:
        """Such as "dynamic_int8+1x16"."""
        return self.storage if self.encoding == "dense" else f"{self.storage}+{self.encoding}"

    @property
    def quantization(self) -> str | None:
        """The storage, as the argument of `export_litert`."""
        return None if self.storage == "float32" else self.storage

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

    @property
    def converted_as(self) -> "Route":
        """The route whose converted file is encoded; most routes have their own."""
        return Route(self.storage) if self.encoding in ("csr", "1x16") else self

    def is_there(self) -> bool:
        """Whether what converts by this route is installed."""
        return self.encoding != "sp" or converter_backend() == "tensorflow"


_STORAGES = tuple(_TOLERANCES)
ROUTES: Final[tuple[Route, ...]] = (
    *(Route(storage) for storage in _STORAGES),
    *(Route(storage, "sp") for storage in _STORAGES[:3]),  # XNNPACK crashes on that of int8
    Route("float32", "csr"),
    Route("dynamic_int8", "1x16"),
    *(Route(storage, "blocks") for storage in _STORAGES),
)

_UNSUPPORTED: Final[dict[str, str]] = {
    "float32": "the kernel takes single entries; use 'float32+csr'",
    "float16": "LiteRT widens float16 weights by a DEQUANTIZE operation, so that no kernel gets "
    "the sparse ones; use 'float16+sp' or 'float32+csr'",
    "dynamic_int8": "the kernel reads every sparse int8 weight as blocks of 1x16 and answers "
    "wrongly; use 'dynamic_int8+1x16'",
    "int8": "LiteRT's kernels of static int8 refuse sparse weights, crash or are slower than "
    "dense ones; use 'int8' or 'int8+blocks'",
}
"""Why the other sparse encodings of a storage cannot work."""


def route_for(quantization: str | None) -> Route:
    """The dense route of a storage; `ValueError` if there is none."""
    if (quantization or "float32") not in _STORAGES:
        raise ValueError(
            f"`quantization` must be one of {[None, *_STORAGES]}. Received: {quantization=}"
        )
    return Route(quantization or "float32")


def route_named(name: str) -> Route:
    """The route with a name; `ExportRouteError` or `ValueError` if there is none."""
    for route in ROUTES:
        if route.name == name:
            return route
    storage, _, encoding = name.partition("+")
    if storage in _UNSUPPORTED and encoding in ("sp", "csr", "1x4", "1x16"):
        reason = _UNSUPPORTED[storage]
        raise ExportRouteError(f"Route '{name}' cannot work: {reason}. Received: {name!r}")
    raise ValueError(
        f"A route must be one of {[route.name for route in ROUTES]}. Received: {name!r}"
    )


def routes_of(mode: str | None, quantization: str | None, has_data: bool) -> list[Route]:
    """The routes that a mode tries, see `export_litert`; without data no static int8."""
    there = [route for route in ROUTES if route.is_there()]
    if mode is None and quantization is None:
        return [route for route in there if route.storage == "float32"]
    if mode is None:
        return [route_for(quantization)]
    if mode not in MODES:
        if mode.split("+")[0] not in _STORAGES:
            raise ValueError(
                f"`mode` must be one of {list(MODES)} or the name of a route, one of "
                f"{[route.name for route in ROUTES]}. Received: mode={mode!r}"
            )
        named = route_named(mode)
        if quantization is not None and route_for(quantization).storage != named.storage:
            raise ValueError(
                f"`mode` names a route of quantization={named.quantization!r}; leave "
                f"`quantization` out. Received: mode={mode!r}, quantization={quantization!r}"
            )
        return [checked(named)]
    if quantization is not None or mode == "sparse":
        storage = route_for(quantization).storage
        there = [route for route in there if route.storage == storage]
    elif not has_data:
        there = [route for route in there if not route.needs_data]
    return [route for route in there if mode != "sparse" or route.encoding != "dense"]


def checked(route: Route) -> Route:
    """The route; `ExportRouteError` if it needs TensorFlow and there is none."""
    if not route.is_there():
        raise ExportRouteError(
            f"Route '{route.name}' is one of TensorFlow's converter; use another one, or install "
            'it: pip install "keras-sparse-ortho[litert]". '
            "Received: an environment without TensorFlow"
        )
    return route
