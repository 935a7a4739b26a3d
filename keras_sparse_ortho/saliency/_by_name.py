"""The saliencies by name, for what takes one as an argument."""

from typing import Any

from keras_sparse_ortho.kernels import Selection
from keras_sparse_ortho.saliency._baselines import magnitude, random
from keras_sparse_ortho.saliency._grasp import grasp
from keras_sparse_ortho.saliency._saliency import Saliency
from keras_sparse_ortho.saliency._snip import snip
from keras_sparse_ortho.saliency._synflow import synflow

_WITH_DATA = {"snip": snip, "grasp": grasp}
SALIENCIES = ("magnitude", "random", "snip", "grasp", "synflow")
"""What can be asked for by name."""


def saliency_by_name(
    name: str,
    model: Any,
    density: float,
    data: Any = None,
    *,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
    on_collapse: str = "error",
    verbose: int = 0,
) -> Saliency:
    """The saliency of this name, with the defaults of its function for all else.

    Args:
        name: `"magnitude"`, `"random"`, `"snip"`, `"grasp"` or `"synflow"`.
        model: A built Keras model.
        density: Global live fraction over the selected weights, in (0, 1].
        data: What SNIP and GraSP are computed on, as one argument that `fit` would take.
        seed: Of the random scores, or of the samples that are drawn from arrays.
        include: Which weights: paths, layers, regular expressions or a predicate. Default: all.
        exclude: Which weights not.
        on_collapse: `"error"`, `"warn"` or `"ignore"` if a weight is left without live entries.
        verbose: 1 for a progress bar, where there is one.

    Raises:
        ValueError: A name that is not known; no data for a method that needs them, or data for one
            that uses none.
    """
    if name not in SALIENCIES:
        names = ", ".join(f'"{known}"' for known in SALIENCIES)
        raise ValueError(f"`score` must be one of {names}. Received: score={name!r}")
    if name in _WITH_DATA and data is None:
        raise ValueError(
            f"The score of {name} is a derivative of the loss: give `data`, such as (x, y). "
            f"Received: score={name!r}, data=None"
        )
    if name not in _WITH_DATA and data is not None:
        raise ValueError(
            f"{name} looks at weights alone: leave `data` out. "
            f"Received: score={name!r}, data of type {type(data).__name__}"
        )
    options: dict[str, Any] = {"include": include, "exclude": exclude, "on_collapse": on_collapse}
    if name == "magnitude":
        return magnitude(model, density, **options)
    if name == "random":
        return random(model, density, seed=seed, **options)
    if name == "synflow":
        return synflow(model, density, verbose=verbose, **options)
    return _WITH_DATA[name](model, density, data, seed=seed, verbose=verbose, **options)
