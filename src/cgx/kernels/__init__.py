"""Numeric kernels: they know numbers, tables and keys, and no ranks beyond an index."""
