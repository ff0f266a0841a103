"""What can go wrong in the engine; each message names the field or file and its limit."""


class EngineError(Exception):
    """Base of all errors of this room."""


class ModelFolderError(EngineError):
    """A model folder, or a file that should become one, is missing, damaged or unsupported."""


class StepError(EngineError):
    """A step that cannot be computed as given; nothing was written to the arena."""


class SamplingError(EngineError):
    """A sampling parameter outside its range."""
