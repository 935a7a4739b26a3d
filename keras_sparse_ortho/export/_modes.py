"""Which routes a mode tries, and which of the verified ones it takes."""

from collections.abc import Sequence

from keras_sparse_ortho.export._candidates import Candidate
from keras_sparse_ortho.export._registry import ROUTES, route_for, route_named
from keras_sparse_ortho.export._route import Route

MODES = ("small", "fast", "sparse", "auto")

_NEAR = 1.1  # "auto" gives up so much speed for a smaller file


def routes_of(mode: str | None, quantization: str | None, has_data: bool) -> list[Route]:
    """The routes to try; a route's own name is a mode of one.

    Args:
        mode: One of `MODES`, the name of a route, or None: the dense one of the storage.
        quantization: Only routes of this storage; None: all, but for "sparse", where it means
            float32.
        has_data: Whether there is representative data, without which static int8 is left out.

    Raises:
        ExportRouteError: for a route that cannot work, with the reason.
        ValueError: if there is no such mode, route or storage.
    """
    if mode is None:
        return [route_for(quantization)]
    if mode not in MODES:
        try:
            route = route_named(mode)
        except ValueError as error:
            if mode.split("+")[0] not in {route.name for route in ROUTES}:
                raise ValueError(
                    f"`mode` must be one of {list(MODES)} or the name of a route, one of "
                    f"{[route.name for route in ROUTES]}. Received: mode={mode!r}"
                ) from None
            raise error
        if quantization is not None and route_for(quantization).quantization != route.quantization:
            raise ValueError(
                f"`mode` names a route of quantization={route.quantization!r}; leave "
                f"`quantization` out. Received: mode={mode!r}, quantization={quantization!r}"
            )
        return [route]
    storage = None if quantization is None else route_for(quantization)
    if mode == "sparse":
        wanted = storage or route_for(None)
        found = [r for r in ROUTES if r.quantization == wanted.quantization]
        return [r for r in found if r.encoding != "dense"]
    found = [r for r in ROUTES if storage is None or r.quantization == storage.quantization]
    if storage is None and not has_data:
        found = [r for r in found if not r.needs_representative_data]
    return found


def choose(mode: str, found: Sequence[Candidate], sidecar: str | None) -> Candidate:
    """The candidate that the mode takes, of at least one verified.

    Files that only run without XNNPACK are taken where there is no other: a plain interpreter
    would crash on them.
    """
    good = [c for c in found if c.file is not None]
    good = [c for c in good if c.outcome.xnnpack] or good

    def size(c: Candidate) -> int:
        packed = {"gzip": c.outcome.gzip_bytes, "zstd": c.outcome.zstd_bytes}.get(sidecar or "")
        return packed or c.outcome.bytes or 0

    def latency(c: Candidate) -> float:
        return c.outcome.latency_ms or float("inf")

    if mode == "fast":
        return min(good, key=latency)
    if mode == "auto":
        least = min(map(latency, good))
        return min((c for c in good if latency(c) <= _NEAR * least), key=size)
    return min(good, key=size)
