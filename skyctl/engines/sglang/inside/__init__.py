"""What runs in SGLang's server process: `serve` starts it, `keeper` keeps calls from ending it."""
