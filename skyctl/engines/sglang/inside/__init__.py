"""What runs in SGLang's server process: `serve` starts it, `keeper` blocks calls that end it."""
