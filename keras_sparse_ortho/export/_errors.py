"""What can go wrong on the way to a LiteRT file, and from one."""


class ExportConversionError(RuntimeError):
    """The model could not be turned into a LiteRT file: an operation LiteRT lacks, or a crash."""


class ExportVerificationError(RuntimeError):
    """The LiteRT file crashed, disagreed with Keras, or lost zeros, and was not handed over."""


class ExportRouteError(ValueError):
    """A route that cannot work on this model, or on any, with the reason and the alternative."""


class LiteRTFileError(ValueError):
    """A file that is no LiteRT file, or not the one that was written, or not of this model."""


class ExportFallbackWarning(UserWarning):
    """The dense route was taken instead of the one asked for, with the reason."""
