"""What a fleet remembers: SQLite state, journal, locks, secrets, and their places on disk."""
