"""Replacing layers in a whole model, or leaving it as it was."""

from collections.abc import Callable
from typing import Any

from keras_sparse_ortho._keras_internals import track_parameters_anew
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.models._rebuilt import mark
from keras_sparse_ortho.models._rewriter import Replace, Rewriter, Scrub

Complete = Callable[[Any], Any]
"""From the new model to the one to hand out, or an error if it is not what it was to be."""


def rewrite(
    model: Any,
    replace: Replace,
    scrub: Scrub = lambda config: config,
    complete: Complete = lambda rewritten: rewritten,
) -> Any:
    """Replaces layers of a model, those of nested models and of blocks included.

    Sequential and functional models are cloned: shared layers stay shared, and layers that are
    not replaced keep copies of their weights. Models written as a class are changed in place, and
    returned: layers in attributes, lists, tuples and dicts are replaced. If anything fails, they
    are as they were.

    Args:
        model: A built model.
        replace: Asked for every layer that is no model itself, outer layers first, and for layers
            inside those that are replaced only if others hold them, too.
        scrub: See `Scrub`.
        complete: See `Complete`.
    """
    rewriter = Rewriter(model, replace, scrub)
    try:
        rewritten = rewriter.model(model, "")
        rewriter.finish()
        for rebuilt in rewriter.rebuilt:
            mark(rebuilt)
        completed = complete(rewritten)
    except BaseException:
        rewriter.undo()
        _track_anew(model)
        raise
    _track_anew(completed)
    return completed


def _track_anew(model: Any) -> None:
    track_parameters_anew([layer for layer, _ in walk(model, "")])
