"""skyctl: launch, freeze, thaw and re-weight fleets of vLLM servers."""

__version__ = "0.1.0"
