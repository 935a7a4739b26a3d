"""What can go wrong on the way to a LiteRT file that is no fault of the arguments."""


class ExportConversionError(RuntimeError):
    """The model could not be turned into a LiteRT file: an operation LiteRT lacks, or a crash."""


class ExportVerificationError(RuntimeError):
    """The LiteRT file crashed, disagreed with Keras, or lost zeros, and was not handed over."""
