"""Structured OBS: channels go one after the other, and the kernels that read them make up for it.

For one reader let `W` be its kernel, `H = X^T X + 0.01 mean(diag X^T X) I` for its inputs `X`, and
`V` the kernel of least error without the channels that are gone. If channel `c`, with the rows `Q`
of the kernel, goes as well, the squared error of the outputs rises by

    tr V_Q^T ((H^-1)_QQ)^-1 V_Q,    and    V' = V - (H^-1)_:Q ((H^-1)_QQ)^-1 V_Q.

`H^-1` then loses these rows and columns by the same step. Errors of several readers are added,
each relative to `tr W^T H W`. So one pass has the kernels of every width.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from keras_sparse_ortho.calibration._solve import damped

Array = np.ndarray

_SHARE = 32  # at most one of so many channels goes between two updates of whole matrices
_CANDIDATES = 4  # for each channel that goes then


@dataclasses.dataclass
class Reader:
    """A kernel that reads the channels of a group, refitted to the ones that remain.

    Attributes:
        kernel: array `(k, outputs)`. The refitted kernel, for the inputs that remain.
        inverse: array `(k, k)`. The inverse of the Hessian of these inputs.
        rows: int array `(channels, r)`. Places in `kernel` of the rows of each channel.
        scale: float. One over the squared outputs of the kernel as trained.
    """

    kernel: Array
    inverse: Array
    rows: Array
    scale: float

    @classmethod
    def of(cls, kernel: Array, gram: Array, rows: Array) -> "Reader":
        """A reader with all channels.

        Args:
            kernel: array `(k, outputs)`.
            gram: array `(k, k)`. `X^T X` of its inputs.
            rows: int array `(channels, r)`. The rows of the kernel that read each channel.
        """
        hessian = damped(gram[None])[0]
        kernel = np.asarray(kernel, np.float64)
        outputs = float(np.sum(kernel * (hessian @ kernel)))
        scale = 1.0 / outputs if outputs > 0.0 else 0.0
        return cls(kernel, np.linalg.inv(hessian), rows, scale)

    def losses(self) -> Array:
        """By how much the relative error rises with each channel, if this one goes next."""
        if self.rows.shape[1] == 1:
            rows = self.rows[:, 0]
            squares = np.sum(self.kernel[rows] ** 2, axis=1)
            return self.scale * squares / self.inverse[rows, rows]
        blocks = self.inverse[self.rows[:, :, None], self.rows[:, None, :]]
        values = self.kernel[self.rows]
        products = values * np.linalg.solve(blocks, values)
        return self.scale * np.sum(products, axis=(1, 2))

    def restricted(self, channels: Array) -> "Reader":
        """The part that decides the order in which some channels go, if no others do."""
        rows = self.rows[channels]
        places = rows.ravel()
        inverse = self.inverse[np.ix_(places, places)]
        renumbered = np.arange(places.size).reshape(rows.shape)
        return Reader(self.kernel[places], inverse, renumbered, self.scale)

    def without(self, channels: Array) -> "Reader":
        """The reader refitted to the other channels."""
        gone = self.rows[channels].ravel()
        stays = np.ones(len(self.kernel), bool)
        stays[gone] = False
        between = self.inverse[np.ix_(stays, gone)]
        block = self.inverse[np.ix_(gone, gone)]
        update = np.linalg.solve(block, between.T).T
        kernel = self.kernel[stays] - update @ self.kernel[gone]
        inverse = self.inverse[np.ix_(stays, stays)] - update @ between.T
        places = np.cumsum(stays) - 1
        rows = places[np.delete(self.rows, channels, axis=0)]
        return Reader(kernel, inverse, rows, self.scale)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A group at one width.

    Attributes:
        width: int. Channels that stay.
        gone: int array. The others, in the order in which they go.
        kernels: mapping from the names of readers to their refitted kernels, zero where rows go.
    """

    width: int
    gone: Array
    kernels: Mapping[str, Array]


def eliminate(
    kernels: Mapping[str, Array],
    grams: Mapping[str, Array],
    rows: Mapping[str, Array],
    widths: Sequence[int],
) -> Iterator[Stage]:
    """Yields a group at each width, from the widest to the narrowest, in one pass.

    The channels go greedily: next is the one whose loss is least in all readers together. Between
    two updates of whole matrices they are chosen among the best candidates, with exact updates of
    the rows of these.

    Args:
        kernels: By the name of each reader its kernel, `(k, outputs)`.
        grams: `X^T X` of its inputs, `(k, k)`.
        rows: The rows of its kernel that read each channel, `(channels, r)`.
        widths: ints below the number of channels, at least 1.
    """
    readers = {name: Reader.of(kernels[name], grams[name], rows[name]) for name in rows}
    count = len(next(iter(rows.values())))
    channels = np.arange(count)
    gone = np.zeros(0, int)
    for width in sorted(widths, reverse=True):
        while len(channels) > width:
            step = min(max(len(channels) // _SHARE, 1), len(channels) - width)
            chosen = _next_channels([*readers.values()], step)
            readers = {name: reader.without(chosen) for name, reader in readers.items()}
            gone = np.concatenate([gone, channels[chosen]])
            channels = np.delete(channels, chosen)
        refitted = {}
        for name, reader in readers.items():
            stays = np.ones(len(kernels[name]), bool)
            stays[rows[name][gone].ravel()] = False
            refitted[name] = np.zeros(kernels[name].shape)
            refitted[name][stays] = reader.kernel
        yield Stage(width, gone, refitted)


def _next_channels(readers: Sequence[Reader], count: int) -> Array:
    """The channels that go next, in order; places in the readers' `rows`."""
    losses = sum(reader.losses() for reader in readers)
    order = np.argsort(losses, kind="stable")
    if count == 1:
        return order[:1]
    candidates = np.sort(order[: _CANDIDATES * count])
    parts = [reader.restricted(candidates) for reader in readers]
    chosen = []
    for _ in range(count):
        losses = sum(part.losses() for part in parts)
        best = int(np.argmin(losses))
        chosen.append(candidates[best])
        candidates = np.delete(candidates, best)
        parts = [part.without(np.array([best])) for part in parts]
    return np.array(chosen)


def refitted_without(kernel: Array, gram: Array, gone: Array) -> Array:
    """The kernel of least error whose rows `gone` are zero: `argmin tr (V - W)^T H (V - W)`."""
    hessian = damped(gram[None])[0]
    stays = np.ones(len(kernel), bool)
    stays[gone] = False
    target = hessian[stays] @ np.asarray(kernel, np.float64)
    refitted = np.zeros(kernel.shape)
    refitted[stays] = np.linalg.solve(hessian[np.ix_(stays, stays)], target)
    return refitted
