"""Local conditional scores: length generalization in conditional diffusion, reproduced end to end."""

__version__ = "0.1.0"
