"""Accuracy of sparse initializations in deep networks without normalization, on Fashion-MNIST.

    python benchmarks/deep.py                              # all networks, methods and densities
    python benchmarks/deep.py --net deep_mlp --methods base_scaled eoi_auto --densities 0.125
    python benchmarks/deep.py --summary                    # the table of finished runs

Settings are in `deep.toml`, the methods in methods.py, each at its best learning rate on a
validation split (`--no-tune`: all at one). Every run is a line of `results/deep.jsonl`; finished
runs are not repeated. The table goes to `results/deep.md`.
"""

from methods import command_line


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    title = "Deep networks without normalization on Fashion-MNIST"
    quick = {"net": ["deep_mlp"], "depth": 5, "methods": ["dense", "base_erk", "eoi_auto"]}
    command_line(arguments, "deep", title, None, quick=quick)


if __name__ == "__main__":
    main()
