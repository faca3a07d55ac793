"""`skyctl.engines.inside` by a name of its own, for an interpreter that does not have skyctl."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[1])]
