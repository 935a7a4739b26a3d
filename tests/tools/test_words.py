"""The lint of words: each pattern is found in every kind of text, and code is left alone."""

import re

import pytest

from tools import words

pytestmark = pytest.mark.numpy_only

FOUND = {
    "the object comes first": "Of masked entries the values get nothing.",
    "'what' as a noun": "What cannot be on blocks is compact.",
    "a chain of clauses": "A call in which it is drawn, so that it makes the same one.",
    "'is to be'": "The model is to be compiled again.",
    "no term of the field": "Densities that are missed are told.",
    "the verb comes last, or is missing": "Not on blocks, SimpleRNN.",
    "a paraphrase": "Thresholds come about in training.",
    "a number without its zero": "Half of the weights stay at .5 here.",
    "a phrase that readers stumbled over": "Callbacks that log go behind.",
    "an old word": "The masks are drawn anew.",
}
CLEAN = "Masked entries get no gradient. What do they cost? Kernels that do not fit stay dense."


def named(path):
    return [hit.split(": ")[1] for hit in words.hits(path)]


def test_every_pattern_is_found_in_pages_docstrings_comments_and_messages(
    tmp_path,
):
    assert [*FOUND] == [*words.PATTERNS]
    page, code = tmp_path / "page.md", tmp_path / "code.py"
    page.write_text(
        "# What a title says\n\n" + "\n\n".join([CLEAN, *FOUND.values()])
    )
    assert named(page) == [*FOUND]
    page.write_text(
        f"{CLEAN} `What it is`\n\n```python\n# anew\n```\n\n<!-- Of it -->\n"
    )
    assert named(page) == []
    for name, text in FOUND.items():
        for source in (
            f'"""{text}"""',
            f"x = 1\n# {CLEAN}\n# {text}",
            f"raise E(f'{{x}}. {text}')",
        ):
            code.write_text(f"{source}\nanew = ever = 0  # {CLEAN}\n")
            assert named(code) == [name], source
    code.write_text("def told():\n    return 1\n")
    assert named(code) == ["no term of the field"]


def test_a_hit_has_its_place_and_fails_the_lint(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"{CLEAN}\n\n{CLEAN}\nThe masks are drawn\nanew.\n")
    assert words.main([str(page)]) == 1
    assert (
        capsys.readouterr().out
        == f"{page}:3: an old word: The masks are drawn anew.\n"
    )


def test_no_address_of_a_package_registry():
    registries = "|".join(["pypi", "pythonhosted", "npmjs", "anaconda"])
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "examples/**/*.py",
        "benchmarks/*.py",
        "tools/*.py",
    ):
        for path in words.ROOT.glob(pattern):
            found = re.search(
                rf"\b(?:{registries})\.(?:org|com)",
                path.read_text(encoding="utf-8"),
            )
            assert not found, f"{path}: {found}"
