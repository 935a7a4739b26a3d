"""Accuracy over windows of steps."""

import keras


class Progress(keras.callbacks.Callback):
    """Training accuracy in windows of steps: `(last step, accuracy within the window)`.

    In the first epoch every image is new to the network when it is counted, so this is an accuracy
    on unseen images, at no cost.

    Args:
        window: Steps that are averaged.
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.points: list[tuple[int, float]] = []
        self._steps = 0
        self._before = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Metrics begin anew."""
        self._steps, self._before = 0, 0.0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        """Recovers the windows from the running mean of the epoch."""
        assert logs is not None
        self._steps += 1
        if self._steps % self.window == 0:
            total = float(logs["accuracy"]) * self._steps
            self.points.append((self._steps, (total - self._before) / self.window))
            self._before = total
