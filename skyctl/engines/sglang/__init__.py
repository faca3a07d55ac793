"""Everything skyctl knows of SGLang: arguments, routes, metrics, and the keeper of its states."""
