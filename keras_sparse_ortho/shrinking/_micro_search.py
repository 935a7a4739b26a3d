"""The trials of `shrink(target="micro")`: files within the flash and the arena of a device."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import keras

from keras_sparse_ortho._keras_internals import without_warnings
from keras_sparse_ortho.calibration import (
    Costs,
    WidthTable,
    restore_statistics,
)
from keras_sparse_ortho.errors import (
    BudgetError,
    ExportRouteError,
    ExportVerificationError,
    LiteRTFileError,
    NotPrunableError,
)
from keras_sparse_ortho.export import REMEDIES
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.pruning import prune
from keras_sparse_ortho.shrinking._activations import Activations
from keras_sparse_ortho.shrinking._examples import Examples
from keras_sparse_ortho.shrinking._microcontroller import (
    Microcontroller,
    MicroFigures,
)
from keras_sparse_ortho.shrinking._narrowing import (
    TRAINING_RATE,
    narrowed,
    width_table,
)
from keras_sparse_ortho.shrinking._shrink_report import Trial
from keras_sparse_ortho.shrinking._trials import (
    Terms,
    Trials,
    Widths,
    shortly,
)

_ROUTE = "int8"
_SMALL_LOSS = 0.01  # of the score, below which integers need no remedy
_FITTINGS = 8  # networks that are narrowed to find the widest one
_FITTING_SHARE = (
    0.5  # of the time, for these if one of them fits; the rest trains it
)
_NEAR_ENOUGH = 1.08  # between a cost that fits and one that does not
_BELOW = 0.95  # of the cost that the last file suggests
_STEP = 0.9  # the largest step down, where it suggests less
_LARGER = (1.6, 3.0)  # times the flash, of networks whose zeros are packed
_HIGHEST_DENSITY = 0.5  # above it, packing saves less than it costs
_LEAST_DENSITY = 0.05
_SAVED = 7 / 8  # bytes of a zero, without its bit in the mask
_ADDED = 160  # bytes of the operator and the tensors of a packed filter
_PACKINGS = 2  # densities that are tried for one network
_BEYOND = 1.1  # times the entries that the last file had too many
# Layers whose kernels `c_array` leaves dense, or that are too small to be packed.
_DENSE_LAYERS = (
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.Embedding,
    keras.layers.LSTMCell,
    keras.layers.GRUCell,
    keras.layers.SimpleRNNCell,
)
_MOST_PASSES = 20
_FEWEST_ROWS = 500  # to train on: the networks are small


class Attempt(NamedTuple):
    """A network that was tried.

    Attributes:
        trial: Its file.
        make: Makes the network again.
        widths: Those of its groups.
    """

    trial: Trial
    make: "partial[keras.Model]"
    widths: Widths


class MicroTrials(Trials):
    """Trials whose files are static int8 with int8 ends, and whose arrays are measured.

    Args:
        model: As for `Trials`, like the following three.
        examples: Examples.
        folder: Path.
        terms: Terms.
        device: Microcontroller. The limits.
    """

    ends = ("int8", "int8")

    def __init__(
        self,
        model: keras.Model,
        examples: Examples,
        folder: Path,
        terms: Terms,
        device: Microcontroller,
    ) -> None:
        super().__init__(model, examples, folder, terms)
        self.device = device

    def export(
        self,
        name: str,
        model: keras.Model,
        route: str,
        start: float,
        widths: Widths | None = None,
    ) -> Trial:
        """Exports a model, judges its file, and measures its array."""
        trial = super().export(name, model, route, start, widths)
        if trial.reason is not None:
            return trial
        path = self.file_of(trial)
        self.say(f"{name}: arena")
        try:
            figures = self.device.figures(path.read_bytes(), path.name)
        except (
            ExportRouteError,
            ExportVerificationError,
            LiteRTFileError,
        ) as error:
            trial = Trial(name, route, reason=shortly(error))
        else:
            seconds = time.monotonic() - start
            trial = dataclasses.replace(
                trial, micro=figures, bytes=figures.flash, seconds=seconds
            )
        self.made[-1] = trial
        return trial

    def fits(self, trial: Trial) -> bool:
        """Whether an array is within the flash and the arena."""
        return trial.micro is not None and self.device.reach(trial.micro) <= 1


class MicroSearch:
    """Looks for the file of least loss within the limits of a microcontroller.

    Where the dense file is too large, a bisection looks for the widest network that fits, by a cost
    of flash and activations; then larger networks are pruned to the density at which they fit
    packed. Both kinds are trained if there are rows.

    Args:
        trials: MicroTrials. Where files are made.
    """

    def __init__(self, trials: MicroTrials) -> None:
        self._trials = trials
        self._device = trials.device

    def run(self) -> None:
        """Makes the files that the time allows."""
        trials = self._trials
        dense = trials.export("dense", trials.model, _ROUTE, time.monotonic())
        if trials.seconds > 0:
            self._try_remedies(dense)
        is_enough = dense.micro is None or trials.fits(dense)
        if is_enough or trials.seconds <= 0:
            return
        assert dense.micro is not None
        costs: MicroCosts | None = None
        table = width_table(trials)
        if table is not None:
            costs = MicroCosts(trials.model, table, dense.micro, self._device)
            widest = self._widest(table, costs)
            if widest is not None:
                self._train(widest)
        if self._device.max_flash is not None:
            self._pack(dense.micro, table, costs)

    def _try_remedies(self, dense: Trial) -> None:
        """Makes the dense file better where its integers lose much, without floats.

        Smaller networks get the remedy of least loss, too.
        """
        trials = self._trials
        if dense.micro is None or dense.lost <= _SMALL_LOSS:
            return
        lowest_loss = dense.lost
        options: dict[str, Any] = {}
        for remedy in REMEDIES:
            if remedy.floats is not None:
                continue
            name = f"dense, {remedy.name}"
            if trials.is_late():
                trials.untried.append(name)
                continue
            trials.remedy = remedy.options
            trial = trials.export(name, trials.model, _ROUTE, time.monotonic())
            if trial.micro is not None and trial.lost < lowest_loss:
                lowest_loss = trial.lost
                options = remedy.options
        trials.remedy = options

    # --- widths -----------------------------------------------------------------------------------

    def _widest(self, table: WidthTable, costs: "MicroCosts") -> Attempt | None:
        """The widest network within the limits, not trained; `None` if none was found."""
        widest = None
        reaches: dict[tuple[tuple[str, int], ...], float] = {}
        fitting, too_large, scale = 0.0, math.inf, 1.0
        while len(reaches) < _FITTINGS:
            is_long = self._trials.say() > _FITTING_SHARE * self._trials.seconds
            if self._trials.is_late() or (is_long and widest is not None):
                self._trials.untried.append("other widths")
                break
            choice = costs.widths(scale)
            key = tuple(sorted(choice.items()))
            if key not in reaches:
                attempt = self._try_choice(choice, table, costs)
                if attempt.trial.micro is None:
                    break
                reaches[key] = self._device.reach(attempt.trial.micro)
                if reaches[key] <= 1.0:
                    widest = attempt
            if reaches[key] <= 1.0:
                fitting = scale
            elif choice == costs.narrowest():
                break
            else:
                too_large = scale
            if too_large <= _NEAR_ENOUGH * fitting:
                break
            scale = _next_scale(fitting, too_large, reaches[key])
        return widest

    def _try_choice(
        self, choice: Widths, table: WidthTable, costs: "MicroCosts"
    ) -> Attempt:
        name = f"narrowed to {costs.share_of_bytes(choice):.2g}"
        make = partial(narrowed, self._trials, table, choice)
        trial, _ = self._trials.make(name, make, None, _ROUTE, choice)
        return Attempt(trial, make, choice)

    def _train(self, attempt: Attempt) -> None:
        """Tries the network after training towards the dense one, if it loses."""
        trial = attempt.trial
        if trial.lost <= 0.0 or self._trials.is_late():
            return
        training = self._trials.examples.to_train(
            self._trials.seconds_to_train(),
            _MOST_PASSES,
            fewest=_FEWEST_ROWS,
            seed=self._trials.seed,
            learning_rate=TRAINING_RATE,
        )
        if training is not None:
            name = f"{trial.name}, trained"
            self._trials.make(
                name,
                attempt.make,
                training,
                _ROUTE,
                attempt.widths,
                was_tried=True,
            )

    # --- packed zeros -----------------------------------------------------------------------------

    def _pack(
        self,
        dense: MicroFigures,
        table: WidthTable | None,
        costs: "MicroCosts | None",
    ) -> None:
        """Prunes networks that are too large to the density at which they fit packed."""
        for choice, flash in self._too_large(dense, costs):
            if self._trials.is_late():
                self._trials.untried.append("packed zeros")
                return
            make: partial[keras.Model] = partial(self._same_model)
            if choice:
                assert table is not None
                make = partial(narrowed, self._trials, table, choice)
            self._pack_network(make, choice, flash, costs)

    def _too_large(
        self, dense: MicroFigures, costs: "MicroCosts | None"
    ) -> Iterator[tuple[Widths, float]]:
        """Networks of too much flash, by their widths, with the flash that they would need."""
        assert self._device.max_flash is not None
        fits_ram = not self._device.excess(dense).get("max_ram")
        for factor in _LARGER:
            flash = factor * self._device.max_flash
            if flash >= dense.flash and fits_ram:
                yield {}, dense.flash
                return
            if costs is not None:
                choice = costs.widths(1.0, factor)
                flash = costs.share_of_bytes(choice) * dense.flash
                if flash > self._device.max_flash:
                    yield choice, flash

    def _pack_network(
        self,
        make: "partial[keras.Model]",
        choice: Widths,
        flash: float,
        costs: "MicroCosts | None",
    ) -> None:
        """Tries one network at a density, at a lower one if that is too large, and trained."""
        assert self._device.max_flash is not None
        limit = self._device.max_flash - self._device.decode_code
        sizes = [weight.size for weight in _packable(make())]
        entries = sum(sizes)
        if not entries:
            return
        saved = flash + _ADDED * len(sizes) - limit
        density = min(_SAVED - saved / entries, _HIGHEST_DENSITY)
        name = "dense"
        if choice and costs is not None:
            name = f"narrowed to {costs.share_of_bytes(choice):.2g}"
        for _ in range(_PACKINGS):
            if density < _LEAST_DENSITY or self._trials.is_late():
                return
            make_pruned = partial(self._pruned_network, make, density)
            trial, _ = self._trials.make(
                f"{name}, density {density:.2g}",
                make_pruned,
                None,
                _ROUTE,
                choice,
            )
            if trial.micro is None:
                return
            if self._trials.fits(trial):
                self._train(Attempt(trial, make_pruned, choice))
                return
            excess = self._device.excess(trial.micro)["max_flash"]
            if not excess:  # but too large an arena
                return
            density -= _BEYOND * excess / entries

    def _same_model(self) -> keras.Model:
        return self._trials.model

    def _pruned_network(
        self, make: "partial[keras.Model]", density: float
    ) -> keras.Model:
        """A network pruned at once, but for kernels that are not packed."""
        network = make()
        data = (self._trials.examples.calibration,)
        with without_warnings():
            model = prune(
                network,
                density,
                score="obs",
                budget="error",
                data=data,
                include=[weight.path for weight in _packable(network)],
            )
            # Without batch normalization.
            with contextlib.suppress(NotPrunableError):
                restore_statistics(model, data, reference=network)
        return model


class MicroCosts:
    """The cost of widths for a device: 1 where flash and arena are just within its limits.

    Flash is estimated as proportional to the bytes of the weights; of the arena, what is not
    activations stays as it is in the dense file.

    Args:
        model: Model. The dense one.
        table: WidthTable of the model.
        dense: MicroFigures. Those of its file.
        device: Microcontroller. The limits.
    """

    def __init__(
        self,
        model: keras.Model,
        table: WidthTable,
        dense: MicroFigures,
        device: Microcontroller,
    ) -> None:
        self._table = table
        self._dense = dense
        self._device = device
        self._activations = Activations(model, table.groups)
        self._peak = self._activations.peak({})
        self._bytes = table.cost(cost="bytes")

    def share_of_bytes(self, choice: Widths) -> float:
        """The bytes of the weights, as a share of the dense network's."""
        return self._table.cost(choice, "bytes") / self._bytes

    def widths(self, scale: float, factor: float = 1.0) -> Widths:
        """The widths of least error whose cost is at most `scale`; else the narrowest ones.

        Args:
            scale: float. The cost.
            factor: float. The flash of the device counts so many times.
        """
        cost = self._cost(factor)
        try:
            return self._table.search(at_most=scale, cost=cost)
        except BudgetError:
            return self.narrowest()

    def narrowest(self) -> Widths:
        """The narrowest widths of the table."""
        return self._table.search(error=math.inf)

    def _cost(self, factor: float) -> Costs:
        """The larger of two shares: of the flash that there is, and of the activations."""
        flash_share, peak_share = math.inf, math.inf
        if self._device.max_flash is not None:
            flash_share = factor * self._device.max_flash / self._dense.flash
        if self._device.max_ram is not None:
            others = self._dense.arena - self._peak
            left = max(self._device.max_ram - others, 1.0)
            peak_share = left / self._peak

        def cost(choice: Widths) -> float:
            peak = self._activations.peak(choice) / self._peak
            return max(
                self.share_of_bytes(choice) / flash_share, peak / peak_share
            )

        return cost


def _next_scale(fitting: float, too_large: float, reach: float) -> float:
    """The next cost: between one that fits and one that does not, if both are known."""
    if fitting and math.isfinite(too_large):
        return math.sqrt(fitting * too_large)
    if fitting:
        return fitting / _STEP
    return too_large * min(_BELOW / reach, _STEP)


def _packable(model: keras.Model) -> list[PrunableWeight]:
    """The kernels that are pruned to be packed."""
    kernels = []
    for weight in prunable_weights(model):
        if not isinstance(weight.owner, _DENSE_LAYERS):
            kernels.append(weight)
    return kernels
