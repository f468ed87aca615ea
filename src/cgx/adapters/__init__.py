"""Thin adapters for training frameworks: each makes the framework's DDP model, and its checkpoints, know cgx."""
