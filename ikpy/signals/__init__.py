"""When Ctrl-C and other signals may end work."""
