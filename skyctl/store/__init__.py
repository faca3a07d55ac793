"""What a fleet remembers: SQLite state, journal, locks, secrets, and where they lie on disk."""
