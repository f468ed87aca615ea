"""Every source file keeps the house rules, and each rule catches what it is for."""

from collections.abc import Callable, Iterator

import pytest

from tests.architecture import sources

Rule = Callable[[str, str], Iterator[str]]


def test_the_package_was_found() -> None:
    assert sources.PACKAGE / "__init__.py" in sources.FILES


@pytest.mark.parametrize("rule", sources.RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("path", sources.FILES, ids=sources.relative)
def test_source_file(path: sources.Path, rule: Rule) -> None:
    faults = list(rule(sources.relative(path), path.read_text(encoding="utf-8")))
    assert not faults, "\n".join(["", *faults, f"The rule: {rule.__doc__}"])


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        pytest.param(sources.header_faults, "core/a.py", "x = 1\n", id="no docstring"),
        pytest.param(sources.header_faults, "core/a.py", '"""Half a\nsentence."""\n', id="wrapped"),
        pytest.param(sources.length_faults, "core/a.py", "#\n" * 401, id="401 lines"),
        pytest.param(sources.print_faults, "torch/a.py", "print(1)\n", id="print"),
        pytest.param(sources.print_faults, "torch/a.py", "log = print\n", id="print by reference"),
        pytest.param(sources.environment_faults, "torch/a.py", "os.getenv('A')\n", id="getenv"),
        pytest.param(sources.environment_faults, "cli/a.py", "os.environ['A']\n", id="one variable"),
        pytest.param(sources.environment_faults, "torch/a.py", "os.environ.copy()\n", id="copy"),
        pytest.param(sources.environment_faults, "cli/a.py", "f('CGX_LOG')\n", id="our variable"),
        pytest.param(sources.environment_faults, "cli/a.py", "from os import environ\n", id="import"),
    ],
)
def test_rule_catches(rule: Rule, name: str, text: str) -> None:
    assert list(rule(name, text))


@pytest.mark.parametrize(
    ("rule", "name", "text"),
    [
        pytest.param(sources.header_faults, "core/a.py", '"""One.\n\nMore."""\n', id="header"),
        pytest.param(sources.length_faults, "core/a.py", "#\n" * 400, id="400 lines"),
        pytest.param(sources.print_faults, "cli/a.py", "print(1)\n", id="print"),
        pytest.param(sources.environment_faults, "core/env.py", "os.getenv('CGX')\n", id="reader"),
        pytest.param(sources.environment_faults, "cli/a.py", "os.environ.copy()\n", id="copy"),
        pytest.param(sources.environment_faults, "testbed/a.py", "{**os.environ}\n", id="spread"),
    ],
)
def test_rule_allows(rule: Rule, name: str, text: str) -> None:
    assert not list(rule(name, text))
