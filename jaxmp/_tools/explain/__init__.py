"""`explain`: every decision of a plan and its reason, without running the program."""
