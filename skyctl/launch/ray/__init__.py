"""Nodes of a Ray cluster: Ray chooses one for each server, and is the way to the agent there."""
