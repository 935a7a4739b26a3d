"""`LiteRTModel`: an open LiteRT file."""

from typing import Any

import numpy as np

from keras_sparse_ortho.export._signature import InputSpec, Signature


class LiteRTModel:
    """An open LiteRT file, made by `load_litert`.

    Attributes:
        route: Name of the route of its export; None for a file of another origin.
        model_name: Name of the Keras model it was made of; likewise.
        xnnpack: Whether the interpreter uses XNNPACK.
        inputs: Name, static shape and dtype of each input.
        output_names: Names of the outputs.
        measure: Measure of the difference from Keras, see `export_litert`.
        tolerance: What was allowed of it.

    Limits: One instance is for one thread at a time, as the interpreter is.
    """

    def __init__(self, content: bytes, record: dict[str, Any], threads: int = 1) -> None:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        self.route: str | None = record.get("route")
        self.model_name: str | None = record.get("model")
        self.xnnpack = bool(record["xnnpack"])
        self.inputs = tuple(
            InputSpec(spec["name"], tuple(spec["shape"]), spec["dtype"])
            for spec in record["inputs"]
        )
        self.output_names: list[str] = [output["name"] for output in record["outputs"]]
        self.measure: str = record.get("measure", "rms")
        self.tolerance = float(record.get("tolerance", 0.1))
        resolver = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        interpreter = Interpreter(
            model_content=content,
            num_threads=threads,
            experimental_op_resolver_type=OpResolverType.AUTO if self.xnnpack else resolver,
        )
        self._runner = interpreter.get_signature_runner()
        # In the order of the record, whatever nesting the Keras model had: a dict or a list.
        count = len(self.inputs)
        self._signature = Signature(self.inputs, list(range(count)) if count > 1 else 0)

    @property
    def batch_size(self) -> int:
        """Rows that the file takes at once; `predict` takes any number."""
        return self.inputs[0].shape[0]

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs, in the order in which `predict` takes them in a list."""
        return [spec.name for spec in self.inputs]

    def predict(self, x: Any) -> Any:
        """The outputs on any number of rows, batch by batch.

        Args:
            x: An array `(rows, *input shape)`; several inputs as a dict by name or as a list in
                the order of `inputs`.

        Returns:
            An array `(rows, *output shape)`, or a dict by name if there are several outputs.

        Raises:
            ValueError: if a name, a shape, a dtype or the number of rows does not fit.
        """
        found = self.predict_dict(x)
        return next(iter(found.values())) if len(found) == 1 else found

    def predict_dict(self, x: Any) -> dict[str, np.ndarray]:
        """As `predict`, but always a dict by the name of the output."""
        arrays = self._signature.flatten(x, "x")
        rows, size = len(arrays[0]), self.batch_size
        pieces: dict[str, list[np.ndarray]] = {name: [] for name in self.output_names}
        for start in range(0, rows, size):
            batch = {}
            for name, array in zip(self.input_names, arrays, strict=True):
                part = array[start : start + size]
                missing = size - len(part)
                batch[name] = np.concatenate([part, *[part[-1:]] * missing]) if missing else part
            found = self._runner(**batch)
            for name, collected in pieces.items():
                collected.append(np.array(found[name]))  # the interpreter reuses its memory
        return {name: np.concatenate(collected)[:rows] for name, collected in pieces.items()}

    def __repr__(self) -> str:
        inputs = ", ".join(f"{s.name}: {s.dtype}{list(s.shape)}" for s in self.inputs)
        return (
            f"LiteRTModel(route={self.route!r}, xnnpack={self.xnnpack}, inputs=[{inputs}], "
            f"outputs={self.output_names})"
        )
