"""Hugging Face checkpoints: read, check, compare, write them, and make the fleet's own copies."""
