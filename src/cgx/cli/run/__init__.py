"""`cgx run`: torchrun, whose script's DDP models are compressed."""
