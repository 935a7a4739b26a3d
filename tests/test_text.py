"""Names from files in messages: nothing that a terminal or another language would obey."""

import ast
import pathlib
import pickle

import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import errors
from keras_sparse_ortho._text import printable, printable_lines

pytestmark = pytest.mark.numpy_only

ROOT = pathlib.Path(kso.__file__).parent


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("conv[bn]/kernel", "conv[bn]/kernel"),
        ("größe 層 é", "größe 層 é"),
        ("b\x1b]0;title\x1b\\", r"b\x1b]0;title\x1b" + "\\"),
        ("x\nint y; //", r"x\nint y; //"),
        ("right\u202eleft", r"right\u202eleft"),
        ("\x9b31m\x00\x07\r", r"\x9b31m\x00\x07\r"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_only_what_cannot_be_printed_is_escaped(text, shown):
    assert printable(text) == shown
    assert printable(printable(text)) == shown


def test_lines_stay_lines():
    assert (
        printable_lines("one\n\ttwo\x1b[31m\r\n") == "one\n\ttwo\\x1b[31m\\r\n"
    )


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_and_warnings_escape_their_messages(name):
    error = getattr(errors, name)("layer 'a\x1b[31m'\nReceived: b", 3)
    assert error.args == ("layer 'a\\x1b[31m'\nReceived: b", 3)
    assert pickle.loads(pickle.dumps(error)).args == error.args


def test_names_are_quoted_by_repr():
    """`'{name}'` would pass on what is in the name; `{name!r}` does not."""
    passed_on = []
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                passed_on += [
                    f"{path.name}:{node.lineno}"
                    for _ in _bare_between_quotes(node)
                ]
    assert not passed_on


def _bare_between_quotes(node):
    """The values of an f-string in single quotes, without conversion and calls."""
    parts = node.values
    for before, value, after in zip(parts, parts[1:], parts[2:], strict=False):
        if not isinstance(value, ast.FormattedValue) or value.conversion != -1:
            continue
        is_name = isinstance(value.value, ast.Name | ast.Attribute | ast.BoolOp)
        is_class = getattr(value.value, "attr", "") == "__name__"
        quoted = all(isinstance(part, ast.Constant) for part in (before, after))
        quoted = (
            quoted
            and before.value.endswith("'")
            and after.value.startswith("'")
        )
        if is_name and not is_class and not value.format_spec and quoted:
            yield value
