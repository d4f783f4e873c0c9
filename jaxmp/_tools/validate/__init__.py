"""`validate`: trains under float32 and under other policies; is the difference more than chance?"""
