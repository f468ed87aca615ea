"""`cgx doctor`: what this machine offers cgx, and whether cgx computes rightly on it."""
