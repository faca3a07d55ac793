"""Moves a checkpoint's bytes: chunk plan, sender process, readers, and one file per transport."""
