"""Checks of a command line: ``problems(args)`` of each file yields a message per problem."""
