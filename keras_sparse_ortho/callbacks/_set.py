"""`SET`: sparse evolutionary training."""

from collections.abc import Sequence
from typing import Any

from keras_sparse_ortho.callbacks._block_moves import places_shape
from keras_sparse_ortho.callbacks._device_moves import random_order, random_order_on_device
from keras_sparse_ortho.callbacks._dynamic_sparse_training import DynamicSparseTraining
from keras_sparse_ortho.callbacks._mask_moves import moves_on_device
from keras_sparse_ortho.kernels import PrunableWeight, derived_seed


class SET(DynamicSparseTraining):
    """Sparse evolutionary training: small weights are dropped, and as many grow at random.

    Before step `t = frequency, 2 frequency, ... < T_end` each layer with `n` live entries drops

        floor(f(t) n),  f(t) = alpha / 2 (1 + cos(pi t / T_end))

    of them, those of smallest magnitude, and as many of the entries that are then dead become
    live, drawn uniformly. Density stays what it is to the entry, in each layer. As in the RigL
    paper's SET, an entry that was just dropped may be drawn; it is then as if it had stayed.

    Masks that `ExactOrthogonal` drew with a structure keep it. Whole blocks move, by the sums over
    their entries; with `ConstantFan` a line grows as many entries as it has lost (as in SRigL),
    with `NByM` entries grow where a group has room. Live blocks (`layers.BlockSparseDense` and its
    kin) move as those of `Block(r, c, regular=True)`: every line of blocks keeps its fan.

    Entries that became live start from zero. Raw weights of dropped and grown entries are set to
    zero, and so are their moments and averages in the optimizer. Masks are variables: nothing is
    recompiled. Random choices follow from `seed`, the step and the path of the weight, so that a
    run killed and resumed from a checkpoint equals one that was not. `moved` in the logs of an
    epoch is how many entries moved in it, as a fraction of the live ones.

    Args:
        frequency: Optimizer steps between updates.
        fraction: `alpha`, the part of the live weights to drop at first, in (0, 1].
        end_step: `T_end`, the optimizer step from which on masks stay as they are. Default: three
            quarters of `epochs * steps` of this `fit`. Give it for runs in several calls of `fit`.
        include: Weights to train so: paths, regular expressions or a predicate. Default: all with
            a `FixedMask` or live blocks that are trainable.
        exclude: Which of these to leave as they are.
        seed: An integer.

    Raises:
        NotPrunableError: When training begins, if a weight has another parametrization than
            `FixedMask`, or none has one or live blocks.
        WorkerError: On all processes that train one model, if they do not have the same model and
            arguments before the first step, or the same masks after an update.
        ValueError: An argument out of range; no `end_step` where an epoch's length is not known.

    Limits: on accelerators the entries of masks are ranked where they are; compact storage, blocks
    and masks with a structure are ranked on the host, to which an update copies the kernels. With
    `steps_per_execution` of `k > 1` an update waits for the end of an execution, and where `k`
    does not divide an epoch it may be made twice. A step that a `LossScaleOptimizer` skips for an
    overflow is begun again with its update, which then changes nothing more.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, use_bias=False)])
    >>> model = kso.sparsify(dense, 0.25, seed=0)
    >>> model.compile("adam", "mse")
    >>> x, y = np.ones((8, 8)), np.ones((8, 8))
    >>> callback = kso.callbacks.SET(frequency=2, end_step=100)
    >>> history = model.fit(x, y, batch_size=2, verbose=0, callbacks=[callback])
    >>> kso.prunable_weights(model)[0].live
    16

    References:

    - Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse
      connectivity inspired by network science", Nature Communications 9 (2018), arXiv 1707.04780.
      (There new weights are random; here they are zero, as in the comparison of the RigL paper.)
    - Evci et al., "Rigging the lottery" (ICML 2020), arXiv 1911.11134
    - Lasby et al., "Dynamic sparse training with structured sparsity" (SRigL, ICLR 2024),
      arXiv 2305.02299, for `ConstantFan`
    """

    def growth_scores(self, weights: Sequence[PrunableWeight], step: int) -> list[Any]:
        """Random numbers, made where they are needed."""
        return [self._drawn(weight, step) for weight in weights]

    def _drawn(self, weight: PrunableWeight, step: int) -> Any:
        seed = derived_seed(self.seed, f"{step}/{weight.path}/grow")
        draw = random_order_on_device if moves_on_device(weight) else random_order
        return draw(places_shape(weight), seed)
