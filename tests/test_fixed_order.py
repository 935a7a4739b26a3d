"""Nothing in the package depends on the order of a set.

A set of strings, or of objects, has another order in each process. Several processes that train one
model gather values together, so all have to ask for them in one order; and an error or a file reads
the same in each run. So a set is sorted before anything iterates over it, but for comparisons
of what is in it alone.
"""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "keras_sparse_ortho"
FILES = sorted(PACKAGE.rglob("*.py"))
SETS = ("set", "frozenset", "AbstractSet", "KeysView")
METHODS = (
    "union",
    "intersection",
    "difference",
    "symmetric_difference",
    "copy",
)
LISTED = (
    "list",
    "tuple",
    "enumerate",
    "iter",
    "map",
    "zip",
    "fromkeys",
    "join",
)
# Calls for which no order counts, if the items are taken as they are.
UNORDERED = (
    "set",
    "frozenset",
    "sorted",
    "len",
    "sum",
    "min",
    "max",
    "any",
    "all",
    "bool",
)


def is_set_annotation(node):
    text = "" if node is None else ast.unparse(node)
    return text.strip("'\"").partition("[")[0].rpartition(".")[2] in SETS


def functions_that_return_sets(tree):
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and is_set_annotation(node.returns)
    }


class Sets:
    """Which expressions of a file are sets, by how names and attributes are assigned."""

    def __init__(self, tree, returning):
        self.returning = returning
        # With their functions: one name may be a list elsewhere.
        self.names = set()
        self.scope_of = {}
        self._note_scopes(tree, tree)
        for _ in range(3):  # a name may be assigned from another one
            for node in ast.walk(tree):
                self._note(node)

    def _note_scopes(self, node, scope):
        self.scope_of[node] = scope
        for child in ast.iter_child_nodes(node):
            is_scope = isinstance(node, ast.FunctionDef | ast.Lambda)
            self._note_scopes(child, node if is_scope else scope)

    def _key(self, node):
        if isinstance(node, ast.Attribute):
            return ast.unparse(node)
        return (
            (self.scope_of[node], node.id)
            if isinstance(node, ast.Name)
            else None
        )

    def _note(self, node):
        match node:
            case ast.arg(annotation=annotation) if is_set_annotation(
                annotation
            ):
                self.names.add((self.scope_of[node], node.arg))
            case ast.AnnAssign(annotation=annotation) if is_set_annotation(
                annotation
            ):
                self.names.add(self._key(node.target))
            case ast.Assign(
                targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)
            ):
                pairs = zip(targets, values, strict=False)
                self.names |= {
                    self._key(target)
                    for target, value in pairs
                    if self.has(value)
                }
            case ast.Assign(targets=targets, value=value) if self.has(value):
                self.names |= {self._key(target) for target in targets}
            case ast.NamedExpr(target=target, value=value) if self.has(value):
                self.names.add(self._key(target))

    def _known(self, node):
        if isinstance(node, ast.Attribute):
            return ast.unparse(node) in self.names
        scope = self.scope_of[node]
        while True:  # names of the functions around, too
            if (scope, node.id) in self.names:
                return True
            if self.scope_of[scope] is scope:
                return False
            scope = self.scope_of[scope]

    def has(self, node):
        match node:
            case ast.Set() | ast.SetComp():
                return True
            case ast.Name() | ast.Attribute():
                return self._known(node)
            case ast.BinOp(
                op=ast.Sub() | ast.BitAnd() | ast.BitOr() | ast.BitXor()
            ):
                return self._is_side(node.left) or self._is_side(node.right)
            case ast.IfExp():
                return self.has(node.body) or self.has(node.orelse)
            case ast.Call(func=ast.Attribute(attr=name, value=value)):
                return name in self.returning or (
                    name in METHODS and self.has(value)
                )
            case ast.Call(func=ast.Name(id=name)):
                return name in (*SETS, *self.returning)
        return False

    def _is_side(self, node):
        """Also the keys of a dict, which have an order, but not in a difference."""
        keys = isinstance(node, ast.Call) and isinstance(
            node.func, ast.Attribute
        )
        return (keys and node.func.attr == "keys") or self.has(node)


def reads_nothing(*nodes):
    """Whether expressions use names and constants alone: no attribute, no call."""
    return not any(
        isinstance(inner, ast.Call | ast.Attribute | ast.Subscript)
        for node in nodes
        for inner in ast.walk(node)
    )


def ordered_uses(tree, sets):
    """The places where a set is iterated in its own order."""
    parents = {
        child: node
        for node in ast.walk(tree)
        for child in ast.iter_child_nodes(node)
    }

    def order_counts(node):
        above = parents.get(node)
        name = (
            above.func.id
            if isinstance(above, ast.Call) and hasattr(above.func, "id")
            else ""
        )
        return name not in UNORDERED

    for node in ast.walk(tree):
        if isinstance(node, ast.For) and sets.has(node.iter):
            yield node
        elif isinstance(node, ast.Starred) and sets.has(node.value):
            if not isinstance(parents[node], ast.Set):
                yield node
        elif isinstance(
            node, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp
        ):
            if not any(sets.has(one.iter) for one in node.generators):
                continue
            parts = [test for one in node.generators for test in one.ifs]
            parts += (
                [node.key, node.value]
                if isinstance(node, ast.DictComp)
                else [node.elt]
            )
            unordered = isinstance(node, ast.SetComp) or not order_counts(node)
            if not (unordered and reads_nothing(*parts)):
                yield node
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            popped = (
                name == "pop"
                and not node.args
                and sets.has(getattr(node.func, "value", None))
            )
            listed = (
                name in LISTED
                and any(map(sets.has, node.args))
                and order_counts(node)
            )
            if popped or listed:
                yield node


def uses(tree, public=frozenset()):
    """The numbers of lines; functions with a name in `public` return sets, too."""
    known = Sets(tree, functions_that_return_sets(tree) | public)
    return [node.lineno for node in ordered_uses(tree, known)]


@pytest.mark.numpy_only
def test_no_set_is_iterated_in_its_own_order():
    trees = {
        file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES
    }
    names = {
        name
        for tree in trees.values()
        for name in functions_that_return_sets(tree)
    }
    public = {name for name in names if not name.startswith("_")}
    found = {
        file.name: lines
        for file, tree in trees.items()
        if (lines := uses(tree, public))
    }
    assert not found


@pytest.mark.numpy_only
@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("for x in {1, 2}: pass", 1),
        ("wrong = {w.path for w in a.keys() - b if w.live}", 1),
        ("names = set(a)\ndef f():\n    return [g(x) for x in names]", 1),
        ("def f(names: set[str]):\n    return {x: read(x) for x in names}", 1),
        ("self.held = set()\nlist(self.held)", 1),
        ("x, y = set(a), b\n[*x]", 1),
        ("text = ', '.join(a.keys() & b)", 1),
        ("names = {1}\nnames.pop()", 1),
        ("def f() -> set[int]: pass\nfor x in f(): pass", 1),
        ("for x in sorted({1, 2}): pass", 0),
        ("for x in a.keys(): pass", 0),
        ("names = set(a)\nany(x in b for x in names)", 0),
        ("names = {*set(a), 1}\nnames |= {x for x in b - names}", 0),
        ("def f():\n    x = {1}\ndef g(x):\n    return [y.a for y in x]", 0),
    ],
)
def test_what_counts_as_such(text, count):
    assert len(uses(ast.parse(text))) == count
