"""The stages of a cycle, by quarter of the wheel: lessons, practice, learning, judgement."""
