"""Several models behind one port: a process for each, started when it is asked for."""
