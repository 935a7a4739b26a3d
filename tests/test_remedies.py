"""What messages tell users to call exists, and has the arguments that they name."""

import ast
import inspect
import operator
import re
from collections.abc import Iterator
from pathlib import Path

import keras
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import _foreign_names

pytestmark = pytest.mark.numpy_only

ROOT = Path(kso.__file__).parent
ROOMS = [name for name in dir(kso) if inspect.ismodule(getattr(kso, name))]
# Methods and words of messages, with what has them; `None` for functions that users write.
OTHERS = {
    "build": keras.optimizers.Optimizer,
    "compile": keras.Model,
    "load_weights": keras.Model,
    "reset_states": keras.layers.RNN,
    "resolved": kso.schedules.Schedule,
    "set_model": keras.callbacks.Callback,
    "save": keras.Model,
    "summary": keras.Model,
    "update": kso.callbacks.SET,
    "update_stateless": kso.callbacks.SET,
    "EarlyStopping": keras.callbacks,
    "objective": None,
    "law": None,
    "take": None,  # of data sets
}
NOT_PROSE = ("export/_c_array.py", "cli/_main.py")  # C code, and patterns


def messages() -> Iterator[tuple[str, str]]:
    """Place and text of all strings of the package with a space, but for docstrings.

    What follows "Received:" quotes the user.
    """
    for path in sorted(ROOT.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if name in NOT_PROSE:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = list(ast.walk(tree))
        parts = {
            id(v)
            for n in nodes
            if isinstance(n, ast.JoinedStr)
            for v in n.values
        }
        parts |= {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
        for node in nodes:
            text = ""
            if isinstance(node, ast.JoinedStr):
                values = [getattr(part, "value", None) for part in node.values]
                text = "".join(
                    value if isinstance(value, str) else "{}"
                    for value in values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            if id(node) not in parts and " " in text:
                yield f"{name}:{node.lineno}", text.split("Received:")[0]


def found(name):
    """What a name in a message stands for; AttributeError or KeyError if there is nothing."""
    first, _, rest = name.partition(".")
    if first == "keras_sparse_ortho":
        return operator.attrgetter(rest)(kso)
    if first == "keras":
        return operator.attrgetter(rest)(keras)
    # Sparsify.in_place.
    if first in kso.__all__ and rest and first not in ROOMS:
        return operator.attrgetter(rest)(getattr(kso, first))
    if first in ROOMS and rest:
        return operator.attrgetter(rest)(getattr(kso, first))
    last = name.rpartition(".")[2]
    for place in (kso, *(getattr(kso, room) for room in ROOMS)):
        if last in place.__all__:
            return getattr(place, last)
    return OTHERS[last] and getattr(OTHERS[last], last)


def missing(text):
    """Names of a message that do not exist, and arguments that functions in it do not have."""
    wrong = []
    rooms = "|".join(ROOMS)
    dotted = rf"(?<![\w.])(?:keras_sparse_ortho|{rooms})(?:\.\w+)+"
    called = r"(?<![\w.])[A-Za-z_][\w.]*(?=\()"
    for name in {*re.findall(dotted, text), *re.findall(called, text)}:
        try:
            function = found(name)
        except (AttributeError, KeyError):
            wrong.append(name)
            continue
        if (
            function is None
            or not callable(function)
            or text.startswith(f"{name}(")
        ):
            continue  # the last is a repr
        parameters = inspect.signature(function).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        for arguments in re.findall(
            rf"(?<![\w.]){re.escape(name)}\(([^()]*)\)", text
        ):
            given = re.findall(r"(\w+)=", arguments)
            wrong += [
                f"{name}({key}=)" for key in given if key not in parameters
            ]
    return wrong


def arguments():
    """All names of arguments of public functions and classes."""
    for place in (kso, *(getattr(kso, room) for room in ROOMS)):
        for name in place.__all__:
            given = getattr(place, name)
            for function in (
                given,
                *(vars(given).values() if inspect.isclass(given) else ()),
            ):
                if callable(function):
                    try:
                        yield from inspect.signature(function).parameters
                    except ValueError:  # a builtin type
                        continue


def test_functions_and_arguments_in_messages_exist():
    # Keras has these.
    of_keras = {"format", "loss", "return_state", "stateful", "unroll", "x"}
    # Attributes on the page of `write_html`.
    of_html = {"alt", "charset", "content", "lang", "name", "src"}
    known = {*arguments(), *of_keras, *of_html}
    # Which exist elsewhere.
    guesses = {line for line, _ in _foreign_names.STEPS}
    wrong = []
    for place, text in messages():
        if text in guesses:
            continue
        wrong += [f"{place}: {name}" for name in missing(text)]
        options = re.findall(
            r"""(?<![\w.{"'])([a-z_]+)=(?:"|'|True|None|\.\.\.|\w+\()""", text
        )
        wrong += [f"{place}: {name}=" for name in options if name not in known]
    assert not wrong


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (
            "Call keras_sparse_ortho.nothing(model).",
            ["keras_sparse_ortho.nothing"],
        ),
        (
            "Use callbacks.Nothing, or nothing(x).",
            ["callbacks.Nothing", "nothing"],
        ),
        ("Use prune(model, on_collapse=True).", ["prune(on_collapse=)"]),
        ("Use strip(model), prune(model, data=x) or keras.Input(shape).", []),
    ],
)
def test_the_search_finds_what_is_missing(text, wrong):
    assert sorted(missing(text)) == sorted(wrong)
