"""Print pip constraints that pin the lower bounds of pyproject.toml: ``a>=1`` to ``a==1``.

The bounds of the tools (extras ``test``, ``dev``, ``compat``) are left alone: the package must work
with old versions, not its linter.
"""

import re
import tomllib
from pathlib import Path

TOOLS = ("test", "dev", "compat")


def main() -> None:
    """Read pyproject.toml beside this folder and print one constraint a line."""
    project = tomllib.loads(
        (Path(__file__).parents[1] / "pyproject.toml").read_text()
    )["project"]
    extras = project["optional-dependencies"]
    requirements = list(project["dependencies"])
    requirements += [
        r for name, rs in extras.items() if name not in TOOLS for r in rs
    ]
    for requirement in requirements:
        if requirement.startswith(project["name"]):
            continue  # a reference to another extra of ours
        match = re.fullmatch(r"([\w.-]+)>=([\w.]+)(?:,<[\w.]+)?", requirement)
        if match is None:
            rule = "a requirement must read name>=version or name>=version,<version"
            raise SystemExit(f"{rule}. Received: {requirement!r}")
        print("{}=={}".format(*match.groups()))


if __name__ == "__main__":
    main()
