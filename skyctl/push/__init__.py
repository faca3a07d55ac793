"""The push transaction, from preflight to resume; trial, rolling and colocated pushes."""
