"""The command line `polythink`, a file for each group of commands, and what it shows."""
