"""The machine that this process runs on: threads, memory and its limits, memory nodes."""
