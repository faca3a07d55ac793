"""LoRA adapters as versioned artifacts, loaded into running servers without a freeze."""
