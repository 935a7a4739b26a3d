"""In which storage the weights of a model are held."""

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.parametrizations import CompactMask, FixedMask, Parametrization

STORAGES = {"masked": FixedMask, "compact": CompactMask, "auto": CompactMask}


def mask_class(storage: str) -> type[FixedMask]:
    """The parametrization that holds a mask in a storage; of `"auto"` where there are no blocks.

    Raises:
        ValueError: A storage that is not known.
    """
    if storage not in STORAGES:
        raise ValueError(f"`storage` must be one of {sorted(STORAGES)}. Received: {storage=}")
    return STORAGES[storage]


def in_storage(parametrization: Parametrization, storage: str) -> Parametrization:
    """The parametrization, or with `"compact"` that of the same mask in compact storage.

    Raises:
        NotPrunableError: Compact storage for a parametrization that needs the dense raw weight.
    """
    kind = mask_class(storage)
    if storage == "auto":
        raise ValueError(
            '`storage` of a parametrization is "masked" or "compact"; live blocks are layers of '
            "their own, see keras_sparse_ortho.to_blocks. Received: storage='auto'"
        )
    if not kind.compact or parametrization.compact:
        return parametrization
    if not isinstance(parametrization, FixedMask):
        raise NotPrunableError(
            "Compact storage is for masks that are fixed: other parametrizations need the dense "
            f"raw weight. Received: storage={storage!r}, {type(parametrization).__name__}"
        )
    return parametrization.of_class(kind)
