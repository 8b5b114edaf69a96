"""What runs inside a sandbox: standard library only, few imports, no other part of Noria.

This folder is bound read-only into every sandbox and started by the sandbox's own Python, so it
must import in milliseconds (no `typing`, `json`, `signal`, `contextlib`) and trust nothing it finds
in the workspace. The host imports `wire` and `bounds` from here, and nothing else.
"""
