"""What a sender on GPUs takes of their memory and of the host's."""

SHARE_OF_FREE = 0.9
"""The share of a GPU's free memory that a sender may take."""
BATCH_BYTES = 256 * 1024 * 1024
"""Parameters are numbered together up to this size."""
PIECE_BYTES = 5 * 1024 * 1024
THREADS = 12
DEPTH = 2
PINNED_BYTES = THREADS * DEPTH * PIECE_BYTES
"""Pinned host memory of a reader with all its threads."""


def fits_whole(whole: int, free: int, reserve: int) -> bool:
    """Whether a checkpoint fits on a GPU with `free` bytes, of which servers that load it there
    take `reserve`.
    """
    return whole <= (free - reserve) * SHARE_OF_FREE
