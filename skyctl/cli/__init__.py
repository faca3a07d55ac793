"""The `skyctl` command: one module per verb or noun; `*_view` modules render results."""
