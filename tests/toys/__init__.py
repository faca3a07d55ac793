"""An engine and a launcher of another package, as docs/adding.md explains them."""
