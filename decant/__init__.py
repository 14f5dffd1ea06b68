"""What others type: the command line.

Read in this order: `command_line` (which command, errors, exit codes), `processes` (the three long-lived ones), `up` (all three
on one machine), `supervisor` (starting, watching and stopping children), `doctor`, `default_model`.
"""
