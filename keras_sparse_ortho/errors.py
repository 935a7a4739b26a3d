"""Errors and warnings of all rooms."""

from keras_sparse_ortho._text import printable_lines

__all__ = [
    "BudgetError",
    "DensityError",
    "DensityWarning",
    "ExportConversionError",
    "ExportRouteError",
    "ExportVerificationError",
    "FloatOperationsWarning",
    "LayoutError",
    "LiteRTFileError",
    "NotPrunableError",
    "ShrinkError",
    "UnknownWeightError",
    "WorkerError",
]


class _Printable(Exception):
    """The base of all these: a message names layers and files, and their names may be hostile."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(
            *(
                printable_lines(a) if isinstance(a, str) else a
                for a in arguments
            )
        )


class DensityError(_Printable, ValueError):
    """Raised for a density outside (0, 1], or one that a kernel of the given shape cannot have."""


class LayoutError(_Printable, ValueError):
    """Raised when a kernel's shape does not fit its layout or structure."""


class BudgetError(_Printable, ValueError):
    """Raised for a budget that does not fit the model, or a budget file that cannot be read."""


class NotPrunableError(_Printable, ValueError):
    """Raised for a model, layer or weight that cannot be pruned or rewritten; gives the reason."""


class UnknownWeightError(_Printable, ValueError):
    """Raised for a path or pattern that matches no prunable weight or layer."""


class ShrinkError(_Printable, RuntimeError):
    """Raised when no file is within the limits; the message has the table of trials."""


class WorkerError(_Printable, ValueError):
    """Raised on all processes that train one model if they differ, or if one of them has failed."""


class DensityWarning(_Printable, UserWarning):
    """Warned when training ends with weights at another density than requested."""


class FloatOperationsWarning(_Printable, UserWarning):
    """Warned when a LiteRT file of integers computes some of its operations in floats."""


class ExportRouteError(_Printable, ValueError):
    """A route that cannot work on this model, or on any, with the reason and the alternative."""


class ExportConversionError(_Printable, RuntimeError):
    """The model could not be turned into a LiteRT file: an operation LiteRT lacks, or a crash."""


class ExportVerificationError(_Printable, RuntimeError):
    """The LiteRT file crashed, disagreed with Keras, or lost zeros, and was not handed over."""


class LiteRTFileError(_Printable, ValueError):
    """A file that is not a LiteRT file, or is damaged or edited."""
