"""The weights of a model that are to be sparse, and a warning of matrices that stay dense."""

import warnings
from typing import Any

from keras_sparse_ortho._checks import told
from keras_sparse_ortho._keras_internals import level_of_user
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose, names_in, select
from keras_sparse_ortho.models import prunable_weights


def weights_to_prune(model: Any, include: Selection, exclude: Selection) -> list[PrunableWeight]:
    """The weights that `include` and `exclude` select; see `sparsify`.

    Raises:
        NotPrunableError: A model that is not built; an `include` and `exclude` that leave nothing.
        UnknownWeightError: An `include` or `exclude` that names nothing.

    Warns:
        UserWarning: Unregistered matrices that stay dense, unless they are named.
    """
    everything = prunable_weights(model, unregistered=True)
    names = {
        name
        for name in ([] if include is None else names_in(include) or [])
        if isinstance(name, str)
    }
    known = [weight for weight in everything if weight.registered or weight.path in names]
    others = [weight for weight in everything if not (weight.registered or weight.path in names)]
    weights = choose(known, include, exclude, others)
    if known and not weights:
        raise NotPrunableError(
            "`include` and `exclude` leave no kernel. There are: "
            f"{', '.join(weight.path for weight in known)}. "
            f"Received: include={told(include)}, exclude={told(exclude)}"
        )
    if include is None:
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
        "is unknown. Register their layers with keras_sparse_ortho.initializers.kernel_layouts; or "
        "name them by their full paths, in `include` to mask them as (*batch, in, out), or in "
        "`exclude` to keep them "
        f"dense without this warning. Received: {listed}{more}",
        stacklevel=level_of_user(),
    )
