"""One pass through everything a fleet is for, as a test that a CI job can run."""
