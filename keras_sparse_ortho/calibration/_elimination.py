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
        hessian = _hessian(gram)
        kernel = np.asarray(kernel, np.float64)
        hessian_of_kernel = hessian @ kernel
        products = kernel * hessian_of_kernel
        squares = float(np.sum(products))
        scale = 0.0
        if squares > 0.0:
            scale = 1.0 / squares
        inverse = np.linalg.inv(hessian)
        return cls(
            kernel=kernel,
            inverse=inverse,
            rows=rows,
            scale=scale,
        )

    def losses(self) -> Array:
        """By how much the relative error rises with each channel, if this one goes next."""
        down = self.rows[:, :, None]
        across = self.rows[:, None, :]
        blocks = self.inverse[down, across]
        values = self.kernel[self.rows]
        if self.rows.shape[1] == 1:  # numbers, which take no solver
            products = values * values / blocks
        else:
            solved = np.linalg.solve(blocks, values)
            products = values * solved
        losses = np.sum(products, axis=(1, 2))
        return self.scale * losses

    def restricted(self, channels: Array) -> "Reader":
        """The rows of some channels alone: enough for their losses while no others go."""
        rows = self.rows[channels]
        places = rows.ravel()
        kernel = self.kernel[places]
        inverse = _block(self.inverse, places, places)
        renumbered = np.arange(places.size).reshape(rows.shape)
        return Reader(
            kernel=kernel,
            inverse=inverse,
            rows=renumbered,
            scale=self.scale,
        )

    def without(self, channels: Array) -> "Reader":
        """The reader refitted to the other channels."""
        gone = self.rows[channels].ravel()
        stays = _all_but(gone, len(self.kernel))
        block = _block(self.inverse, gone, gone)
        between = _block(self.inverse, gone, stays)
        solved = np.linalg.solve(block, between)
        update = solved.T
        kernel = self.kernel[stays] - update @ self.kernel[gone]
        square = _block(self.inverse, stays, stays)
        inverse = square - update @ between
        places = np.cumsum(stays) - 1
        rows = np.delete(self.rows, channels, axis=0)
        return Reader(
            kernel=kernel,
            inverse=inverse,
            rows=places[rows],
            scale=self.scale,
        )


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
    readers = {}
    for name, reader_rows in rows.items():
        kernel = kernels[name]
        gram = grams[name]
        readers[name] = Reader.of(kernel, gram, reader_rows)
        count = len(reader_rows)
    channels = np.arange(count)
    gone = np.zeros(0, int)
    descending_widths = sorted(widths, reverse=True)
    for width in descending_widths:
        while len(channels) > width:
            surplus = len(channels) - width
            step = max(len(channels) // _SHARE, 1)
            step = min(step, surplus)
            places = _next_places([*readers.values()], step)
            for name, reader in readers.items():
                readers[name] = reader.without(places)
            gone = np.concatenate([gone, channels[places]])
            channels = np.delete(channels, places)
        refitted = {}
        for name, reader in readers.items():
            gone_rows = rows[name][gone].ravel()
            shape = kernels[name].shape
            refitted[name] = _filled_up(reader.kernel, gone_rows, shape)
        yield Stage(width, gone, refitted)


def _filled_up(kernel: Array, gone: Array, shape: tuple[int, ...]) -> Array:
    """The kernel of a shape that has zeros in the rows `gone` and `kernel` in the others."""
    full_kernel = np.zeros(shape)
    stays = _all_but(gone, len(full_kernel))
    full_kernel[stays] = kernel
    return full_kernel


def _next_places(readers: Sequence[Reader], count: int) -> Array:
    """The channels that go next, in order, as places in the readers' `rows`."""
    losses = _total_losses(readers)
    order = np.argsort(losses, kind="stable")
    if count == 1:
        return order[:1]
    candidate_count = _CANDIDATES * count
    candidates = np.sort(order[:candidate_count])
    restricted = [reader.restricted(candidates) for reader in readers]
    places = []
    for _ in range(count):
        losses = _total_losses(restricted)
        index = int(np.argmin(losses))
        place = candidates[index]
        places.append(place)
        candidates = np.delete(candidates, index)
        channels = np.array([index])
        restricted = [reader.without(channels) for reader in restricted]
    return np.array(places)


def _total_losses(readers: Sequence[Reader]) -> Array:
    losses = [reader.losses() for reader in readers]
    return np.sum(losses, axis=0)


def refitted_without(kernel: Array, gram: Array, gone: Array) -> Array:
    """The kernel of least error whose rows `gone` are zero: `argmin tr (V - W)^T H (V - W)`."""
    hessian = _hessian(gram)
    stays = _all_but(gone, len(kernel))
    target = hessian[stays] @ kernel
    block = _block(hessian, stays, stays)
    refitted_rows = np.linalg.solve(block, target)
    return _filled_up(refitted_rows, gone, kernel.shape)


def _block(matrix: Array, rows: Array, columns: Array) -> Array:
    return matrix[np.ix_(rows, columns)]


def _hessian(gram: Array) -> Array:
    """`X^T X`, damped."""
    hessian: Array = damped(gram[None])[0]
    return hessian


def _all_but(gone: Array, count: int) -> Array:
    """A mask of `count` entries, false at some."""
    stays = np.ones(count, bool)
    stays[gone] = False
    return stays
