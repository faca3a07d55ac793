"""The push transaction, from preflight to resume; canary, rolling and colocated pushes."""
