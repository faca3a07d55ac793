"""Hugging Face checkpoints: read, check, compare, write them, and give the fleet its own copies."""
