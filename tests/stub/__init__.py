"""A stand-in for a vLLM server: its control states, deterministic tokens, and faults on order."""
