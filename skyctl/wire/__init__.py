"""What two processes must agree on: their messages, and computations that both make alike."""
