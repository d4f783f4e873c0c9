"""What a program needs on chips that are not there: it is compiled for them."""
