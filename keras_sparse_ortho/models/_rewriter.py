"""How layers of a model are replaced: by cloning where Keras can, else in place."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import (
    Snapshot,
    graph_ends,
    instance_like,
    replace_sublayers,
    sublayers,
    tensors_in_attributes,
)
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.models._copying import (
    Copy,
    build_around,
    copy_names,
    share_initializers,
    twin_of,
    unbuilt_copy,
    without_draws,
)
from keras_sparse_ortho.models._holders import Holders
from keras_sparse_ortho.models._kinds import class_of, is_clonable, is_graph_of_class


@dataclasses.dataclass(frozen=True)
class Replacement:
    """A layer to put in another's place, and what is to be done once the model stands.

    Args:
        layer: The new layer.
        finish: Called without arguments when the new layer has been built.
    """

    layer: Any
    finish: Callable[[], None]


Replace = Callable[[Any, str, Copy], Replacement | None]
"""`(layer, path, copy) -> Replacement | None`."""

Scrub = Callable[[dict[str, Any]], dict[str, Any]]
"""What is to be changed in the configuration of every cloned layer."""


class Rewriter:
    """Replaces layers of one model; see `rewrite`.

    Args:
        model: The model.
        replace: See `rewrite`.
        scrub: See `Scrub`.
    """

    def __init__(self, model: Any, replace: Replace, scrub: Scrub) -> None:
        self._replace = replace
        self._scrub = scrub
        self._holders = Holders(model)
        self._made: dict[int, Any] = {}
        self._new: dict[int, Any] = {}
        self._finishes: list[Callable[[], None]] = []
        self._snapshots: list[Snapshot] = []
        self._starts: list[Callable[[], None]] = []
        self._twins: dict[int, Any] = {}
        self.rebuilt: list[Any] = []

    def model(self, model: Any, prefix: str) -> Any:
        """The new model: a clone, or the model itself with other layers in it."""
        if is_clonable(model):
            return self._clone(model, prefix)
        if is_graph_of_class(model):
            return self._rebuild(model, prefix)
        self._snapshots.append(Snapshot(model))
        self._change_inside(model, prefix)
        self.rebuilt.append(model)
        return model

    def undo(self) -> None:
        """Puts models that were changed in place back as they were."""
        while self._snapshots:
            self._snapshots.pop().restore()

    def finish(self) -> None:
        """Does what was left until the model stands; more may come up in doing so."""
        for give_back in self._starts:
            give_back()
        while self._finishes:
            self._finishes.pop(0)()

    def _clone(self, model: Any, prefix: str) -> Any:
        # Keras would compile the clone as well: an optimizer, whose slots go into every file.
        compiled, model.compiled = model.compiled, False
        try:
            return keras.models.clone_model(
                model, clone_function=lambda layer: self.cloned(layer, f"{prefix}{layer.name}")
            )
        finally:
            model.compiled = compiled

    def _rebuild(self, model: Any, prefix: str) -> Any:
        """A model of the same class on a clone of the graph, with clones in its attributes."""
        if any(id(layer) not in self._twins for layer in model.layers):
            self.reuse(model, twin_of(model))
        kept = tensors_in_attributes(model)
        inputs, outputs = graph_ends(model)
        graph = keras.Model(inputs, [outputs, kept], name=model.name)
        clone = self._clone(graph, prefix)
        outputs, tensors = clone.output
        partners = {id(old): new for old, new in zip(kept, tensors, strict=True)}

        def partner(value: Any) -> Any:
            if id(value) in partners:
                return partners[id(value)]
            if isinstance(value, keras.KerasTensor) or not value.weights:
                return self._made.get(id(value), value)  # preprocessors: nothing to be copied
            return self._off_graph(value, prefix)

        new = instance_like(model, class_of(model), clone.input, outputs, partner)
        self.rebuilt.append(new)
        return new

    def reuse(self, model: Any, twin: Any) -> None:
        """Lets the layers of a model of the same structure be the clones that are made.

        Models of a class of their own are saved by the arguments of its constructor, and the
        configurations of the layers that it makes need not be complete.
        """
        if twin is None:
            return
        layers, others = (
            [layer for layer, _ in walk(root, "") if not _is_between(layer)]
            for root in (model, twin)
        )
        if len(layers) == len(others):
            for layer, other in zip(layers, others, strict=True):
                if type(layer) is type(other) and not isinstance(layer, keras.Model):
                    self._twins[id(layer)] = other

    def _off_graph(self, layer: Any, prefix: str) -> Any:
        """What stands for a layer that is kept in an attribute, perhaps only there."""
        known = id(layer) in self._made
        new = self.cloned(layer, f"{prefix}{layer.name}")
        if not known and not new.built:
            new.build_from_config(layer.get_build_config())
        return new

    def cloned(self, layer: Any, path: str) -> Any:
        """What stands for a layer in models that are cloned."""
        if id(layer) in self._made:
            return self._made[id(layer)]
        copy = _Cloning(self, path)
        if isinstance(layer, keras.Model):
            # Not by clone_model's `recursive`, which does not tell where a model stands.
            new = self.model(layer, f"{path}/")
        elif (replacement := self._replace(layer, path, copy)) is not None:
            new = replacement.layer
            self._finishes.append(replacement.finish)
        else:
            new = copy(layer)
            self._finishes.append(lambda: self._finish_copy(layer, new, copy, f"{path}/"))
        return self._note(layer, new)

    def changed(self, layer: Any, path: str) -> Any:
        """What stands for a layer in models that are changed in place."""
        if id(layer) in self._made:
            return self._made[id(layer)]
        if id(layer) in self._new:
            return layer  # it has been put there
        if isinstance(layer, keras.Model):
            new = self.model(layer, f"{path}/")
        elif (replacement := self._replace(layer, path, _Keeping(self, path))) is not None:
            new = replacement.layer
            self._finishes.append(replacement.finish)
        else:
            self._change_inside(layer, f"{path}/")
            new = layer
        return self._note(layer, new)

    def _note(self, layer: Any, new: Any) -> Any:
        self._made[id(layer)], self._new[id(new)] = new, new
        return new

    def clone_of(self, layer: Any, path: str, ties: list[tuple[Any, Any]]) -> Any:
        """An unbuilt clone. In `ties` go layers inside that others hold, too, and the new ones."""
        if id(layer) in self._twins:
            clone = self._twins[id(layer)]
        else:
            clone = unbuilt_copy(layer, self._scrub)
            if isinstance(clone, keras.layers.Layer):
                self._starts.append(without_draws(clone))
        if isinstance(layer, keras.layers.Layer):
            if clone.name != layer.name:
                clone.name = layer.name  # a class of someone's own may leave it out
            copy_names(layer, clone)
            self._tie(layer, layer, clone, f"{path}/", ties)
        return clone

    def _tie(self, top: Any, old: Any, new: Any, prefix: str, ties: list[tuple[Any, Any]]) -> None:
        """Puts into `new` what stands for those layers in `old` that are not inside `top` alone."""
        replacements: dict[int, Any] = {}
        for theirs, ours in zip(sublayers(old), sublayers(new), strict=False):
            path = f"{prefix}{theirs.name}"
            if self._holders.is_inside(theirs, top):
                self._tie(top, theirs, ours, f"{path}/", ties)
                continue
            new_one = self.cloned(theirs, path)
            build_around(new_one)
            ties.append((theirs, new_one))
            if new_one is not ours:
                replacements[id(ours)] = new_one
        if replacements:
            self._put(new, replacements)

    def _finish_copy(self, old: Any, new: Any, copy: Copy, prefix: str) -> None:
        if not isinstance(old, keras.layers.Layer):
            return  # an operation of keras.ops
        copy_names(old, new)
        for theirs, ours in zip(copy.own(old.weights), copy.own(new.weights), strict=True):
            assign(ours, keras.ops.copy(theirs))  # on JAX `fit` frees the arrays of its model
        if old.weights:
            share_initializers(old, new)
        self._change_inside(new, prefix)

    def _change_inside(self, parent: Any, prefix: str) -> None:
        """Replaces layers below `parent`, a layer or model whose structure is Python code."""
        replacements: dict[int, Any] = {}
        for layer in sublayers(parent):
            new = self.changed(layer, f"{prefix}{layer.name}")
            if new is not layer:
                replacements[id(layer)] = new
        if not replacements:
            return
        self._put(parent, replacements)
        for name in ("train_function", "test_function", "predict_function"):
            if getattr(parent, name, None) is not None:
                setattr(parent, name, None)  # compiled with the layers that were there before

    def _put(self, parent: Any, replacements: dict[int, Any]) -> None:
        replace_sublayers(parent, replacements)
        missed = [layer.name for layer in sublayers(parent) if id(layer) in replacements]
        if missed:
            raise NotPrunableError(
                f"The layers {missed} of '{parent.name}' cannot be replaced: they must stand in "
                "attributes of it, or in lists, tuples, sets or dicts there. Wrap them where the "
                "class makes them, by keras_sparse_ortho.PrunableLayer(layer, ...). "
                f"Received: {type(parent).__name__}"
            )


def _is_between(layer: Any) -> bool:
    """Whether a layer holds no place of its own in what the constructor of a class makes."""
    return isinstance(layer, keras.layers.InputLayer) or hasattr(layer, "transparent_path")


class _Cloning:
    """`Copy` where the model is cloned."""

    def __init__(self, rewriter: Rewriter, path: str) -> None:
        self._rewriter = rewriter
        self._path = path
        self._ties: list[tuple[Any, Any]] = []

    def __call__(self, layer: Any) -> Any:
        return self._rewriter.clone_of(layer, self._path, self._ties)

    def own(self, weights: list[Any]) -> list[Any]:
        tied = {id(v) for pair in self._ties for layer in pair for v in layer.weights}
        return [variable for variable in weights if id(variable) not in tied]


class _Keeping:
    """`Copy` where the model is changed in place."""

    def __init__(self, rewriter: Rewriter, path: str) -> None:
        self._rewriter = rewriter
        self._path = path

    def __call__(self, layer: Any) -> Any:
        # Of what is inside, layers that others hold, too, may be replaced on their own.
        self._rewriter._change_inside(layer, f"{self._path}/")
        return layer

    def own(self, weights: list[Any]) -> list[Any]:
        return weights
