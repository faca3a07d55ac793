"""The shared async HTTP core: kept connections, deadlines, fan-out with one outcome per server."""
