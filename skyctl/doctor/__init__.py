"""Checks of the machine, the fleet file and the running fleet, each with its fix.

`examine.py` gathers facts (those of the machine by `machine.py`) and runs the checks; the checks in
`machine.py`, `fleet_file.py` and `running.py` are pure.
"""
