"""Processes on other machines, reached by ssh: an agent there, a tether here for each server."""
