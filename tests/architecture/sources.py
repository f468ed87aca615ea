"""The source files of cgx as syntax trees, and the rules that no linter of ours knows."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "cgx"
FILES = sorted(PACKAGE.rglob("*.py"))

MAX_LINES = 400
ENVIRONMENT_READER = "core/env.py"
# These start child processes, and may hand the whole environment on.
PROCESS_STARTERS = ("cli/", "testbed/", "cli.py", "testbed.py")
VARIABLE_OF_OURS = re.compile(r"CGX(_[A-Z0-9_]+)?")


def relative(path: Path) -> str:
    """Return a source file's name as the rules and the test ids spell it, e.g. `core/env.py`."""
    return path.relative_to(PACKAGE).as_posix()


def header_faults(name: str, text: str) -> Iterator[str]:
    """A module opens with one sentence on its first line, saying what it is for."""
    docstring = ast.get_docstring(ast.parse(text, filename=name))
    if not docstring:
        yield f"{name}: no module docstring"
        return
    first, _, rest = docstring.partition("\n")
    if not first.endswith(".") or (rest and rest.splitlines()[0].strip()):
        yield f"{name}: the docstring's first line is not one whole sentence: {first!r}"


def length_faults(name: str, text: str) -> Iterator[str]:
    """A file that outgrows a few screens holds two things."""
    count = len(text.splitlines())
    if count > MAX_LINES:
        yield f"{name}: {count} lines, more than {MAX_LINES}"


def print_faults(name: str, text: str) -> Iterator[str]:
    """Only the command line talks to people; the library returns, raises or logs."""
    if name.startswith(("cli/", "cli.py")):
        return
    for node in ast.walk(ast.parse(text, filename=name)):
        if isinstance(node, ast.Name) and node.id == "print":
            yield f"{name}:{node.lineno}: print, below the command line"


def environment_faults(name: str, text: str) -> Iterator[str]:
    """Variables are read, and ours are named, in one file; processes inherit the environment whole.

    The one other use is a copy of all of it, `os.environ.copy()` or `{**os.environ, ...}`, in the
    packages that start processes. Spelling one of our variables anywhere else is refused too, or a
    copy would be a way round the rule.
    """
    if name == ENVIRONMENT_READER:
        return
    tree = ast.parse(text, filename=name)
    copies = set(_whole_copies(tree)) if name.startswith(PROCESS_STARTERS) else set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(
                value=ast.Name(id="os"),
                attr="environ" | "environb" | "getenv" | "getenvb" | "putenv" | "unsetenv",
            ) if node not in copies:
                yield f"{name}:{node.lineno}: os.{node.attr}, outside {ENVIRONMENT_READER}"
            case ast.ImportFrom(module="os", names=names):
                for alias in names:
                    if "env" in alias.name:
                        yield f"{name}:{node.lineno}: from os import {alias.name}"
            case ast.Constant(value=str(value)) if VARIABLE_OF_OURS.fullmatch(value):
                yield f"{name}:{node.lineno}: {value!r}, named outside {ENVIRONMENT_READER}"


def _whole_copies(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=environ, attr="copy")):
                yield environ
            case ast.Dict(keys=keys, values=values):
                yield from (value for key, value in zip(keys, values, strict=True) if key is None)


RULES = (header_faults, length_faults, print_faults, environment_faults)
