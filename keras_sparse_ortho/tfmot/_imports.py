"""tf_keras and tensorflow-model-optimization, imported without touching what `tf.keras` is."""

import os
from typing import Any


def _import() -> tuple[Any, Any]:
    try:
        import tensorflow as tf

        # TFMOT sets TF_USE_LEGACY_KERAS when it is imported, and `tf.keras` looks at it when it is
        # first used. So it is used now, and the variable is put back below.
        _ = tf.keras.__name__
        before = os.environ.get("TF_USE_LEGACY_KERAS")
        try:
            import tensorflow_model_optimization as tfmot
            import tf_keras
        finally:
            if before is None:
                os.environ.pop("TF_USE_LEGACY_KERAS", None)
            else:
                os.environ["TF_USE_LEGACY_KERAS"] = before
    except ImportError as error:
        raise ImportError(
            "keras_sparse_ortho.tfmot needs tf_keras and tensorflow-model-optimization: "
            "pip install 'keras-sparse-ortho[tfmot]'"
        ) from error
    return tf_keras, tfmot


tf_keras, tfmot = _import()
