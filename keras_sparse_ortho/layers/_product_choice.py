"""Which programs compute products with live blocks: gathers, or one kernel for a GPU each."""

import importlib
import importlib.util

import keras

from keras_sparse_ortho import _backend
from keras_sparse_ortho._checks import other_keywords

GATHERED = "gathered"
FUSED = "fused"
INTERPRETED = "interpreted"
_CHOICES = (GATHERED, FUSED, INTERPRETED)

_products = GATHERED


@other_keywords
def block_products() -> str:
    """Returns how products with live blocks are computed: see `set_block_products`.

    Examples:
        >>> block_products()
        'gathered'
    """
    return _products


@other_keywords
def set_block_products(products: str) -> None:
    """Chooses how products with live blocks are computed, in this process.

    For the live blocks `W` of output block `j`, and of input block `i`,

        Y[j] = sum_l X[inputs_of[j, l]] W[j, l],    dX[i] = sum_s dY[j(s)] W[s]^T,
        dW[j, l] = X[inputs_of[j, l]]^T dY[j]

    are computed from copies of the blocks of `X` and `dY` that they gather, or each in one kernel
    that reads these blocks where they are. Both sum in float32 and agree up to rounding. Layers for
    vectors, tokens and gates take the kernels; convolutions, float64 and empty batches go on with
    gathers. Compile models after the choice: programs that are compiled already stay as they are.

    The kernels are equal to gathers on a CPU, by an interpreter. No GPU has run or timed them yet.

    Args:
        products: str. `"gathered"`: in operations of the backend, on every device. This is the
            default. `"fused"`: by kernels for a GPU, of Pallas on JAX and of Triton on torch.
            `"interpreted"`: by the same kernels, step by step on any device, to test them; slow.

    Raises:
        ValueError: Another name; kernels on TensorFlow, or `"fused"` without a GPU.
        ImportError: No Triton on torch, or a JAX without Pallas for Triton.

    Examples:
        >>> set_block_products("gathered")
    """
    global _products
    if products not in _CHOICES:
        names = ", ".join(repr(name) for name in _CHOICES)
        raise ValueError(
            f"Products with live blocks are one of {names}. Received: {products!r}"
        )
    if products != GATHERED:
        _check_kernels(products)
    _products = products


def _check_kernels(products: str) -> None:
    """Refuses kernels where the backend, its packages or the device lack what they need."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        raise ValueError(
            "TensorFlow has no kernels for products with live blocks. Set KERAS_BACKEND to jax or "
            f"torch, or take {GATHERED!r}. Received: products={products!r} on TensorFlow"
        )
    if backend == "torch" and importlib.util.find_spec("triton") is None:
        raise ImportError(
            "Kernels for products with live blocks need Triton on torch: pip install triton. "
            f"Received: products={products!r} without the package triton"
        )
    if backend == "jax" and not _has_pallas_for_triton():
        raise ImportError(
            "Kernels for products with live blocks need `load` and `store` of "
            "jax.experimental.pallas.triton: install a newer JAX, such as 0.10. "
            f"Received: products={products!r} with an older JAX"
        )
    kind = _backend.device_kind()
    if products == FUSED and kind != "gpu":
        raise ValueError(
            f"Fused products with live blocks need a GPU. Take {INTERPRETED!r} to test them here, "
            f"or {GATHERED!r} to compute. Received: products={products!r} on a {kind.upper()}"
        )


def _has_pallas_for_triton() -> bool:
    """Whether JAX has the functions that the kernels call."""
    try:
        triton = importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return False
    return hasattr(triton, "load") and hasattr(triton, "store")
