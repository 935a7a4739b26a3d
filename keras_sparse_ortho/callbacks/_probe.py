"""`probe`: a few steps of gradual pruning, to find which blocks of a model's kernels matter."""

from typing import Any

import keras

from keras_sparse_ortho._checked_data import check_batches
from keras_sparse_ortho._checks import check_integer, other_keywords
from keras_sparse_ortho._keras_internals import compile_like
from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.callbacks._density_run import UpdateMasks
from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.kernels import KernelLayout, Selection
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.orthogonal import (
    Block,
    GivenBlocks,
    StructureLike,
    as_structure,
)
from keras_sparse_ortho.parametrizations import MagnitudeMask
from keras_sparse_ortho.pruning import (
    BudgetLike,
    parametrize,
    weights_to_prune,
    why_not_on_blocks,
)
from keras_sparse_ortho.schedules import Cubic


@other_keywords
def probe(
    model: keras.Model,
    density: float,
    data: Any,
    *,
    steps: int,
    structure: StructureLike = "32x32",
    budget: BudgetLike = "uniform",
    include: Selection = None,
    exclude: Selection = None,
    **fit: Any,
) -> Budget:
    """Finds which blocks of a dense model's kernels to train, for a new start on these.

    In a few steps of training `MagnitudeMask` prunes a copy of the model into blocks in any
    pattern; only the pattern is kept. It pays where inputs are used unevenly, as in text; elsewhere
    regular blocks, which need no probe, are as good or better.

    Args:
        model: A built and compiled Keras model, dense. It does not change.
        density: Live fraction, in (0, 1], over the selected kernels that the blocks fit; the others
            stay dense.
        data: Data as `fit` takes them: `(x, y)`, `(x, y, sample_weight)` or a data set.
        steps: Optimizer steps, a twentieth to a tenth of those of a whole run.
        structure: The size of blocks.
        budget: As for `sparsify`.
        include: Which kernels, as for `sparsify`.
        exclude: Which kernels not.
        **fit: Arguments of `fit`, such as `batch_size`.

    Returns a `Budget` for `sparsify(model, budget=found, storage="blocks")`;
    `print(found.blocks[path])` draws a kernel. Raises NotPrunableError for a model that is not
    compiled, and data that end before `steps` steps; LayoutError for blocks that fit no kernel;
    BudgetError and DensityError as `parametrize`; ValueError for rows or targets that are not
    finite, or do not fit the model.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, name="hidden")])
        >>> dense.compile("adam", "mse")
        >>> x = np.random.default_rng(0).normal(size=(64, 32)) * (np.arange(32) < 16)
        >>> found = probe(dense, 0.25, (x, x @ np.ones((32, 64))), steps=20, structure=(8, 8))
        >>> sparse = kso.sparsify(dense, budget=found, storage="blocks", seed=0)
        >>> type(sparse.layers[0]).__name__, kso.report(sparse).density
        ('BlockSparseDense', 0.25)
    """
    size = as_structure(structure)
    if not isinstance(size, Block):
        raise ValueError(
            f"`structure` must be a size of blocks. Received: structure={size!r}"
        )
    steps, size = check_integer("steps", steps), Block(size.rows, size.cols)
    weights = weights_to_prune(model, include, exclude)
    reasons = {w.path: why_not_on_blocks(w, density, size) for w in weights}
    if not (
        fitting := [path for path, reason in reasons.items() if reason is None]
    ):
        raise LayoutError(
            f"There is no kernel that {size} fits. Received: {reasons}"
        )
    template = MagnitudeMask(
        Cubic(begin_step=0, end_step=steps), structure=size
    )
    copy = parametrize(model, template, density, budget, include=fitting)
    if not compile_like(copy, model):
        raise NotPrunableError(
            "A probe trains a copy of the model: compile it first. "
            f"Received: model={model.name!r}, which is not compiled"
        )
    arguments = _fit_arguments(model, data)
    options = {**arguments, "verbose": 0, **fit}
    copy.fit(epochs=steps + 1, callbacks=[UpdateMasks(stop=True)], **options)
    densities, blocks = {}, {}
    for weight in prunable_weights(copy):
        if isinstance(weight.storage, MagnitudeMask):
            if not weight.storage.fixed:
                raise NotPrunableError(
                    f"The data must last. Received: fewer than {steps} steps"
                )
            layout = weight.layout or KernelLayout.convolution()
            densities[weight.path] = weight.density
            blocks[weight.path] = GivenBlocks.of_mask(
                layout.to_canonical(weight.mask), size
            )
    return Budget(densities, blocks=blocks)


def _fit_arguments(model: keras.Model, data: Any) -> dict[str, Any]:
    """Data as arguments of `fit`; ValueError for arrays that the model cannot learn from."""
    if not isinstance(data, tuple):
        return {"x": data}  # a data set, which is read only once
    arguments = dict(zip(("x", "y", "sample_weight"), data, strict=False))
    check_batches(
        model,
        [(arguments["x"], arguments.get("y"), arguments.get("sample_weight"))],
    )
    return arguments
