"""Named errors, all of them `ValueError`s; those of `export` and `tfmot` stand in their rooms."""


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
