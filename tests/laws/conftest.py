"""The laws live in modules that are no tests; their asserts explain themselves all the same."""

import pytest

pytest.register_assert_rewrite("tests.laws.batch", "tests.laws.numbers", "tests.laws.payloads")
