"""Notebooks hold what the tutorials say, and run."""

import json

import pytest

from tools import notebooks

pytestmark = pytest.mark.numpy_only

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
    assert [cell["cell_type"] for cell in cells] == ["markdown", "code", "markdown", "code"]
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
    assert page.replace(printed, "```\n") == PAGE.replace(printed.replace("1", "0"), "```\n")
    path.write_text(json.dumps(notebooks.notebook(PAGE.replace("x == 1", "x == 2"), ".")))
    assert not notebooks.run(path)
