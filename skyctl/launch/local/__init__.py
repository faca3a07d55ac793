"""Processes on this machine: spawned in a session of their own, stopped as a whole; ports, logs."""
