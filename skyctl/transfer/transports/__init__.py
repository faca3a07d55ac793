"""One module per transport: the parent's half shapes payloads, the sender's half moves bytes."""
