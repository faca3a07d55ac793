"""Where a fleet's processes run: spawn, watch, stop."""
