"""All that skyctl knows of vLLM and its router: arguments, routes, metrics, dialects, guard."""
