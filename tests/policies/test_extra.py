"""Policies that search need an extra, say so when it is missing, and load it only when they run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cgx.errors import CgxError
from cgx.policies.base import choose
from tests.policies.tables import POLICIES, model_like

_LOADED = """
import sys
import cgx.policies.bayesian, cgx.policies.kmeans, cgx.policies.l_greco, cgx.policies.expected
print([name for name in ("scipy", "sklearn", "torch", "numba") if name in sys.modules])
"""


@pytest.mark.parametrize(("name", "package"), [("kmeans", "sklearn"), ("bayesian", "scipy"), ("bayesian", "sklearn")])
def test_a_missing_extra_is_named(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CgxError, match=rf"{package}.*is not installed: `pip install 'cgx\[adaptive\]'`"):
        choose(POLICIES[name], model_like(5))


def test_importing_policies_loads_nothing_heavy() -> None:
    found = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"
