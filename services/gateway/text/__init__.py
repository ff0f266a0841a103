"""Text in and text out, pure: tokens to characters, stop strings, calls found in words, chat templates.

Knows no request, no message and no connection.
"""
