"""What a program computes in which dtype, what that costs, and which line to blame."""
