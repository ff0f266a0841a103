"""What becomes of a request: its orders, where they are placed, and their tokens until the last.

Knows no HTTP.
"""
