"""Parts of configurations, which may come from anybody, made into objects by Keras."""

from typing import Any

import keras

from keras_sparse_ortho._checks import told


def restored(value: Any, custom_objects: dict[str, Any] | None = None) -> Any:
    """What Keras makes of a part of a configuration.

    Raises:
        ValueError, TypeError: What is no configuration; Keras raises errors of other kinds, too.
    """
    try:
        return keras.saving.deserialize_keras_object(value, custom_objects=custom_objects)
    except (ValueError, TypeError):
        raise
    except Exception as error:
        raise ValueError(
            "A part of the configuration cannot be restored: the file was written by something "
            f"else, or is damaged. Received: {told(value)}, {type(error).__name__}: {error}"
        ) from error
