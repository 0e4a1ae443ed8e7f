"""Checks of a command line, before anything is built.

Each file covers one subject with ``problems(args)``, which yields one message per problem.
"""
