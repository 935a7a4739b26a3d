"""How far the outputs of the file are from those of Keras."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The disagreement of two lists of outputs, over all outputs and rows.

    `error` is in the measure asked for, the largest over the outputs, and `worst_output` is
    where it was found.
    """

    max_abs_diff: float
    mean_abs_diff: float
    argmax_agreement: float | None
    error: float
    worst_output: str


def compare(
    names: list[str], want: list[np.ndarray], got: list[np.ndarray], measure: str
) -> Comparison:
    """Compare Keras' outputs with those of the file.

    With d the difference of one output y, the measure `"max"` is max|d| / max(1, max|y|), and
    `"rms"` is sqrt(mean d^2) / sqrt(mean y^2). Rounding to int8 now and then clips a single
    value by much, so only the second is steady there; a wrong file has 1 or more in it.
    A value that is not finite makes the error infinite.
    """
    diffs, errors, agreements = [], [], []
    for name, y, z in zip(names, want, got, strict=True):
        if y.shape != z.shape:
            raise ValueError(
                f"Output `{name}` of the file must have the shape that Keras gives, {y.shape}. "
                f"Received: shape={z.shape}"
            )
        y, z = y.astype(np.float64), z.astype(np.float64)
        diff = np.abs(z - y)
        diffs.append(diff.ravel())
        errors.append(_error(y, diff, measure))
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
    )


def _error(y: np.ndarray, diff: np.ndarray, measure: str) -> float:
    if not np.all(np.isfinite(diff)):
        return float("inf")
    if measure == "max":
        return float(diff.max() / max(1.0, np.abs(y).max()))
    scale = float(np.sqrt(np.mean(y**2)))
    return float(np.sqrt(np.mean(diff**2))) / (scale or 1.0)
