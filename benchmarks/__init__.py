"""Benchmarks anyone can run: each compares with the alternative in the same run."""
