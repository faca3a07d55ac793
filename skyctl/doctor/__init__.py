"""Checks of the machine, the fleet file and the running fleet, each with its fix.

`facts.py` gathers facts and `examine.py` runs the checks; the checks in `machine.py`,
`fleet_file.py` and `running.py` are pure.
"""
