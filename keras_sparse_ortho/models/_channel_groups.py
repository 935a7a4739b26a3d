"""`channel_groups`: which channels of a model can be removed together, and who reads them."""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho.kernels import storages_of, walk
from keras_sparse_ortho.models._prunable_weights import prunable_weights
from keras_sparse_ortho.models._remove_channels import (
    Linear,
    Tied,
    check_channels_known,
    graph_channels,
)
from keras_sparse_ortho.models._strip import strip


@dataclasses.dataclass(frozen=True)
class ChannelGroup:
    """Channels of which any can be removed, in all layers that make, pass on or read them.

    Args:
        name: str. The makers, joined by "+"; of the heads of an attention `"<layer>/heads"`.
        width: int. Number of channels.
        makers: tuple of str. Names of the layers that make the channels.
        rows: mapping of str to array. By the path of each kernel that reads the channels (as in
            `prunable_weights`): int array `(width // unit, rows of one step)`. They count rows of
            the kernel as a matrix `(rows, outputs)`, where `outputs` are all its output axes:
            the last axis of Dense and Conv, the last two of a query kernel of attention.
        unit: int. Number of channels that are removed at a time.
    """

    name: str
    width: int
    makers: tuple[str, ...]
    rows: Mapping[str, np.ndarray]
    unit: int = 1

    @property
    def steps(self) -> int:
        """How many sets of `unit` channels there are."""
        return self.width // self.unit


class Staying(NamedTuple):
    """Channels that cannot be removed, and why."""

    count: int
    reason: str


class ChannelGroups(Sequence[ChannelGroup]):
    """The groups of a model, in the order of their layers; `print` shows a table.

    Args:
        groups: sequence of ChannelGroup.
        stays: mapping of str to Staying. By the layer that holds them, as `"softmax (Softmax)"`:
            how many channels stay, and why.
    """

    def __init__(self, groups: Sequence[ChannelGroup], stays: Mapping[str, Staying]) -> None:
        self._groups = tuple(groups)
        self.stays = dict(stays)

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            names = [group.name for group in self._groups]
            if index not in names:
                raise KeyError(f"There is no such group; choose one of {names}. Received: {index}")
            index = names.index(index)
        return self._groups[index]

    def __iter__(self) -> Iterator[ChannelGroup]:
        return iter(self._groups)

    def __repr__(self) -> str:
        widths = {group.name: group.width for group in self._groups}
        return f"ChannelGroups({widths}, stays={self.stays})"

    def __str__(self) -> str:
        lines = [_table_line("group", "width", "unit", "read by")]
        for group in self._groups:
            readers = ", ".join(group.rows)
            lines.append(_table_line(group.name, str(group.width), str(group.unit), readers))
        lines += [
            f"{staying.count} stay in {holder}: {staying.reason}"
            for holder, staying in self.stays.items()
        ]
        return "\n".join(lines)


def _table_line(name: str, width: str, unit: str, readers: str) -> str:
    return f"{_shortened(name, 28):28} {width:>5} {unit:>4}  {_shortened(readers, 40)}".rstrip()


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


@other_keywords
def channel_groups(model: keras.Model, *, exact: bool = True) -> ChannelGroups:
    """Lists the channels of a model that can be removed, in groups that go together.

    Channels are one group if the same layers make, pass on and read them. A channel `c` of a group
    is read by the rows `R_c` of each reading kernel `K`:

        y = ... + sum_{r in R_c} x_r K[r, :]

    If these rows are 0 in all readers, `remove_channels` removes the channel in all makers, in all
    layers between, and in all readers. So a group needs one mask, whatever the number of readers.

    Args:
        model: Model, built, functional or Sequential, wrapped or plain.
        exact: bool. `False`: LayerNormalization over channels passes them on, as it does for
            `remove_channels(model, exact=False)`.

    Returns a sequence of groups. Its `stays` says which channels cannot be removed, and why.

    Raises NotPrunableError for a model that is subclassed, has its own `call`, or is not built.

    Limits: the constants of channels behind zero padding, which may keep one channel more, are not
    counted here. The `rows` of a SeparableConv are those of its pointwise kernel.

    Examples:
        >>> import keras
        >>> layers = [keras.layers.Dense(6, "relu", name="up"), keras.layers.Dense(2, name="down")]
        >>> groups = channel_groups(keras.Sequential([keras.Input((8,)), *layers]))
        >>> [(group.name, group.width, list(group.rows)) for group in groups]
        [('up', 6, ['down/kernel'])]

    Reference: Fang et al., "DepGraph" (CVPR 2023), arXiv 2301.12900, for groups of dependent
    channels.
    """
    check_channels_known(model)
    if any(storages_of(layer) for layer, _ in walk(model, "")):
        model = strip(model)
    return _Tracing(model, exact).groups()


class _Reading(NamedTuple):
    """A kernel that reads channels: its path, and the rows of each input, `(inputs, rows)`."""

    path: str
    inputs: np.ndarray  # classes
    rows: np.ndarray


