"""The data plane: many requests through the router's URL, none of them lost when cut off."""
