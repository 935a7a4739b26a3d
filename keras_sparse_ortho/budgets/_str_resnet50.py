"""`str_resnet50`: the published layer densities of ResNet-50 on ImageNet."""

from keras_sparse_ortho._checks import check_density, other_keywords
from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.budgets._tables import resnet50, sparsity_to_density
from keras_sparse_ortho.errors import BudgetError

_RIVALS = ("uniform", "erk", "snfs", "vd", "gs")


@other_keywords()
def str_resnet50(density: float | str = 0.0977) -> Budget:
    """Returns a published budget of soft threshold reparameterization (STR) for ResNet-50.

    For `keras.applications.ResNet50`: 16 budgets of STR, with global densities from 0.2045 to
    0.009, and those of five rivals at 0.1. Keras has the stride of a stage in the first 1x1
    convolution, PyTorch in the 3x3 one, so the first 1x1 convolutions of stages 3, 4 and 5 cost a
    quarter in Keras. Some layers are too sparse for exactly orthogonal kernels; `lift` lifts them.

    Args:
        density: float or str. Global live fraction of a budget of STR (0.0977: 90.23% sparsity,
            74.31% top-1 accuracy), or a rival: `"uniform"`, `"erk"`, `"snfs"` (sparse networks from
            scratch), `"vd"` (variational dropout) or `"gs"` (global magnitudes).

    Raises BudgetError for another density or name, with the available ones.

    Examples:
        >>> budget = str_resnet50(0.0977)
        >>> len(budget), round(budget["conv1_conv/kernel"], 4)
        (54, 0.402)
        >>> round(1 - budget.density, 4)
        0.9023
        >>> str_resnet50("vd")["conv1_conv/kernel"]
        0.6861

    Reference: Kusupati et al. (ICML 2020), arXiv 2002.03231; tables of RAIVNLab/STR, Keras' names.
    """
    overall, *layers = resnet50()
    columns = [name for name in overall if name.startswith("sparsity_")]
    published = {sparsity_to_density(overall[name]): name for name in columns}
    if isinstance(density, str):
        column = density if density in _RIVALS else None
    else:
        column = published.get(check_density(density))
    if column is None:
        raise BudgetError(
            f"STR's published densities for ResNet-50 are {sorted(published, reverse=True)}, and "
            f"its rivals at 0.1 {_RIVALS}. Received: density={density!r}"
        )
    return Budget(
        {row["layer"]: sparsity_to_density(row[column]) for row in layers},
        {row["layer"]: int(row["size"]) for row in layers},
    )
