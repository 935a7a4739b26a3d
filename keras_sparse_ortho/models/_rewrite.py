"""Replacing layers in a whole model: by cloning where Keras can, else in place."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import (
    replace_sublayers,
    sublayers,
    track_parameters_anew,
)
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import walk


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A layer to put in another's place, and what is to be done once the model stands.

    Args:
        layer: The new layer.
        finish: Called without arguments when the new layer has been built.
    """

    layer: Any
    finish: Callable[[], None]


Replace = Callable[[Any, str, Callable[[Any], Any]], Replacement | None]
"""`(layer, path, copy) -> Replacement | None`. `copy(layer)` makes the layer to build upon: an
unbuilt clone where the model is cloned, the layer itself where it is changed in place."""

Scrub = Callable[[dict[str, Any]], dict[str, Any]]
"""What is to be changed in the configuration of every cloned layer."""


def rewrite(model: Any, replace: Replace, scrub: Scrub = lambda config: config) -> Any:
    """Replaces layers of a model, those of nested models and of blocks included.

    Sequential and functional models are cloned: shared layers stay shared, and layers that are
    not replaced keep copies of their weights. Models written as a class are changed in place, and
    returned: layers in attributes, lists, tuples and dicts are replaced.

    Args:
        model: A built model.
        replace: Asked for every layer that is no model itself, outer layers first.
        scrub: See `Scrub`.
    """
    rewritten = _Rewriter(replace, scrub).model(model, "")
    track_parameters_anew([layer for layer, _ in walk(rewritten, "")])
    return rewritten


class _Rewriter:
    def __init__(self, replace: Replace, scrub: Scrub) -> None:
        self._replace = replace
        self._scrub = scrub
        self._made: dict[int, Any] = {}

    def model(self, model: Any, prefix: str) -> Any:
        """The new model: a clone, or the model itself with other layers in it."""
        if is_clonable(model):
            return self._clone(model, prefix)
        self._change_inside(model, prefix)
        return model

    def _clone(self, model: Any, prefix: str) -> Any:
        finishes: list[Callable[[], None]] = []

        def clone(layer: Any) -> Any:
            if id(layer) in self._made:
                return self._made[id(layer)]
            path = f"{prefix}{layer.name}"
            if isinstance(layer, keras.Model):
                # Not by clone_model's `recursive`, which does not tell where a model stands.
                new = self.model(layer, f"{path}/")
            elif (replacement := self._replace(layer, path, self._copy)) is not None:
                new = replacement.layer
                finishes.append(replacement.finish)
            else:
                new = self._copy(layer)
                finishes.append(lambda: self._finish_copy(layer, new, f"{path}/"))
            self._made[id(layer)] = new
            return new

        # Keras would compile the clone as well: an optimizer, whose slots go into every file.
        compiled, model.compiled = model.compiled, False
        try:
            copied = keras.models.clone_model(model, clone_function=clone)
        finally:
            model.compiled = compiled
        for finish in finishes:
            finish()
        return copied

    def _copy(self, layer: Any) -> Any:
        config = layer.get_config()
        if isinstance(layer, keras.layers.Lambda):
            # Keras refuses Python code in configurations from elsewhere; this one is the user's.
            return type(layer).from_config(config, safe_mode=False)
        clone = type(layer).from_config(self._scrub(config))
        if isinstance(layer, keras.layers.Layer):
            _copy_names(layer, clone)
        return clone

    def _finish_copy(self, old: Any, new: Any, prefix: str) -> None:
        if not isinstance(old, keras.layers.Layer):
            return  # an operation of keras.ops
        if old.weights:
            new.set_weights(old.get_weights())
            share_initializers(old, new)
        self._change_inside(new, prefix)

    def _change_inside(self, parent: Any, prefix: str) -> None:
        """Replaces layers below `parent`, a layer or model whose structure is Python code."""
        replacements: dict[int, Any] = {}
        originals: dict[int, Any] = {}
        finishes: list[Callable[[], None]] = []
        for layer in sublayers(parent):
            path = f"{prefix}{layer.name}"
            if isinstance(layer, keras.Model):
                new = self.model(layer, f"{path}/")
            elif (replacement := self._replace(layer, path, lambda same: same)) is not None:
                new = replacement.layer
                finishes.append(replacement.finish)
            else:
                self._change_inside(layer, f"{path}/")
                continue
            if new is not layer:
                replacements[id(layer)], originals[id(new)] = new, layer
        if not replacements:
            return
        replace_sublayers(parent, replacements)
        missed = [layer.name for layer in sublayers(parent) if id(layer) in replacements]
        if missed:
            replace_sublayers(parent, originals)  # as it was
            raise NotPrunableError(
                f"The layers {missed} of '{parent.name}' cannot be replaced: they must stand in "
                "public attributes of it, or in lists, tuples or dicts there. Wrap them where the "
                "class makes them, by keras_sparse_ortho.PrunableLayer(layer, ...). "
                f"Received: {type(parent).__name__}"
            )
        for finish in finishes:
            finish()
        for name in ("train_function", "test_function", "predict_function"):
            if getattr(parent, name, None) is not None:
                setattr(parent, name, None)  # compiled with the layers that were there before


def _copy_names(old: Any, new: Any) -> None:
    """Gives layers inside a clone the names that they have in the original.

    Unnamed layers that a block makes in its constructor are numbered anew in every instance, but
    the path of a weight is to be the same in the clone.
    """
    if len(sublayers(old)) != len(sublayers(new)) and old.built and not new.built:
        new.build_from_config(old.get_build_config())  # it makes them when it is built
    for theirs, ours in zip(sublayers(old), sublayers(new), strict=False):
        if type(theirs) is type(ours):
            ours.name = theirs.name
            _copy_names(theirs, ours)


def share_initializers(old: Any, new: Any) -> None:
    """Gives the layers of a copy the initializers of the original, seeds included.

    One without a seed draws another with its copy. So it would no longer be known of the copied
    weights that they are what their initializers leave, and have not been trained.
    """
    for (copied, _), (layer, _) in zip(walk(new, ""), walk(old, ""), strict=False):
        if type(copied) is not type(layer):
            return
        for name, value in vars(layer).items():
            given = isinstance(value, keras.initializers.Initializer)
            # Another type is that of a configuration that was changed on purpose.
            if given and type(vars(copied).get(name)) is type(value):
                setattr(copied, name, value)


def is_clonable(model: Any) -> bool:
    """Whether Keras knows the structure of a model: Sequential and functional ones."""
    # keras.Model(inputs, outputs) makes a Functional, which Keras does not export. A subclass of
    # it has a constructor of its own, which a clone would not call.
    return isinstance(model, keras.Model) and type(model).__name__ in ("Functional", "Sequential")
