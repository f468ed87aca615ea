"""`cgx bench`: how fast the kernels and the all-reduce are here, verified and beside their baselines."""
