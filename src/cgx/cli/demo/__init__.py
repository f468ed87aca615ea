"""`cgx demo`: two real models, trained over a slow link with and without compression."""
