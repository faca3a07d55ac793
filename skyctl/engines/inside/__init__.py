"""What runs inside servers of any engine: the guard. Standard library only."""
