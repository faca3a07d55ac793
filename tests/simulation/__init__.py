"""The whole control plane in one process: simulated servers, clock, disk, network and deaths.

loop        an asyncio event loop whose time jumps from one timer to the next
kernel      processes: task trees that are dropped without their `finally` blocks
network     requests and answers: delayed, lost, reset, refused
engine      a vLLM server: pause, sleep, update sessions, half-loaded weights
alone       one such server by itself, in real time, for its contract tests
disk        SQLite in memory, full or failing; checkpoint directories that are overwritten
sender      the sender process of a push
seams       where the product asks the time, opens files and starts processes
world       one schedule: what happens, from one seed
checks      what must hold after every step and at the end
reinserted  defects of the past, put back one at a time
"""
