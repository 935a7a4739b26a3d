"""The difference of a LiteRT file's outputs from Keras'."""

import dataclasses

import numpy as np

_WIDER = 0.1  # of a range: what is beyond is clipped, not rounded


class ExportVerificationError(RuntimeError):
    """The LiteRT file crashed, disagreed with Keras, or lost zeros, and was not handed over."""


class DisagreementError(ExportVerificationError):
    """A file that runs and differs from Keras, with the two halves of the message."""

    def __init__(self, rule: str, received: str) -> None:
        super().__init__(f"{rule} Received: {received}")
        self.rule, self.received = rule, received


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The difference of two lists of outputs; `error` is the largest, that of `worst_output`.

    `clipped` is the largest share of an output's entries that are outside of the other's range, by
    more than a tenth of it.
    """

    max_abs_diff: float
    mean_abs_diff: float
    argmax_agreement: float | None
    error: float
    worst_output: str
    clipped: float = 0.0


def compare(
    names: list[str], want: list[np.ndarray], got: list[np.ndarray], measure: str
) -> Comparison:
    """Compare Keras' outputs with those of the file.

    With d the difference of one output y, the measure `"max"` is max|d| / max(1, max|y|), and
    `"rms"`, steady where int8 clips single values, is sqrt(mean d^2) / sqrt(mean y^2). A value that
    is not finite makes the error infinite.
    """
    diffs, errors, agreements, clipped = [], [], [], []
    for name, y, z in zip(names, want, got, strict=True):
        if y.shape != z.shape:
            raise ExportVerificationError(
                f"Output `{name}` of the file must have the shape that Keras gives, {y.shape}. "
                f"Received: shape={z.shape}"
            )
        y, z = y.astype(np.float64), z.astype(np.float64)
        diff = np.abs(z - y)
        diffs.append(diff.ravel())
        if not np.all(np.isfinite(diff)):
            errors.append(float("inf"))
        elif measure == "max":
            errors.append(float(diff.max() / max(1.0, np.abs(y).max())))
        else:
            scale = float(np.sqrt(np.mean(y**2)))
            errors.append(float(np.sqrt(np.mean(diff**2))) / (scale or 1.0))
        margin = _WIDER * (z.max() - z.min())
        clipped.append(float(np.mean((y > z.max() + margin) | (y < z.min() - margin))))
        if y.ndim == 2 and y.shape[1] > 1:
            agreements.append(float(np.mean(y.argmax(1) == z.argmax(1))))
    worst = int(np.argmax(errors))
    joined = np.concatenate(diffs)
    return Comparison(
        max_abs_diff=float(joined.max()),
        mean_abs_diff=float(joined.mean()),
        argmax_agreement=min(agreements) if agreements else None,
        error=errors[worst],
        worst_output=names[worst],
        clipped=max(clipped),
    )
