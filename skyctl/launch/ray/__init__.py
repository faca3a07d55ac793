"""Nodes of a Ray cluster: Ray chooses one for each server, and connects to the agent there."""
