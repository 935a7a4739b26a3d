"""`TargetDensity`: learnt thresholds that end at the density asked for."""

from typing import Any

import keras

from keras_sparse_ortho._checks import explains_density
from keras_sparse_ortho._optimizer_slots import zero_slots
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.callbacks._density_run import DensityRun
from keras_sparse_ortho.callbacks._step_callback import run_position
from keras_sparse_ortho.callbacks._threshold_steering import ThresholdSteering
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.parametrizations import LearntThreshold, density_gap
from keras_sparse_ortho.schedules import Schedule


class TargetDensity(DensityRun):
    """Steers all learnt thresholds of a model to a global density.

    All layers share an offset `o`: their thresholds are `t_l = g(s_l + o)`. Layers go on learning
    their relative thresholds `s_l`; the offset decides how many entries are live in all. An entry
    `w` of layer `l` dies at its critical offset `g^-1(|w|) - s_l`, so an offset between the k-th
    and the next largest critical offset of the whole model leaves exactly `k` entries live. At
    every step of the schedule the offset is set for `k = round(d(t) * size)`: no search over weight
    decay and `s_init` is needed.

    At the end of the schedule the live entries are fixed (`freeze`): `w` becomes `w_e`, the
    thresholds become 0 and dead entries get no gradient any more, so that the count stays exact
    while the rest of the run trains the live weights. What is due at the last step of a run is done
    when it ends. The logs of `fit` get `density` and `threshold`, as with `DensityLogger`.

    Args:
        final_density: Global live fraction in the end, in (0, 1].
        schedule: A schedule; its final density is replaced. Default: `Cubic` over the first 70% of
            the run, from the initial density to `final_density`.
        frequency: Steps between two updates of the offset, if there is no schedule. Default: a
            hundredth of the steps over which the density falls, but 100 at most.
        freeze: Whether to fix the live entries at the end of the schedule. If not, the offset is
            still updated every `frequency` steps, and once more when the run ends.

    Raises:
        DensityError: A density outside (0, 1].
        NotPrunableError: When training begins, if no weight has a `SoftThreshold` or
            another learnt threshold; if some are on ranks and others are not.
        WorkerError: On all processes that train one model, if their models differ before the first
            step, or their live entries after an update.
        ValueError: When training begins without a schedule on data of unknown length; or if the
            schedule would start again, because the optimizer has lost its steps.

    Warns:
        DensityWarning: When training has ended, and the weights are not at `final_density`: the run
            was shorter than the schedule, or weights of an earlier epoch were restored.
            `BestAtDensity` makes EarlyStopping and other callbacks see only epochs at that density;
            `keras_sparse_ortho.finish` brings a model there at once.

    Limits: between two updates the count drifts as the weights move. Channels die as a whole, so
    with `ChannelSoftThreshold` the count is exact to within one of them; with
    `LowRankSoftThreshold` ranks are counted instead of entries. All layers are ranked together, so
    a layer of small magnitudes can lose all its entries; a warning names it. With `g="sigmoid"`
    entries of magnitude 1 and more cannot die; a warning tells if they are too many. Every
    `frequency` steps the weights are ranked: those with a `SoftThreshold` on the device on
    accelerators, and with NumPy on CPUs, with the same result; `benchmarks/results/updates.md` has
    the times.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(34)])
    >>> model = kso.parametrize(dense, kso.parametrizations.SoftThreshold())
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((64, 64)), np.ones((64, 34)), verbose=0, batch_size=4,
    ...                     callbacks=[TargetDensity(0.125, frequency=4)])
    >>> kso.prunable_weights(model)[0].live  # 0.125 * 64 * 34
    272

    References:

    - Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity" (ICML
      2020), arXiv 2002.03231, for the thresholds
    - Zhu and Gupta, "To prune, or not to prune" (2017), arXiv 1710.01878, for the schedule
    """

    @explains_density
    def __init__(
        self,
        final_density: float,
        schedule: Schedule | None = None,
        *,
        frequency: int | None = None,
        freeze: bool = True,
    ) -> None:
        super().__init__()
        self._thresholds: list[LearntThreshold] = []
        self._steering = ThresholdSteering(final_density, schedule, frequency, freeze)
        self.final_density = self._steering.final_density
        self.schedule = self._steering.schedule
        self.frequency = self._steering.frequency
        self.freeze = freeze

    def prepare(self) -> None:
        """Refuses a model without learnt thresholds."""
        parametrizations = [weight.parametrization for weight in prunable_weights(self._watched)]
        thresholds = [p for p in parametrizations if isinstance(p, LearntThreshold)]
        if not thresholds:
            raise NotPrunableError(
                "TargetDensity needs weights with SoftThreshold, see keras_sparse_ortho.parametrize"
                f". Received: model={self._watched.name!r} without any"
            )
        self._steering.take(thresholds)
        self._thresholds = thresholds
        super().prepare()

    def on_run_begin(self, start: int, steps: int | None) -> None:
        """Resolves the schedule."""
        step = self.synced_step()
        in_steps = self.schedule is not None and self.schedule.is_resolved
        if not run_position(step, start, in_steps) and (found := self._begun()):
            raise self.restart_error(step, found)
        self._steering.resolve(steps, start)
        for threshold in self._thresholds:
            threshold.aim(self.final_density, self.freeze and self._steering.end_step is not None)

    def _begun(self) -> str | None:
        """What shows that a run to a density was interrupted, if it was."""
        gap = density_gap(self._thresholds)
        steered = any(to_numpy(threshold.offset).item() for threshold in self._thresholds)
        if gap is None or not steered:
            return None
        return f"and thresholds that were steered to {gap}"

    def on_step(self, step: int, executed: int) -> None:
        """Updates the offset if that is due, and fixes the live entries at the schedule's end."""
        if self._steering.is_due(step, executed):
            self._steer(step)

    def finish_run(self, step: int) -> None:
        """Does what is due at the last step."""
        if self._steering.is_due_at_end(step, self._watched.steps_per_execution):
            self._steer(step)

    def parametrizations(self) -> list[LearntThreshold]:
        """All thresholds."""
        return self._thresholds

    def state(self) -> list[Any]:
        """The offset of every threshold, and whether it is frozen."""
        offsets = [to_numpy(t.offset).item() for t in self._thresholds]
        return [*offsets, *(threshold.frozen for threshold in self._thresholds)]

    def end_step(self) -> int | None:
        """The end of the schedule."""
        return self._steering.end_step

    def _steer(self, step: int) -> None:
        def steer() -> None:
            for threshold, live in self._steering.steer(step):
                dead = keras.ops.logical_not(live)
                zero_slots(self._watched.optimizer, threshold.steered, dead)

        self.change_masks(step, steer)

    def settings(self) -> dict[str, Any]:
        """Density, frequency, and whether the live entries are fixed in the end."""
        names = ("final_density", "frequency", "freeze")
        return {name: getattr(self, name) for name in names}
