"""What every test shares: reproducible examples, and asserts that explain themselves."""

import os

import pytest
from hypothesis import settings

# Deadlines would be timing assertions. CI draws the same examples each time, so that a red build
# speaks of the change; runs by hand draw new ones.
settings.register_profile("development", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("development"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "development")

pytest.register_assert_rewrite(
    "tests.harness",
    "tests.kernels.compare",
    "tests.laws.batch",
    "tests.laws.numbers",
    "tests.laws.payloads",
)
