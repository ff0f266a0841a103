"""One module for each benchmark of `moonpool bench`."""
