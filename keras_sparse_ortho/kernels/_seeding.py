"""Seeds derived from a seed and a path, so that kernels of equal shape do not get equal values."""

import hashlib


def derived_seed(seed: int, path: str) -> int:
    """A seed for the weight at `path` that is the same on every machine, and differs by path."""
    digest = hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1  # 31 bits: some backends take no more
