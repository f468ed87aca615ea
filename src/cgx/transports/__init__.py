"""Transports move bytes between ranks; they know no numbers."""
