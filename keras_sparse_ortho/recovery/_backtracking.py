"""Training that goes back to its best values where the loss on held-out rows rises."""

import math
import time
from collections.abc import Mapping, MutableMapping

import keras

from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho._values import assign

STAGES = 12
# Times the least loss: at a high rate it may rise for a while.
_TOLERATED = 1.25
_LOWER = 0.25  # times the rate, after a stage that did harm
_LOWEST = 1e-3  # of the first rate, where training ends
_LEAST_SECONDS = 1e-3  # of all stages, where the time is over before the first


class Backtracking(keras.callbacks.Callback):
    """Goes back to the best values after a stage (an epoch of `fit`) of much higher loss.

    The loss is that on held-out rows. The rates of the stages fall as a cosine, and by a factor of
    4 after a stage that was undone. At the end the values are the best ones, too. With the values
    of the model those of the optimizer go back: after a loss that is not finite its moments are not
    finite either. Training ends where the rate has become useless, and where another stage would
    end too late. If stages take longer than the time allows, the rates fall with the time.

    The history has the `learning_rate` of each stage, and `improved`: 1 where the loss was the
    lowest so far, else 0.

    Args:
        student: Model whose values these are; `fit` trains a model around it.
        loss: float. The loss on the held-out rows before training.
        learning_rate: float. The highest rate.
        stages: int. How many epochs there are.
        end: float. When training should end, by `time.monotonic`.
    """

    def __init__(
        self,
        student: keras.Model,
        loss: float,
        learning_rate: float,
        stages: int,
        end: float = math.inf,
    ) -> None:
        super().__init__()
        self._least_loss = math.inf if math.isnan(loss) else loss
        self._student = student
        self._highest_rate = learning_rate
        self._lowest_rate = _LOWEST * learning_rate
        self._stages = stages
        self._end = end
        self._start = self._start_of_stage = time.monotonic()
        self._best: list[tuple[keras.Variable, Tensor]] = []

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        self.model.optimizer.build(self.model.trainable_variables)
        self._note_best()
        self._start = time.monotonic()

    def on_epoch_begin(
        self, epoch: int, logs: Mapping[str, float] | None = None
    ) -> None:
        self._start_of_stage = time.monotonic()
        share = 0.5 * (1.0 + math.cos(math.pi * self._progress(epoch)))
        if epoch == 0:
            share = 0.5  # moments are few
        self.model.optimizer.learning_rate = share * self._highest_rate

    def on_epoch_end(
        self, epoch: int, logs: MutableMapping[str, float] | None = None
    ) -> None:
        assert logs is not None  # of Keras' `fit`
        loss = logs["val_loss"]
        improves = loss < self._least_loss
        # Keras' history and progress come after, and have these, too.
        logs["learning_rate"] = float(self.model.optimizer.learning_rate)
        logs["improved"] = float(improves)
        is_last = epoch + 1 == self._stages or self._is_late(epoch)
        if is_last:
            self.model.stop_training = True
        if improves:
            self._least_loss = loss
            self._note_best()
            return
        if loss < _TOLERATED * self._least_loss and not is_last:
            return
        for variable, value in self._best:
            # A copy: on JAX `fit` frees the arrays that variables have.
            assign(variable, keras.ops.copy(value))
        self._highest_rate *= _LOWER
        if self._highest_rate < self._lowest_rate:
            self.model.stop_training = True

    def _progress(self, epoch: int) -> float:
        """The share of the stages that are done, or that of the time if it is larger."""
        seconds = max(self._end - self._start, _LEAST_SECONDS)
        share_of_time = (self._start_of_stage - self._start) / seconds
        return min(max(epoch / self._stages, share_of_time), 1.0)

    def _is_late(self, epoch: int) -> bool:
        """Whether the next stage would end too late."""
        now = time.monotonic()
        if epoch == 0:  # it compiled, and says nothing about the next one
            return now > self._end
        return now + (now - self._start_of_stage) > self._end

    def _note_best(self) -> None:
        variables = [*self._student.variables, *self.model.optimizer.variables]
        # As tensors: what compact storage is given as arrays is checked.
        self._best = [
            (variable, keras.ops.copy(variable.value)) for variable in variables
        ]
