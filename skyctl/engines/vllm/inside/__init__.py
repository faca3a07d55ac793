"""What runs in vLLM's own processes: guard, weight receivers, digests."""