class _Tracing:
    """Follows channels through a model; channels that go together get into one class.

    Each channel of each tensor that a layer makes has a number. `parents` is a forest over these
    numbers (union-find), `reasons` says which numbers cannot be removed.
    """

    def __init__(self, model: Any, exact: bool) -> None:
        self.calls, self.sizes = graph_channels(model, exact)
        self.paths = {id(weight.variable): weight.path for weight in prunable_weights(model)}
        self.parents: list[int] = []
        self.reasons: dict[int, tuple[str, str]] = {}
        self.makers: dict[int, str] = {}
        self.readings: list[_Reading] = []
        self.heads: list[ChannelGroup] = []
        self.numbers: dict[int, np.ndarray] = {}  # by tensor
        for call in self.calls:
            self._trace(call)
        for tensor in model.outputs:
            self._hold(self.numbers[id(tensor)], "outputs", "the model returns them")

    def _new(self, count: int) -> np.ndarray:
        start = len(self.parents)
        self.parents.extend(range(start, start + count))
        return np.arange(start, start + count)

    def _root(self, number: int) -> int:
        while self.parents[number] != number:
            number = self.parents[number]
        return number

    def _join(self, numbers: np.ndarray) -> None:
        """Puts the numbers of each column into one class."""
        for column in numbers.T:
            first = self._root(int(column[0]))
            for number in column[1:]:
                self.parents[self._root(int(number))] = first

    def _hold(self, numbers: np.ndarray, holder: str, reason: str) -> None:
        for number in numbers:
            self.reasons.setdefault(int(number), (holder, reason))

    def _trace(self, call: Any) -> None:
        inputs = [self.numbers.get(key) for key in call.inputs]
        read = np.concatenate([x for x in inputs if x is not None]) if inputs else np.zeros(0, int)
        rule, layer = call.rule, call.layer
        if isinstance(rule, Tied):
            columns = read[rule.sources]
            self._join(columns)
            self.numbers[call.outputs[0]] = columns[0]
        elif isinstance(rule, Linear):
            self._read_by(rule, layer, read)
            made = self._new(self.sizes[call.outputs[0]])
            self.makers.update(dict.fromkeys(map(int, made), layer.name))
            self.numbers[call.outputs[0]] = made
        else:
            holder = f"{layer.name} ({type(layer).__name__})"
            reason = "the model is given them" if not call.inputs else "it has no rule"
            self._hold(read, holder, reason)
            for key in call.outputs:
                self.numbers[key] = self._new(self.sizes[key])
                self._hold(self.numbers[key], holder, reason)
            if type(layer) is keras.layers.MultiHeadAttention:
                self._trace_heads(layer)

    def _read_by(self, rule: Linear, layer: Any, read: np.ndarray) -> None:
        kernel = layer.kernel if rule.depthwise is None else layer.pointwise_kernel
        taps = math.prod(kernel.shape[:-2])
        multiplier = kernel.shape[-2] // len(read)
        columns = np.arange(kernel.shape[-2]).reshape(len(read), 1, multiplier)
        rows = columns + kernel.shape[-2] * np.arange(taps)[:, None]
        self.readings.append(_Reading(self.paths[id(kernel)], read, rows.reshape(len(read), -1)))

    def _trace_heads(self, layer: Any) -> None:
        kernel = layer.output_dense.kernel
        rows = np.arange(math.prod(kernel.shape[:-1])).reshape(kernel.shape[0], -1)
        path = self.paths[id(kernel)]
        group = ChannelGroup(f"{layer.name}/heads", len(rows), (layer.name,), {path: rows})
        self.heads.append(group)

    def groups(self) -> ChannelGroups:
        """Classes of the same makers and readers as groups, in the order of their makers."""
        held = {self._root(number): why for number, why in self.reasons.items()}
        makers: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for number, name in self.makers.items():
            makers[self._root(number)][name] += 1
        rows: dict[int, dict[str, list[np.ndarray]]] = collections.defaultdict(dict)
        for reading in self.readings:
            for number, own_rows in zip(reading.inputs, reading.rows, strict=True):
                of_class = rows[self._root(int(number))]
                of_class.setdefault(reading.path, []).extend(own_rows)
        alike: dict[Any, list[int]] = collections.defaultdict(list)
        stays: dict[tuple[str, str], int] = collections.Counter()
        for root, names in makers.items():
            if root in held:
                stays[held[root]] += sum(names.values())
            elif root in rows:
                counts = tuple((path, len(read)) for path, read in sorted(rows[root].items()))
                alike[tuple(sorted(names.items())), counts].append(root)
        groups = []
        for (names, counts), roots in alike.items():
            by_path = {path: np.array([rows[root][path] for root in roots]) for path, _ in counts}
            unit = max(count for _, count in names)
            layers = tuple(name for name, _ in names)
            group = ChannelGroup("+".join(layers), unit * len(roots), layers, by_path, unit)
            groups.append(group)
        found = [group for group in (*groups, *self.heads) if group.steps > 1]
        return ChannelGroups(
            found, {holder: Staying(n, reason) for (holder, reason), n in stays.items()}
        )
