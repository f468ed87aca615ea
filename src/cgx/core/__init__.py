"""Data every layer shares: specs, segment tables, plans, keys and the payload head (standard library and NumPy)."""
