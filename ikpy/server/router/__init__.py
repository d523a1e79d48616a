"""Several models behind one port: a process for each, started when it is asked for."""

NO_MEMORY = 12
"""Exit status of a process that could not load its model for lack of memory, of the machine or of a device."""
