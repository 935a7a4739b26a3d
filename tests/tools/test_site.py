"""What the pages are made of: links, names of the API and of files, the reference, notebooks."""

import inspect
import json
import re
from typing import ClassVar

import pytest

import keras_sparse_ortho as kso
from tools import mkdocs_hooks as hooks
from tools import notebooks, site_check
from tools.mutants import PACKAGE, ROOT

pytestmark = pytest.mark.numpy_only


def test_every_public_name_has_a_docstring_and_a_place():
    named = hooks.documented()
    assert {"layers", "callbacks", "tfmot", "errors"} <= set(named)
    for room, names in named.items():
        module = getattr(kso, room)
        assert module.__doc__, room
        assert names, room
        assert sorted(names) == sorted(module.__all__), room
        for name in names:
            thing = getattr(module, name)
            # The site has the others.
            if inspect.isclass(thing) or inspect.isfunction(thing):
                assert (thing.__doc__ or "").strip(), f"{room}.{name}"
    for name in kso.__all__:
        assert hooks.home(name), name


def test_every_public_name_is_on_a_page_besides_the_reference():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = " ".join(
        page.read_text() for page in pages if "reference" not in page.parts
    )
    words = set(re.findall(r"\w+", text))
    rooms = hooks.documented()
    names = {
        *kso.__all__,
        *(name for room in rooms.values() for name in room),
    }
    assert len(kso.__all__) <= 31
    # A new method may have a name. A room with too many of them is several rooms.
    assert max(map(len, rooms.values())) <= 15
    assert not names - words


def test_names_and_links_lead_to_the_site():
    class Page:
        class file:
            src_uri = "tutorials/budgets.md"

        meta: ClassVar = {}

    class Files:
        known = (
            "benchmarks/results/deep.md",
            "budgets.md",
            "examples/wide.md",
            "CHANGELOG.md",
        )

        def get_file_from_path(self, path):
            return path if path in self.known else None

    def shown(text):
        return hooks.on_page_markdown(text, Page, None, Files())

    assert (
        shown("[d](../../benchmarks/results/deep.md)")
        == "[d](../benchmarks/results/deep.md)"
    )
    assert shown("[d](../budgets.md#bounds)") == "[d](../budgets.md#bounds)"
    assert shown("[w](../../examples/wide.py)") == "[w](../examples/wide.md)"
    assert shown("[c](../../CHANGELOG.md)") == "[c](../CHANGELOG.md)"
    assert shown("[p](../../pyproject.toml)") == "p"
    assert shown("[gone](../nowhere.md)") == "[gone](../nowhere.md)"
    assert (
        shown("[a](#there) [b](https://arxiv.org/abs/1)")
        == "[a](#there) [b](https://arxiv.org/abs/1)"
    )
    name = "keras_sparse_ortho.pruning.sparsify"
    assert (
        shown("with `kso.sparsify(model, 0.1)`")
        == f"with [`kso.sparsify(model, 0.1)`][{name}]"
    )
    assert (
        shown("`kso.callbacks.SET`")
        == "[`kso.callbacks.SET`][keras_sparse_ortho.callbacks.SET]"
    )
    assert shown("`kso.nothing`") == "`kso.nothing`"
    code = "```python\nkso.sparsify  # `kso.sparsify` [x](../budgets.md)\n```"
    assert shown(code) == code


def test_what_a_page_would_fetch_is_noticed(tmp_path):
    good = '<a href="https://arxiv.org/abs/1">x</a><script src="a.js"></script><img src="a.png">'
    (tmp_path / "good.html").write_text(good)
    assert site_check.fetched(tmp_path) == []
    bad = '<link rel="stylesheet" href="//fonts.example/f.css"><script src=https://x.example/m.js></script>'
    (tmp_path / "bad.html").write_text(bad)
    assert site_check.fetched(tmp_path) == [
        "bad.html loads //fonts.example/f.css",
        "bad.html loads https://x.example/m.js",
    ]


TOP = ("benchmarks", "docs", "examples", "tests", "tools", PACKAGE)
ROOMS = tuple(
    path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")
)
NAMED = re.compile(
    rf"(?<![\w/.-])(?:\.\./)*((?:{'|'.join(TOP)})/[\w./*-]+|(?:{'|'.join(ROOMS)})/\w+\.py)"
)
# Results; the name in a LiteRT file.
WRITTEN = (
    "benchmarks/out",
    f"{PACKAGE}/1",
)
INVENTED = ("test_release.py", "test_site.py")  # they make folders of their own


def texts():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]
    pages += [*(ROOT / "docs").rglob("*.md"), *(ROOT / "tools").glob("*.toml")]
    code = [file for folder in TOP for file in (ROOT / folder).rglob("*.py")]
    return [file for file in (*pages, *code) if file.name not in INVENTED]


def test_files_that_are_named_exist():
    lost = []
    for file in texts():
        for name in NAMED.findall(file.read_text(encoding="utf-8")):
            path = name.rstrip(".")
            if path.startswith(WRITTEN):
                continue
            if not any(
                any(base.glob(path))
                for base in (ROOT, ROOT / PACKAGE, file.parent)
            ):
                lost.append(f"{file.relative_to(ROOT)}: {path}")
    assert not lost


PAGE = """# A page

See [limits](../limits.md#layers), [below](#end) and [a paper](https://arxiv.org/abs/1).

```python
x = 1
print(x)
```

```text title="Output"
0
```

```sh
ls
```

```python
assert x == 1


print(x)
```
"""


def test_blocks_become_cells_in_order():
    cells = notebooks.notebook(PAGE, "../../docs/tutorials")["cells"]
    assert [cell["cell_type"] for cell in cells] == [
        "markdown",
        "code",
        "markdown",
        "code",
    ]
    text = "".join(cells[0]["source"])
    assert "[limits](../../docs/limits.md#layers)" in text
    assert "[below](#end)" in text
    assert "[a paper](https://arxiv.org/abs/1)" in text
    assert cells[1]["outputs"][0]["text"] == ["0\n"]
    assert "".join(cells[2]["source"]) == "```sh\nls\n```"
    assert "".join(cells[3]["source"]) == "assert x == 1\n\n\nprint(x)"
    assert len({cell["id"] for cell in cells}) == 4


def test_outputs_are_kept_and_a_cell_that_fails_is_noticed(tmp_path):
    path = tmp_path / "page.ipynb"
    path.write_text(json.dumps(notebooks.notebook(PAGE, ".")))
    assert notebooks.run(path)
    page = notebooks.with_outputs(PAGE, json.loads(path.read_text()))
    printed = '```\n\n```text title="Output"\n1\n```\n'
    assert page.count(printed) == 2
    assert page.replace(printed, "```\n") == PAGE.replace(
        printed.replace("1", "0"), "```\n"
    )
    path.write_text(
        json.dumps(notebooks.notebook(PAGE.replace("x == 1", "x == 2"), "."))
    )
    assert not notebooks.run(path)
