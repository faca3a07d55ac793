"""Processes on other machines, by ssh or by Ray: an agent there, a tether here for each server."""
