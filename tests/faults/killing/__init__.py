"""Kill skyctl's processes at named points, recover, and check the six invariants."""
