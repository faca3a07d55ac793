"""The resident process of one fleet: it owns servers and router, and answers on a unix socket."""
