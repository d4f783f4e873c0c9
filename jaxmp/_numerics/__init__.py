"""What happens to the numbers while a program runs, and whether it learns all the same.

`validate` trains under float32 and under other policies, and says whether the difference is more
than chance. Each tool of this package is a file, or a few with its name in front.
"""
