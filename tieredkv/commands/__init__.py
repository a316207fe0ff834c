"""The commands of the command line, one module each: `add` its parser, `run` it."""
