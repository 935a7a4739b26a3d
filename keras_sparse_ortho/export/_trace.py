"""Write a Keras model as a SavedModel with static shapes and named inputs and outputs."""

from typing import Any

import keras

from keras_sparse_ortho.export._structure import leaves, pack


def write_saved_model(
    model: keras.Model,
    inputs: list[dict[str, Any]],
    skeleton: Any,
    output_names: list[str],
    folder: str,
) -> None:
    """Trace `model` for inference; needs the TensorFlow backend.

    Args:
        model: A built Keras model without wrappers of ours.
        inputs: Name, shape (batch first) and dtype of each input.
        skeleton: Nesting of the inputs, see `_structure`.
        output_names: A name for each output.
        folder: Where to write the SavedModel.
    """
    import tensorflow as tf

    def serve(*flat: Any) -> dict[str, Any]:
        outputs = model(pack(skeleton, flat), training=False)
        return dict(zip(output_names, (tensor for _, tensor in leaves(outputs)), strict=True))

    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint(
        "serving_default",
        serve,
        input_signature=[
            tf.TensorSpec(spec["shape"], spec["dtype"], name=spec["name"]) for spec in inputs
        ],
    )
    archive.write_out(folder, verbose=False)
