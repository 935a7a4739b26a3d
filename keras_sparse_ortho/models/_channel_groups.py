"""`channel_groups`: which channels of a model can be removed together, and who reads them."""

import collections
import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho.kernels import storages_of, walk
from keras_sparse_ortho.models._channel_classes import ChannelClasses
from keras_sparse_ortho.models._channel_graph import (
    GIVEN,
    ChannelGraph,
    RuledCall,
    check_channels_known,
)
from keras_sparse_ortho.models._prunable_weights import prunable_weights
from keras_sparse_ortho.models._strip import strip


@dataclasses.dataclass(frozen=True)
class ChannelGroup:
    """Channels of which any can be removed, in all layers that make, pass on or read them.

    Args:
        name: str. The makers, joined by "+"; for the heads of an attention `"<layer>/heads"`, for
            their widths `"<layer>/values"`. Further groups of the same makers, whose readers
            differ, end in `"#2"` and so on.
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


@dataclasses.dataclass(frozen=True)
class Staying:
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

    def __init__(
        self,
        groups: Sequence[ChannelGroup],
        stays: Mapping[str, Staying],
    ) -> None:
        self._groups = tuple(groups)
        self.stays = dict(stays)

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            names = [group.name for group in self._groups]
            if index not in names:
                raise KeyError(
                    f"There is no such group; choose one of {names}. Received: {index}"
                )
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
            lines.append(
                _table_line(
                    group.name, str(group.width), str(group.unit), readers
                )
            )
        return "\n".join([*lines, *self.lines_of_stays()])

    def lines_of_stays(self, *, of_layers: bool = False) -> list[str]:
        """The channels that stay, with the layer and the reason, as lines of text.

        Args:
            of_layers: bool. Whether to leave out inputs and outputs of the model, which always
                stay.
        """
        lines = []
        for holder, staying in self.stays.items():
            if of_layers and staying.reason in (RETURNED, GIVEN):
                continue
            text = f"{staying.count} stay in {holder}: {staying.reason}"
            lines += textwrap.wrap(text, _WIDTH, subsequent_indent="  ")
        return lines


_WIDTH = 80  # of a terminal
RETURNED = "the model returns them"


def _table_line(
    name: str,
    width: str,
    unit: str,
    readers: str,
) -> str:
    return f"{_shortened(name, 28):28} {width:>5} {unit:>4}  {_shortened(readers, _WIDTH - 40)}"


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


@other_keywords
def channel_groups(
    model: keras.Model,
    *,
    exact: bool = True,
) -> ChannelGroups:
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
    counted here. The `rows` of a SeparableConv are those of its pointwise kernel. The inputs of a
    transposed convolution have no rows, so they stay. JAX has one width for queries and values of
    attention, so `"<layer>/values"` is not a group there. Heads and values are rows of one
    kernel: a row that belongs to two removed channels counts once.

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


_Holder = tuple[str, str]
"""A layer that holds channels, and the reason."""
_Rows = dict[str, list[int]]
"""The rows that read the channels of a class, by the path of the kernel."""
_Kind = tuple[tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]]


class _Reading(NamedTuple):
    """A kernel that reads channels: its path, and the rows of each channel."""

    path: str
    channels: np.ndarray
    rows: np.ndarray


class _Tracing:
    """Follows channels through a model; channels that go together get into one class.

    Each channel of each tensor that a layer makes has a number. `holders` says which of them cannot
    be removed. It is the `Tracer` of the rules.
    """

    def __init__(
        self,
        model: Any,
        exact: bool,
    ) -> None:
        self.paths = {
            id(weight.variable): weight.path
            for weight in prunable_weights(model)
        }
        self.classes = ChannelClasses()
        self.holders: dict[int, _Holder] = {}
        self.makers: dict[int, str] = {}
        self.readings: list[_Reading] = []
        self.numbers: dict[int, np.ndarray] = {}  # by tensor
        self.graph = ChannelGraph(model, exact)
        for call in self.graph.calls:
            self._trace(call)
        self._hold_outputs(model)

    def make(
        self,
        name: str,
        count: int,
    ) -> np.ndarray:
        numbers = self.classes.add(count)
        self.makers.update(dict.fromkeys(numbers.tolist(), name))
        return numbers

    def join(self, columns: np.ndarray) -> None:
        self.classes.join(columns)

    def read(
        self,
        variable: Any,
        channels: np.ndarray,
        rows: np.ndarray,
    ) -> None:
        self.readings.append(_Reading(self.paths[id(variable)], channels, rows))

    def hold(
        self,
        channels: np.ndarray,
        layer: Any,
        reason: str,
    ) -> None:
        holder = f"{layer.name} ({type(layer).__name__})"
        for number in channels:
            self.holders.setdefault(int(number), (holder, reason))

    def _trace(self, call: RuledCall) -> None:
        read = call.of_inputs(self.numbers)
        if call.rule is not None:
            outputs = call.rule.trace(self, read.astype(int))
            self.numbers.update(self.graph.split(call.outputs, outputs))
            return
        self.hold(read, call.layer, call.reason)
        for key in call.outputs:
            numbers = self.make("", self.graph.sizes[key])
            self.hold(numbers, call.layer, call.reason)
            self.numbers[key] = numbers

    def _hold_outputs(self, model: Any) -> None:
        ends = {id(tensor) for tensor in model.outputs}
        for call in self.graph.calls:
            for key in call.outputs:
                if key in ends:
                    self.hold(self.numbers[key], call.layer, RETURNED)

    def groups(self) -> ChannelGroups:
        """Classes of the same makers and readers as groups, in the order of their makers."""
        holders = {}
        for number, holder in self.holders.items():
            holders[self.classes.root(number)] = holder
        rows = self._rows_of_classes()
        stays: collections.Counter[_Holder] = collections.Counter()
        alike: dict[_Kind, list[_Rows]] = collections.defaultdict(list)
        for root, makers in self._makers_of_classes().items():
            if root in holders:
                stays[holders[root]] += sum(makers.values())
            elif root in rows:
                alike[_kind(makers, rows[root])].append(rows[root])
        groups = []
        for (makers_of_kind, _), classes in alike.items():
            if len(classes) > 1:  # one channel must stay
                groups.append(_group(dict(makers_of_kind), classes))
        return ChannelGroups(
            _with_names_of_their_own(groups), _by_holder(stays)
        )

    def _makers_of_classes(self) -> dict[int, collections.Counter[str]]:
        """How many channels of a class each layer makes, by the root of the class."""
        makers: dict[int, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        for number, name in self.makers.items():
            if name:
                makers[self.classes.root(number)][name] += 1
        return makers

    def _rows_of_classes(self) -> dict[int, _Rows]:
        """The rows of each reading kernel, by the root of the class."""
        rows: dict[int, _Rows] = collections.defaultdict(dict)
        for reading in self.readings:
            for number, of_channel in zip(
                reading.channels, reading.rows, strict=True
            ):
                of_class = rows[self.classes.root(int(number))]
                of_class.setdefault(reading.path, []).extend(of_channel)
        return rows


def _kind(makers: collections.Counter[str], rows: _Rows) -> _Kind:
    """How many channels of a class each layer makes, and how many rows each kernel has for it."""
    counts = [(path, len(rows[path])) for path in sorted(rows)]
    return tuple(makers.items()), tuple(counts)


def _group(makers: dict[str, int], classes: Sequence[_Rows]) -> ChannelGroup:
    """A group of classes, in each of which layers make so many channels."""
    rows = {}
    for path in sorted(classes[0]):
        rows[path] = np.array([of_class[path] for of_class in classes])
    layers = [name.partition("/")[0] for name in makers]
    unit = max(makers.values())
    return ChannelGroup(
        name="+".join(makers),
        width=unit * len(classes),
        makers=tuple(dict.fromkeys(layers)),
        rows=rows,
        unit=unit,
    )


def _with_names_of_their_own(
    groups: Sequence[ChannelGroup],
) -> list[ChannelGroup]:
    """Numbers groups of the same makers: of a layer whose channels have other readers by parts."""
    times: collections.Counter[str] = collections.Counter()
    numbered = []
    for group in groups:
        times[group.name] += 1
        number = times[group.name]
        name = group.name if number == 1 else f"{group.name}#{number}"
        numbered.append(dataclasses.replace(group, name=name))
    return numbered


def _by_holder(
    stays: Mapping[tuple[str, str], int],
) -> dict[str, Staying]:
    """How many channels each layer holds; of several reasons the first."""
    by_holder: dict[str, Staying] = {}
    for (holder, reason), count in stays.items():
        before = by_holder.get(holder, Staying(0, reason))
        by_holder[holder] = Staying(before.count + count, before.reason)
    return by_holder
