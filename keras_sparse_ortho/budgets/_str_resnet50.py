"""`str_resnet50`: the layer densities that STR learnt for ResNet-50 on ImageNet."""

import csv
import importlib.resources

from keras_sparse_ortho._checks import check_density, other_keywords
from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.errors import BudgetError


@other_keywords()
def str_resnet50(density: float = 0.0977) -> Budget:
    """The published budgets of soft threshold reparameterization (STR) for ResNet-50.

    For `keras.applications.ResNet50`: 16 budgets, with global densities from 0.2045 to 0.009.
    Keras' ResNet-50 has the stride of a stage in the first 1x1 convolution, PyTorch's in the 3x3
    one: so the first 1x1 convolutions of stages 3, 4 and 5 cost a quarter in Keras. Some layers are
    sparser than an exactly orthogonal kernel can be; `lift` lifts these.

    Args:
        density: Global live fraction of one of the published budgets, e.g. 0.0977 for the network
            of 90.23% sparsity and 74.31% top-1 accuracy.

    Raises:
        BudgetError: Another density; the message lists the available ones.

    Example:

    >>> budget = str_resnet50(0.0977)
    >>> len(budget), round(budget["conv1_conv/kernel"], 4)
    (54, 0.402)
    >>> round(1 - budget.density, 4)
    0.9023

    Reference:

    - Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity" (ICML
      2020), arXiv 2002.03231; the table is that of RAIVNLab/STR, with Keras' names
    """
    density = check_density(density)
    resource = importlib.resources.files(__package__).joinpath("data", "str_resnet50.csv")
    overall, *layers = csv.DictReader(resource.read_text(encoding="utf-8").splitlines())
    columns = [name for name in overall if name.startswith("sparsity_")]
    published = {_density(overall[name]): name for name in columns}
    if density not in published:
        raise BudgetError(
            f"STR's published densities for ResNet-50 are {sorted(published, reverse=True)}. "
            f"Received: density={density!r}"
        )
    return Budget(
        {row["layer"]: _density(row[published[density]]) for row in layers},
        {row["layer"]: int(row["size"]) for row in layers},
    )


def _density(sparsity: str) -> float:
    """The density for a printed sparsity [%]; rounded, as 100 - 90.23 is not 9.77 in binary."""
    return round(1 - float(sparsity) / 100, 6)
