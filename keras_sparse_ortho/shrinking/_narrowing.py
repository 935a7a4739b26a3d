"""Networks of fewer channels: a table of widths, and two bisections on the cost."""

import math
from functools import partial
from typing import NamedTuple

import keras

from keras_sparse_ortho._keras_internals import without_warnings
from keras_sparse_ortho.calibration import WidthTable, widths
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from keras_sparse_ortho.models import channel_groups, strip
from keras_sparse_ortho.pruning import narrow
from keras_sparse_ortho.shrinking._examples import Training
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
# Times the limit: training halves a loss. In runs of ten minutes (real_shrunk.jsonl) it brought 32
# of 63 networks below this within the limit, and 1 of 5 above.
_HOPELESS = 4.0


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
    """Searches for the smallest network that is good: a bisection on its cost, then a second one.

    The first bisects on networks as they are made, which takes little time. The second one trains
    networks that lost too much, and bisects between the smallest good one and the largest without
    hope.

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
        self._choices: list[Widths] = []
        self._untrained: list[Network] = []

    def run(self) -> list[tuple[str, keras.Model]]:
        """The good networks with their names, the smallest last."""
        networks = self._bisect_untrained() + self._bisect_trained()
        if networks and self._gains_by_training(networks[-1].trial):
            smallest = networks[-1]
            training = self._training_of(smallest)
            if training is not None:
                networks[-1] = self._trained(smallest, training)
        return [(network.name, network.model) for network in networks]

    # --- the two bisections -----------------------------------------------------------------------

    def _bisect_untrained(self) -> "list[Network]":
        """The networks that are good without training, the smallest last."""
        networks: list[Network] = []
        too_small, small_enough = 0.0, 1.0
        while _are_apart(too_small, small_enough):
            share = _between(too_small, small_enough)
            if not self._can_narrow_to(share):
                break
            network = self._narrowed_to(share)
            if network is not None and self._trials.is_good(network.trial):
                networks.append(network)
                small_enough = share
            else:
                too_small = share
        return networks

    def _bisect_trained(self) -> "list[Network]":
        """The networks that training makes good, the smallest last."""
        networks: list[Network] = []
        too_small, small_enough = self._shares_to_train()
        while _are_apart(too_small, small_enough):
            network = self._untrained_between(too_small, small_enough)
            if network is None:
                share = _between(too_small, small_enough)
                if not self._can_narrow_to(share):
                    break
                network = self._narrowed_to(share)
                if network is None:
                    too_small = share
                    continue
            if self._trials.is_good(network.trial):
                networks.append(network)
                small_enough = network.share
                continue
            if not self._has_hope(network.trial):
                too_small = network.share
                continue
            training = self._training_of(network)
            if training is None:
                break
            trained = self._trained(network, training)
            if self._trials.is_good(trained.trial):
                networks.append(trained)
                small_enough = network.share
            else:
                too_small = network.share
        return networks

    def _shares_to_train(self) -> tuple[float, float]:
        """The largest share without hope, and the smallest good one, of networks so far."""
        hopeless_shares = [0.0]
        good_shares = [1.0]
        for network in self._untrained:
            if self._trials.is_good(network.trial):
                good_shares.append(network.share)
            elif not self._has_hope(network.trial):
                hopeless_shares.append(network.share)
        return max(hopeless_shares), min(good_shares)

    def _untrained_between(
        self, too_small: float, small_enough: float
    ) -> "Network | None":
        """The network that is nearest to the middle of two shares, if one is between them."""
        middle = _between(too_small, small_enough)
        networks = [
            network
            for network in self._untrained
            if too_small < network.share < small_enough
        ]
        return min(
            networks,
            key=lambda network: abs(network.share - middle),
            default=None,
        )

    # --- one network ------------------------------------------------------------------------------

    def _can_narrow_to(self, share: float) -> bool:
        """Whether a share is large enough and there is time for its network."""
        if share <= _LEAST_SHARE:
            return False
        if self._trials.is_late_to_narrow():
            self._trials.untried.append(f"a network of {share:.2f} of the cost")
            return False
        return True

    def _narrowed_to(self, share: float) -> "Network | None":
        """The network of a share; `None` if it was made before, or cannot be made."""
        choice = self._choice(share)
        if choice is None or choice in self._choices:
            return None
        self._choices.append(choice)
        name = f"narrowed to {share:.2g}"
        make = partial(narrowed, self._trials, self._table, choice)
        trial, model = self._trials.make(name, make, None, self._route, choice)
        if model is None:
            return None
        network = Network(share, name, model, trial)
        self._untrained.append(network)
        return network

    def _choice(self, share: float) -> Widths | None:
        """The widths of least error; `None` if even the narrowest cost more."""
        try:
            return self._table.search(share, cost=self._cost)
        except BudgetError:
            return None

    def _training_of(self, network: "Network") -> Training | None:
        """The training that the time allows; `None` if it allows none."""
        trials = self._trials
        if trials.is_late():
            trials.untried.append(f"{network.name}, trained")
            return None
        forward_seconds = trials.examples.forward_seconds(network.model)
        for seconds in (
            trials.seconds_to_train(),
            trials.most_seconds_to_train(),
        ):
            training = trials.examples.to_train(
                seconds,
                _MOST_PASSES,
                forward_seconds=forward_seconds,
                seed=trials.seed,
                learning_rate=TRAINING_RATE,
            )
            if training is not None:
                return training
        return None

    def _trained(self, network: "Network", training: Training) -> "Network":
        """The network after training, if that makes it better; else as it is."""
        max_drop = self._trials.max_drop
        name = f"{network.name}, trained"
        trial, model = self._trials.make(
            name,
            partial(strip, network.model),  # a copy
            training,
            self._route,
            network.trial.widths,
            was_tried=True,
        )
        share_before = network.trial.share_of_limit(max_drop)
        share_after = trial.share_of_limit(max_drop)
        if model is None or share_after >= share_before:
            return network
        return Network(network.share, name, model, trial)

    def _has_hope(self, trial: Trial) -> bool:
        """Whether a network lost not much more than it may."""
        max_drop = self._trials.max_drop
        return trial.loses_at_most(scaled(max_drop, _HOPELESS))

    def _gains_by_training(self, trial: Trial) -> bool:
        """Whether training may make a good network better: it lost more than a little."""
        if trial.name.endswith("trained"):
            return False
        max_drop = self._trials.max_drop
        return not trial.loses_at_most(scaled(max_drop, _WORTH_TRAINING))


class Network(NamedTuple):
    """A narrower network.

    Attributes:
        share: float. Its cost is at most this share of the dense network's.
        name: str. The name of its trial.
        model: Model.
        trial: Trial.
    """

    share: float
    name: str
    model: keras.Model
    trial: Trial


def _are_apart(too_small: float, small_enough: float) -> bool:
    """Whether a share between two is worth a trial."""
    return small_enough - too_small > _NEAR_ENOUGH * small_enough


def _between(too_small: float, small_enough: float) -> float:
    """The next share of the cost: a half first, then between known ones."""
    if small_enough == 1.0 and too_small == 0.0:
        return _FIRST_SHARE
    if small_enough <= _FIRST_SHARE:
        return math.sqrt(max(too_small, _LEAST_SHARE) * small_enough)
    return 0.5 * (too_small + small_enough)
