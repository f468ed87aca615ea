"""CPU kernels compiled by Numba at first use; the only package that imports numba."""
