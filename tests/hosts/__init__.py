"""Faults and differences of several hosts, which are network namespaces (as root, Linux)."""
