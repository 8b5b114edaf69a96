"""The demo: the whole loop on one machine, over REST, with a report of what came of it."""
