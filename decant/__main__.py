"""`python -m decant`, the same as `decant`."""

from decant.command_line import main

main()
