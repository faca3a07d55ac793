"""The data plane: many requests through the router's URL, none is lost to a cut."""
