"""Channels with numbers, in classes that go together."""

import numpy as np


class ChannelClasses:
    """A forest over the numbers of channels (union-find); a class is a tree."""

    def __init__(self) -> None:
        self._parents: list[int] = []

    def add(self, count: int) -> np.ndarray:
        """Numbers of new channels, each a class by itself."""
        start = len(self._parents)
        numbers = np.arange(start, start + count)
        self._parents += numbers.tolist()
        return numbers

    def join(self, columns: np.ndarray) -> None:
        """Puts the channels of each column into one class."""
        for column in columns.T:
            first = self.root(int(column[0]))
            for number in column[1:]:
                self._parents[self.root(int(number))] = first

    def root(self, number: int) -> int:
        """The number that stands for the class of a channel."""
        parent = self._parents[number]
        while parent != number:
            self._parents[number] = self._parents[parent]
            number = parent
            parent = self._parents[number]
        return number

    def roots(self) -> np.ndarray:
        """The root of each channel, in the order of their numbers."""
        roots = [self.root(number) for number in self._parents]
        return np.array(roots, int)
