"""What applies to a fleet with or without a supervisor: plan, verbs, jobs, diagnosis, recovery."""
