"""The CI test of a whole fleet: one pass through everything a fleet is for."""
