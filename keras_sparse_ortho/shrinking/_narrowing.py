"""Networks of fewer channels: a table of widths, and a bisection on the cost."""

import math
from functools import partial
from typing import NamedTuple

import keras

from keras_sparse_ortho._keras_internals import without_warnings
from keras_sparse_ortho.calibration import WidthTable, widths
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from keras_sparse_ortho.models import channel_groups, strip
from keras_sparse_ortho.pruning import narrow
from keras_sparse_ortho.shrinking._max_drop import scaled
from keras_sparse_ortho.shrinking._shrink_report import Trial
from keras_sparse_ortho.shrinking._trials import Trials, Widths, shortly
from keras_sparse_ortho.shrinking._width_shares import WidthShares

_FIRST_SHARE = 0.5  # of the cost of the dense network
_LEAST_SHARE = 0.02
_TABLE_SHARE = 0.5  # of the time that is left, for the table of widths
_NEAR_ENOUGH = 0.08  # between a share that is good and one that is not, relative to the first
_MOST_PASSES = 50
# Lower where it does harm on held-out examples.
TRAINING_RATE = 3e-3
# A share of the limit: where less was lost, training gains little.
_WORTH_TRAINING = 0.25
# Times the limit: training brought a ResNet-8 from 5 points to 1.5, hardly any from further.
_HOPELESS = 5.0


def width_table(trials: Trials) -> WidthTable | None:
    """The errors of widths; `None` for a model of which nothing can be narrowed.

    It leaves the time that the first narrower network takes. A table in less time than a dense file
    is not worth it.
    """
    left = trials.seconds_left()
    seconds = min(_TABLE_SHARE * left, left - trials.narrowing_seconds())
    if seconds <= trials.dense_seconds():
        _note_table(trials)
        return None
    trials.say("a table of widths")
    try:
        with without_warnings():
            return widths(
                trials.model,
                trials.examples.calibration,
                minutes=seconds / 60.0,
            )
    # Any: there are other networks, and the dense files.
    except Exception as error:
        trials.made.append(Trial("narrowed", "", reason=shortly(error)))
        return None


def _note_table(trials: Trials) -> None:
    """Notes that there was no time for a table of widths, or why more would not help."""
    try:
        channel_groups(trials.model)
    except NotPrunableError as error:
        trials.made.append(Trial("narrowed", "", reason=shortly(error)))
    else:
        trials.untried.append("a table of widths")


def narrowed(trials: Trials, table: WidthTable, choice: Widths) -> keras.Model:
    """The network of some widths, refitted on the examples that calibrate."""
    with without_warnings():
        return narrow(
            trials.model,
            choice,
            data=trials.examples.calibration,
            table=table,
        )


class Narrowing:
    """Bisects on the cost of the network, for the smallest one that is good.

    Args:
        trials: Trials. Where files are made.
        table: WidthTable of the dense model.
        prefer: str. The cost that falls: `"bytes"`, `"ms"` or `"both"`.
        route: str. The route of the files.
    """

    def __init__(
        self, trials: Trials, table: WidthTable, prefer: str, route: str
    ) -> None:
        self._trials = trials
        self._table = table
        self._cost = WidthShares(table).preferred(prefer)
        self._route = route

    def run(self) -> list[tuple[str, keras.Model]]:
        """The good networks with their names, the smallest last."""
        networks: list[Network] = []
        choices: list[Widths] = []
        too_small, small_enough = 0.0, 1.0
        while small_enough - too_small > _NEAR_ENOUGH * small_enough:
            share = _between(too_small, small_enough)
            if share <= _LEAST_SHARE:
                break
            if self._trials.is_late_to_narrow():
                self._trials.untried.append(
                    f"a network of {share:.2f} of the cost"
                )
                break
            choice = self._choice(share)
            if choice is None or choice in choices:
                too_small = share
                continue
            choices.append(choice)
            network = self._try(share, choice)
            if network is not None and self._trials.is_good(network.trial):
                networks.append(network)
                small_enough = share
            else:
                too_small = share
        if networks and self._gains_by_training(networks[-1].trial):
            networks[-1] = self._trained(networks[-1])
        return [(network.name, network.model) for network in networks]

    def _choice(self, share: float) -> Widths | None:
        """The widths of least error; `None` if even the narrowest cost more."""
        try:
            return self._table.search(share, cost=self._cost)
        except BudgetError:
            return None

    def _try(self, share: float, choice: Widths) -> "Network | None":
        """A network of some widths, refitted and, if it lost too much, trained."""
        trials = self._trials
        name = f"narrowed to {share:.2g}"
        make = partial(narrowed, trials, self._table, choice)
        trial, model = trials.make(name, make, None, self._route, choice)
        if model is None:
            return None
        network = Network(name, model, trial)
        if trials.is_good(trial) or not self._has_hope(trial):
            return network
        return self._trained(network)

    def _trained(self, network: "Network") -> "Network":
        """The network after training, if that makes it better; else as it is."""
        trials = self._trials
        training = trials.examples.to_train(
            trials.seconds_to_train(),
            _MOST_PASSES,
            forward_seconds=trials.examples.forward_seconds(network.model),
            seed=trials.seed,
            learning_rate=TRAINING_RATE,
        )
        if training is None:
            return network
        name = f"{network.name}, trained"
        trial, model = trials.make(
            name,
            partial(strip, network.model),  # a copy
            training,
            self._route,
            network.trial.widths,
            was_tried=True,
        )
        share_before = network.trial.share_of_limit(trials.max_drop)
        share_after = trial.share_of_limit(trials.max_drop)
        if model is None or share_after >= share_before:
            return network
        return Network(name, model, trial)

    def _has_hope(self, trial: Trial) -> bool:
        """Whether a network lost not much more than it may."""
        max_drop = self._trials.max_drop
        return trial.loses_at_most(scaled(max_drop, _HOPELESS))

    def _gains_by_training(self, trial: Trial) -> bool:
        """Whether there is time to train a good network, which lost more than a little."""
        if trial.name.endswith("trained") or self._trials.is_late():
            return False
        max_drop = self._trials.max_drop
        return not trial.loses_at_most(scaled(max_drop, _WORTH_TRAINING))


class Network(NamedTuple):
    """A narrower network.

    Attributes:
        name: str. The name of its trial.
        model: Model.
        trial: Trial.
    """

    name: str
    model: keras.Model
    trial: Trial


def _between(too_small: float, small_enough: float) -> float:
    """The next share of the cost: a half first, then between known ones."""
    if small_enough == 1.0 and too_small == 0.0:
        return _FIRST_SHARE
    if small_enough <= _FIRST_SHARE:
        return math.sqrt(max(too_small, _LEAST_SHARE) * small_enough)
    return 0.5 * (too_small + small_enough)
