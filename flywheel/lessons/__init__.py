"""Lessons: runs that failed become tasks worth practising on, validated before they count."""
