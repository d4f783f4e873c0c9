"""When 8 bits pay, chip by chip; and how a chip is named as a target."""
