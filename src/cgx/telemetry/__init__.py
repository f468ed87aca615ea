"""What a session counts and how it is summarised; knows neither torch nor kernels."""
