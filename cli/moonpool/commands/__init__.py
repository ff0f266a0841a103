"""One module for each command of `moonpool`; none imports another, and none imports torch when loaded."""
