"""Inference engines: everything that is specific to one of them."""
