"""Checks of the machine, the fleet file and the running fleet, each with its fix.

Gathering facts is one thing (`facts.py`, `running_facts.py`), judging them another: the checks in
`machine.py`, `fleet_file.py` and `running.py` are pure.
"""
