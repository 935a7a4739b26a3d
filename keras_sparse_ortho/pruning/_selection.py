"""The weights of a model that are to be sparse, and a warning of matrices that stay dense."""

import warnings
from typing import Any

from keras_sparse_ortho._checks import told
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose, select
from keras_sparse_ortho.models import prunable_weights

_UNREGISTERED = ("warn", "dense", "guess")


def weights_to_prune(
    model: Any, include: Selection, exclude: Selection, unregistered: str
) -> list[PrunableWeight]:
    """The weights that `include`, `exclude` and `unregistered` select; see `sparsify`.

    Raises:
        NotPrunableError: A model that is not built; an `include` and `exclude` that leave nothing.
        UnknownWeightError: An `include` or `exclude` that names nothing.
        ValueError: An unknown `unregistered`.

    Warns:
        UserWarning: Unregistered matrices that stay dense, unless they are excluded by name.
    """
    if unregistered not in _UNREGISTERED:
        raise ValueError(
            f"`unregistered` must be one of {list(_UNREGISTERED)}. "
            f"Received: unregistered={unregistered!r}"
        )
    everything = prunable_weights(model, unregistered=True)
    known = [weight for weight in everything if weight.registered]
    others = [weight for weight in everything if not weight.registered]
    if unregistered == "guess":
        weights = choose(everything, include, exclude)
    else:
        weights = choose(known, include, exclude, others)
    if known and not weights:
        raise NotPrunableError(
            "`include` and `exclude` leave no kernel. There are: "
            f"{', '.join(weight.path for weight in known)}. "
            f"Received: include={told(include)}, exclude={told(exclude)}"
        )
    if unregistered == "warn" and include is None:
        named = [] if exclude is None else select(everything, exclude, "exclude")
        left = {weight.path for weight in named}
        _warn([weight for weight in others if weight.path not in left], everything)
    return weights


def _warn(dense: list[PrunableWeight], everything: list[PrunableWeight]) -> None:
    if not dense:
        return
    share = sum(weight.size for weight in dense) / sum(weight.size for weight in everything)
    listed = ", ".join(f"'{weight.path}' {weight.shape}" for weight in dense[:5])
    more = f" and {len(dense) - 5} more" if len(dense) > 5 else ""
    warnings.warn(
        f"Matrices with {share:.2%} of all entries stay dense, because the meaning of their axes "
        "is unknown. Register their layers with keras_sparse_ortho.initializers.kernel_layouts, or "
        'mask them as (*batch, in, out) with unregistered="guess"; unregistered="dense" keeps them '
        f"dense without this warning. Received: {listed}{more}",
        stacklevel=5,
    )
