"""What runs inside servers of any engine: the guard. Standard library only."""

from pathlib import Path

ALONE = Path(__file__).with_name("alone")
"""On the import path of servers whose interpreter may not have skyctl."""
