"""Compressors: floats to bytes and back for one spec; they know no ranks."""
