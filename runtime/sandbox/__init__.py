"""Where the agent's commands run: one protocol, one contract suite, several back ends."""
