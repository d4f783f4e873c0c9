"""What a program computes in which dtype, as a file that a repository keeps and CI compares."""
