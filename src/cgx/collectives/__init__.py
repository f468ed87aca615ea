"""Compressed collectives: compressors and transports put together, and the pipeline that runs them."""
