"""Acceptance checks: one file per family, one verdict for production, rollout and evaluation."""
