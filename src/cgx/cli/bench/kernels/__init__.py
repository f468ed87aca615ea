"""`cgx bench kernels`: encode, decode and fused reduce on one core."""
