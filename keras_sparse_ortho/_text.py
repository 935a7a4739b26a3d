"""How text that a file may have brought along is shown: names of layers, tensors and files."""


def printable(text: str, *, keep: str = "") -> str:
    r"""Returns the text with everything that is not printable as a backslash escape.

    A name from a file may hold a line break, which ends a comment in C, or an escape sequence,
    which a terminal obeys. Letters of all scripts stay. Marks for the direction of text are
    escaped.

    Args:
        text: str. A name, or a message with names in it.
        keep: str. Characters that stay although they are not printable, such as `"\n"`.

    >>> printable("b\x1b]0;title")
    'b\\x1b]0;title'
    """
    return "".join(
        character
        if character.isprintable() or character in keep
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def printable_lines(text: str) -> str:
    """Returns a message of one or more lines with everything else escaped; see `printable`."""
    return printable(text, keep="\n\t")
