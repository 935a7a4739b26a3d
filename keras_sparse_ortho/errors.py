"""Named errors, all of them `ValueError`s, and a warning; `export` and `tfmot` have their own."""

__all__ = [
    "BudgetError",
    "DensityError",
    "DensityWarning",
    "LayoutError",
    "NotPrunableError",
    "UnknownWeightError",
]


class DensityError(ValueError):
    """A density outside (0, 1], or one that no kernel of the given shape can have."""


class LayoutError(ValueError):
    """A kernel shape that does not fit the layout given for it."""


class BudgetError(ValueError):
    """A budget that does not fit the model, or a budget file that cannot be read."""


class NotPrunableError(ValueError):
    """A layer or weight that cannot be parametrized, with the reason."""


class UnknownWeightError(ValueError):
    """A name that no prunable weight or layer has."""


class WorkerError(ValueError):
    """Processes that train one model together and do not agree, or one of which has failed."""


class DensityWarning(UserWarning):
    """Weights that are not at the density asked for when training has ended."""
