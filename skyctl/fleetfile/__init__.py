"""The fleet file: its schema, loading with line numbers, GPU placement, and a first file."""
