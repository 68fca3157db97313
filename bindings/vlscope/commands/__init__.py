"""The commands, one module each.

A module's docstring is its help: the first line stands in the list of commands, what follows
`Examples:` at the end. `add_arguments(parser)` declares its arguments, `run(arguments)` runs it and
gives its exit code, None for 0. `vlscope.cli.COMMANDS` names the modules.
"""
