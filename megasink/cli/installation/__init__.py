"""What `megasink doctor` finds out about an installation and a machine."""
