"""Accuracy of sparse contemporary networks: ResNet, VGG-16, MobileNetV1, a vision transformer.

    python benchmarks/contemporary.py                              # about ten hours of two cores
    python benchmarks/contemporary.py --net vit --densities 0.1
    KERAS_BACKEND=jax python benchmarks/contemporary.py --net cifar10_resnet32    # with a GPU
    python benchmarks/contemporary.py --net vit --methods blocks_8 --densities 0.0625
    python benchmarks/contemporary.py --summary                    # the table of finished runs

Settings are in `contemporary.toml`, the methods in methods.py, each at its best learning rate on a
validation split. Every run is a line of `results/contemporary.jsonl`; finished runs are not
repeated, so the script can be killed, and run in parts. The table goes to
`results/contemporary.md`. Networks on CIFAR-10 are not trained by default: 200 epochs each.
"""

from methods import command_line

NETS = ["resnet20", "resnet32", "vgg16", "mobilenet", "vit"]


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    title = "Contemporary networks"
    quick = {"net": ["vit"], "methods": ["dense", "base_erk", "eoi_auto"]}
    command_line(arguments, "contemporary", title, NETS, quick=quick)


if __name__ == "__main__":
    main()
