"""What `top` samples: rates, process trees, GPUs, and the router's counters."""
