"""The fleet file: its schema, the arguments it may set, and loading with line numbers."""
