"""Inputs that nobody meant: what skyctl reads may be refused, and nothing else may happen."""
