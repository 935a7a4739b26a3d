"""The cost of a network by its widths, as a share of the dense one's."""

from collections.abc import Mapping

from keras_sparse_ortho.calibration import Costs, WidthTable

Widths = Mapping[str, int]


class WidthShares:
    """Bytes and multiply-adds by widths, each 1 for the dense network.

    Args:
        table: WidthTable of the network.
    """

    def __init__(self, table: WidthTable) -> None:
        self._table = table
        self._dense_costs: dict[str, float] = {}

    def preferred(self, prefer: str) -> Costs:
        """The cost that a search lowers.

        Args:
            prefer: str. `"bytes"`; `"ms"`, the work; or `"both"`, the mean of these shares. Where
                the size of inputs is not known, the work is not either: it is then `"bytes"`.
        """
        try:
            self.work({})
        except ValueError:
            prefer = "bytes"
        costs = {"bytes": self.bytes, "ms": self.work, "both": self._mean}
        return costs[prefer]

    def bytes(self, widths: Widths) -> float:
        """The bytes of the weights."""
        return self._share(widths, "bytes")

    def work(self, widths: Widths) -> float:
        """The multiply-adds as runtimes do them, 16 outputs together."""
        return self._share(widths, "work")

    def _mean(self, widths: Widths) -> float:
        return 0.5 * (self.bytes(widths) + self.work(widths))

    def _share(self, widths: Widths, cost: str) -> float:
        if cost not in self._dense_costs:
            self._dense_costs[cost] = self._table.cost(cost=cost)
        return self._table.cost(widths, cost) / self._dense_costs[cost]
