"""The saliencies by name, for arguments such as `score` of `prune`."""

from collections.abc import Callable
from typing import Any

from keras_sparse_ortho.saliency._gradient_scores import grasp, snip
from keras_sparse_ortho.saliency._saliency import Saliency, magnitude, random
from keras_sparse_ortho.saliency._synflow import synflow

SALIENCIES: dict[str, Callable[..., Saliency]] = {
    "magnitude": magnitude,
    "random": random,
    "snip": snip,
    "grasp": grasp,
    "synflow": synflow,
}
OF_DATA = ("snip", "grasp")
"""Those that are derivatives of the loss."""


def saliency_by_name(
    name: str,
    model: Any,
    density: float,
    data: Any = None,
    *,
    seed: int | None = None,
    **options: Any,
) -> Saliency:
    """The saliency of this name; refuses missing data, and data for a method that uses none."""
    if name not in SALIENCIES:
        names = ", ".join(f'"{known}"' for known in (*SALIENCIES, "obs", "wanda"))
        raise ValueError(f"`score` must be one of {names}. Received: score={name!r}")
    if name in OF_DATA and data is None:
        raise ValueError(
            f"The score of {name} is a derivative of the loss: give `data`, such as (x, y). "
            f"Received: score={name!r}, data=None"
        )
    if name not in OF_DATA and data is not None:
        raise ValueError(
            f"{name} uses the weights alone: leave `data` out. "
            f"Received: score={name!r}, data of type {type(data).__name__}"
        )
    if name in (*OF_DATA, "random"):
        options["seed"] = seed
    return SALIENCIES[name](model, density, *([] if data is None else [data]), **options)
