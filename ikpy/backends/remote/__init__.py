"""Hosts that lend memory and processors over the network: both ends of the connection."""
