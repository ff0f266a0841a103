"""What can go wrong with a structure; each message says what is wrong with the spec, or names the limit."""


class StructureError(Exception):
    """A structure that no answer can be held to, or a token that it does not allow."""


class StructureBusyError(Exception):
    """Too many structures wait to be compiled; worth another try."""
