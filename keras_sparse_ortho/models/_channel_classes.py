"""Channels with numbers, in classes that go together."""

import numpy as np


class ChannelClasses:
    """A forest over the numbers of channels (union-find); a class is a tree."""

    def __init__(self) -> None:
        self._parents: list[int] = []

    def __len__(self) -> int:
        return len(self._parents)

    def add(self, count: int) -> np.ndarray:
        """Numbers of new channels, each a class by itself."""
        start = len(self._parents)
        self._parents.extend(range(start, start + count))
        return np.arange(start, start + count)

    def join(self, columns: np.ndarray) -> None:
        """Puts the channels of each column into one class."""
        for column in columns.T:
            first = self.root(int(column[0]))
            for number in column[1:]:
                self._parents[self.root(int(number))] = first

    def root(self, number: int) -> int:
        """The number that stands for the class of a channel."""
        path = []
        while self._parents[number] != number:
            path.append(number)
            number = self._parents[number]
        for child in path:
            self._parents[child] = number
        return number

    def roots(self) -> np.ndarray:
        """The root of each channel, in the order of their numbers."""
        count = len(self)
        return np.fromiter(map(self.root, range(count)), int, count)
