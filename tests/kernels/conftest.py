"""Comparisons with the oracle explain themselves."""

import pytest

pytest.register_assert_rewrite("tests.kernels.compare")
